"""The particle engine: one cycle of every lane by draft, judge, weigh, select, append. Knows no Ψ by name.

It holds the five verbs together; slots, passes, drafting and judging each have their own file.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft, Local
from smcdecode.engine.ahead import Ahead
from smcdecode.engine.checking import Checker
from smcdecode.engine.drafting import Drafter, Stream
from smcdecode.engine.draw import Slant, draw, local_law, log_weight
from smcdecode.engine.endings import Endings
from smcdecode.engine.exponents import Exponents
from smcdecode.engine.guessing import guesser_of
from smcdecode.engine.judging import Judge
from smcdecode.engine.passes import Passes, Stores
from smcdecode.engine.request import Request
from smcdecode.engine.slots import Slots
from smcdecode.engine.stats import Stats
from smcdecode.engine.tuning import Tuner
from smcdecode.engine.twist import Death, Twist
from smcdecode.engine.unread import Unread

__all__ = ["ParticleEngine"]


class ParticleEngine:
    """Lanes of N particles under one SMC method; each lane has a target of its own, all of one model."""

    def __init__(self, method: SMC, stores: Stores, *, lanes: int, max_tokens: int, stats: Stats) -> None:
        self.method, self.stats = method, stats
        spec = method.proposal if isinstance(method.proposal, Draft) else None
        self.spec = spec
        vocabulary = stores.p.vocabulary
        self.passes = Passes(spec.network if spec and not method.overlap else None, stores, stats)  # type: ignore[arg-type]
        self.slots = Slots(lanes, method.slots, max_tokens, stores.prefixes)
        local = method.proposal if isinstance(method.proposal, Local) else Local(check="mask")
        self.exponents = Exponents(self.slots, method.bridge)
        self.twist = Twist(lanes * method.slots, vocabulary, local.check)
        self.endings = Endings(vocabulary, self.slots)
        self.tuner = Tuner(spec, local.ahead, stores.p, self.slots)
        guesser = guesser_of(spec, self.slots, self.passes) if spec else None
        shared = self.slots, self.passes, self.twist, self.endings
        self.drafter: Drafter | Ahead = Drafter(spec, guesser, *shared, self._temperature)
        if spec is None and local.ahead:
            self.drafter = Ahead(*shared)
        self.checker = Checker(local, self.slots, self.twist, self.endings)
        self.judge = Judge(spec.strict if spec else local.ahead > 0, self.slots, self.passes, stats)
        rows = torch.empty(0, vocabulary.size, device=stores.p.layout.device)
        self.bonus_law = rows  # those that slots.next_row points into
        self.deaths: list[list[Death]] = [[] for _ in range(lanes)]
        self._first: list[tuple[Tensor, Tensor]] = []  # lanes just read, and the target's logits behind their prompts
        self._unread = Unread(self.passes)

    # ---- lanes

    def prefill(self, lanes: Sequence[int], requests: Sequence[Request]) -> None:
        """Read the prompts of new requests, once each for target and draft, as far as nobody has read them before.

        Where tokens are guessed ahead their endings wait for the next pass, which reads them along with the guesses.
        """
        index = torch.tensor(lanes)
        first = self.method.population.first if self.method.population else self.slots.N
        readings = self.slots.open(index, requests, self.passes.readers, first)
        self.begin(lanes, requests)
        if isinstance(self.drafter, Ahead):
            self._unread.add(*readings)
        else:
            with self.stats.clock("prefill"):
                self._first.append((index, self.passes.read(readings)))
        self.stats.prompt_tokens += sum(len(request.prompt.tokens) for request in requests)
        self.stats.prompt_tokens_read += len(readings[0].feed.tokens)
        self.tuner.open(index)
        for lane, request in zip(lanes, requests, strict=True):
            self.deaths[lane] = []
            self.endings.stops[lane] = request.stops
            slots = range(lane * self.slots.N, lane * self.slots.N + first)
            self.twist.start(slots, request.prompt, request.target.potentials)
            self.drafter.begin(lane, request.prompt.tokens)
            if self.spec is None and (self.twist.checked[slots[0]] or not self.twist.masked[slots[0]]):
                self.slots.block[lane] = 0  # nothing tells in advance which tokens are few enough to guess

    def begin(self, lanes: Sequence[int], requests: Sequence[Request]) -> None:
        """Some lanes are about to read their prompts; nobody else has to hear of it."""

    def retire(self, lanes: Sequence[int]) -> None:
        """Free everything that some lanes hold."""
        index = torch.tensor(lanes)
        self.slots.close(index)
        self.twist.clear(self.slots.of(index).tolist())

    def close(self) -> None:
        """Nothing is held beyond the lanes."""

    # ---- one cycle

    def extend(self) -> Tensor:
        """Draft, judge and weigh one block in every slot that can write: (S,) float64 increments of log w, (2)–(5)."""
        slots = self.slots
        increments = torch.zeros_like(slots.log_p)
        if self.method.bridge:
            increments += self.exponents.gain(slots.cycle - 1, slots.cycle)
        writing = self.writing
        laws = [self._first_law(increments)] if self._first else [self.bonus_law[:0]]
        if len(writing):
            laws.append(self._write_block(writing, increments, len(laws[0])))
        self.bonus_law = torch.cat(laws) if len(laws) > 1 else laws[0]
        self._bury(increments, "weight zero under the target's law and the masks")
        if self.twist.weighed.numpy().any():
            with self.stats.clock("potentials"):
                self._draw_checked(increments)
                increments += self._weigh()
        increments += slots.settle()
        if self.method.bridge:
            increments += self.exponents.finish()
        return increments

    @property
    def writing(self) -> Tensor:
        """The slots that write on, (n,) int64: they have a last token, or their prompt is read with what they write."""
        begun = self.slots.length.numpy() > 0
        if self._unread:
            begun |= np.isin(self.slots.lane.numpy(), self._unread.lanes.numpy())
        return torch.from_numpy(np.flatnonzero(~self.slots.finished.numpy() & begun))

    def _write_block(self, writing: Tensor, increments: Tensor, offset: int) -> Tensor:
        """One block in every slot of ``writing``; returns the laws of the bonus tokens, rows ``offset`` on."""
        slots = self.slots
        if self.twist.masked.numpy().any():
            self._show(writing[self.twist.masked[writing]])
        with self.stats.clock("draft"):
            block = self.drafter.write(writing)
        block.prompts = self._unread.take()
        with self.stats.clock("score"):
            verdict = self.judge.judge(block, self._slant(writing))
        self.drafter.learn(block, verdict.law, verdict.row)
        self._owe(writing, verdict.log_w, increments)
        self.tuner.learn(writing, verdict)
        slots.write(writing, block.tokens, verdict.kept)
        at, kept, refused = writing.numpy(), verdict.kept.numpy(), verdict.refused.numpy()
        slots.log_p.numpy()[at] += verdict.log_p.numpy()
        slots.cached.numpy()[at] = block.company.length.numpy() + kept - refused
        slots.lag.numpy()[at] = 2 - (refused | (block.count.numpy() == 0))
        slots.next_row.numpy()[at[verdict.bonus.numpy()]] = offset + np.arange(len(verdict.bonus))
        if block.tokens.shape[1]:
            self._mark_finished(torch.from_numpy(at[kept > 0]))
        return verdict.bonus_law

    def _owe(self, writing: Tensor, log_w: Tensor, increments: Tensor) -> None:
        """Weights (n, K+1) of the tokens that some slots are about to write; those of the dead count at once."""
        if not log_w.numpy().any():
            return
        total = log_w.sum(-1)
        increments[writing] = torch.where(torch.isneginf(total), total, increments[writing])
        row, k = ((log_w != 0) & ~torch.isneginf(total)[:, None]).nonzero(as_tuple=True)
        self.slots.owe(writing[row], self.slots.length[writing[row]] + k, log_w[row, k])

    def _first_law(self, increments: Tensor) -> Tensor:
        """Laws of the first tokens: a row a lane, shared by its particles, which draw from it independently."""
        lanes = torch.cat([lanes for lanes, _ in self._first])
        logits = torch.cat([logits for _, logits in self._first])
        self._first = []
        first = lanes * self.slots.N
        states = [self.twist.states[slot] for slot in first.tolist()]
        masked = bool(self.twist.masked[first].any())
        mask = self.twist.masks(states, self.slots.texts(first)) if masked else None
        law, log_z = local_law(logits, self._slant(first), mask, self.passes.p.name)
        slots = self.slots.of(lanes)
        row = torch.arange(len(lanes)).repeat_interleave(self.slots.N)
        slots, row = slots[~self.slots.idle[slots]], row[~self.slots.idle[slots]]
        self.slots.next_row[slots] = row
        increments[slots] += log_z[row]
        return law

    def _mark_finished(self, slots: Tensor) -> None:
        over = self.endings.last(slots).numpy() | (self.slots.left(slots) == 0)
        self.slots.finished.numpy()[slots.numpy()] = over

    # ---- laws

    def _slant(self, slots: Tensor) -> Slant:
        """What the targets of some slots make of the model's logits in this cycle."""
        at = slots.numpy()
        law, masked = self.slots.law.numpy()[self.slots.lane.numpy()[at]], self.twist.masked.numpy()[at]
        return Slant(torch.from_numpy(law), self.exponents.of(slots), torch.from_numpy(masked))

    def _temperature(self, slots: Tensor) -> Tensor:
        """The draft's temperature: as declared, else the target's over the exponent (least variance of the weights)."""
        if self.spec is not None and self.spec.temperature is not None:
            return torch.full((len(slots),), self.spec.temperature, dtype=torch.float64)
        heat = self.slots.law.numpy()[self.slots.lane.numpy()[slots.numpy()], 0]
        return torch.from_numpy(heat) / self.exponents.of(slots)

    # ---- potentials and deaths

    def _weigh(self) -> Tensor:
        """The log ψ of every slot that moved since its potentials last spoke, over the ψ they spoke then, (4)."""
        slots = self.slots
        increments = torch.zeros_like(slots.log_psi)
        moved = (self.twist.weighed & ~slots.dead & (slots.heard < slots.length)).nonzero()[:, 0]
        if not len(moved):
            return increments
        self._show(moved)
        value, killers = self.twist.log_psi(moved.tolist(), slots.finished[moved].tolist())
        gain = value - slots.log_psi[moved]
        dying = torch.isneginf(gain)
        increments[moved[dying]] = -torch.inf
        slots.owe(moved[~dying], slots.length[moved[~dying]] - 1, gain[~dying])
        slots.log_psi[moved] = value
        slots.heard[moved] = slots.length[moved]
        for slot, killer in zip(moved.tolist(), killers, strict=True):
            if killer is not None:
                self._die(slot, killer, self.twist.why(slot, killer, bool(slots.finished[slot])))
        return increments

    def _show(self, slots: Tensor) -> None:
        """Let the potentials read the tokens they have not, EOS excepted."""
        moved = slots[self.slots.seen[slots] < self.slots.length[slots]]
        if not len(moved):
            return
        blocks, fresh = self.slots.unread(moved)
        ends = self.slots.finished[moved] & self.endings.is_eos[self.slots.last(moved)]
        lists = [b[:n] for b, n in zip(blocks.tolist(), (fresh - ends.long()).tolist(), strict=True)]
        self.twist.advance(moved.tolist(), lists)
        self.slots.seen[moved] = self.slots.length[moved]

    def _bury(self, increments: Tensor, cause: str) -> None:
        dying = np.isneginf(increments.numpy()) & ~self.slots.dead.numpy()
        for slot in np.flatnonzero(dying).tolist():
            self._die(slot, cause)

    def _die(self, slot: int, cause: str, why: str | None = None) -> None:
        """A particle of weight zero writes no more and takes no pages; it is replaced at the next resampling."""
        slots, lane = self.slots, slot // self.slots.N
        tokens = tuple(slots.tokens[slot, : int(slots.length[slot])].tolist())
        self.deaths[lane].append(Death(int(slots.cycle[lane]), slot % slots.N, cause, tokens, why))
        slots.dead[slot] = slots.finished[slot] = True
        slots.next_row[slot] = -1

    # ---- select, append

    def select(self, ancestors: Tensor) -> None:
        """Every slot becomes a copy of slot ``ancestors[slot]``, (S,) int64, or idle where that is -1."""
        with self.stats.clock("resampling"):
            idle = (ancestors < 0).nonzero()[:, 0]
            ancestors = torch.where(ancestors < 0, torch.arange(len(ancestors)), ancestors)
            self.slots.select(ancestors)
            self.twist.select(ancestors.tolist())
            if len(idle):
                self.slots.vacate(idle)
                self.twist.clear(idle.tolist())

    def append(self) -> None:
        """Draw the bonus token of every slot that scored one; its log Z is in the weight already, (5)."""
        slots = self.slots
        drawing = torch.from_numpy(np.flatnonzero(slots.next_row.numpy() >= 0))
        if len(drawing):
            law = self.bonus_law[torch.from_numpy(slots.next_row.numpy()[drawing.numpy()])]
            tokens, _ = draw(law, self._bonus_uniform(drawing))
            self._write_one(drawing, tokens, law)
        over = np.flatnonzero(slots.finished.numpy() & (slots.table.used.numpy() > 0))
        if len(over):
            slots.release(over)
        slots.cycle += 1

    def _draw_checked(self, increments: Tensor) -> None:
        """Draw the bonus tokens by checks. Token and weight come together, so it is before resampling: copies share it.

        The weight is a share of the law's, whose log Z is counted already.
        """
        slots = (self.twist.checked & (self.slots.next_row >= 0)).nonzero()[:, 0]
        if not len(slots):
            return
        self._show(slots)
        law = self.bonus_law[self.slots.next_row[slots]]
        tokens, log_w, refusals = self.checker.draw(slots, law.cpu())
        increments[slots] += log_w
        for slot in slots[torch.isneginf(log_w)].tolist():
            self._die(slot, refusals[slot])
        alive = ~torch.isneginf(log_w)
        self._write_one(slots[alive], tokens[alive], law[alive])

    def _write_one(self, slots: Tensor, tokens: Tensor, law: Tensor) -> None:
        """Write a token drawn from a row of ``law`` (n, V) log p^α m into each of some slots."""
        self._count(slots, log_weight(law, tokens))
        self.slots.put(slots, tokens)
        self.slots.next_row.numpy()[slots.numpy()] = -1
        self._mark_finished(slots)

    def _bonus_uniform(self, slots: Tensor) -> Tensor:
        return self.slots.uniform(slots, 0, Stream.BONUS)

    def _count(self, slots: Tensor, log_pa: Tensor) -> None:
        self.slots.log_p.numpy()[slots.numpy()] += log_pa.numpy() / self.exponents.of(slots).numpy()

    def uniforms(self) -> Tensor:
        """(lanes, N) float64 uniforms for this cycle's resampling."""
        every = torch.arange(self.slots.lanes * self.slots.N)
        return self.slots.uniform(every, 0, Stream.RESAMPLE).view(self.slots.lanes, self.slots.N)
