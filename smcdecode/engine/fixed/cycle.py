"""One cycle of every lane, (2)–(5), as a function over a :class:`State`: draft, score, weigh, resample, select, bonus.

It does what ``ParticleEngine`` and ``infer.smc.run`` do for a target without potentials, and draws by the same
uniforms; but every slot goes through every step, finished or not, and what means nothing is masked: no shape depends on
a number, and the host asks for none. So it can be recorded as a CUDA graph, and is the same function where it is not.
"""

import dataclasses

import torch
from torch import Tensor

from smcdecode.declare.proposal import Draft
from smcdecode.engine.attention import Frame
from smcdecode.engine.drafting import Stream
from smcdecode.engine.fixed.state import State
from smcdecode.engine.passes import Passes
from smcdecode.infer import weights
from smcdecode.infer.variance import multinomial_equivalents
from smcdecode_kernels import laws, ops
from smcdecode_kernels.groups import Weighed
from smcdecode_kernels.laws import Key, Law, Sums

__all__ = ["FixedCycle", "Rules"]


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a recorded cycle has in it as constants.

    Attributes:
        draft: None without one.
        block: K, 0 without a draft.
        plain: whether α = 1 for all targets.
        stratified: whether resampling is; else systematic.
        eos: ids that end a text.
        page_size: tokens a page.
    """

    draft: Draft | None
    block: int
    plain: bool
    stratified: bool
    eos: tuple[int, ...]
    page_size: int


@dataclasses.dataclass(frozen=True)
class _Block:
    """What was drafted: K tokens in every slot, of which those before ``count`` mean something."""

    tokens: Tensor  # (S, K) int64
    log_q: Tensor  # (S, K) float64
    laws: list[tuple[Law, Sums]]  # K laws of S rows each
    valid: Tensor  # (S, K) bool: neither behind an end nor behind the cap
    count: Tensor  # (S,) int64
    ended: Tensor  # (S,) bool: no bonus token follows


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What became of it; rows of ``law`` are the K + 1 positions of each slot, slot by slot."""

    law: Law
    sums: Sums
    log_z: Tensor  # (S, K + 1) float64
    kept: Tensor  # (S,) int64
    refused: Tensor  # (S,) bool
    bonus: Tensor  # (S,) bool
    dead: Tensor  # (S,) bool


class FixedCycle:
    """The cycle of one method.

    Args:
        rules: its constants.
        passes: target and draft, over stores that do not move.
    """

    def __init__(self, rules: Rules, passes: Passes) -> None:
        self.rules, self.passes = rules, passes
        vocabulary = passes.p.vocabulary
        is_eos = torch.zeros(vocabulary.size, dtype=torch.bool)
        is_eos[list(rules.eos)] = True
        self.is_eos = is_eos.to(passes.p.device)

    @torch.inference_mode()
    def __call__(self, state: State) -> None:
        """One cycle of all lanes of a state, and the report of it."""
        writing = (state.finished == 0) & (state.length > 0)
        copied = self._make_room(state, writing)
        block = self._draft(state, writing)
        verdict, counts = self._judge(state, block, writing)
        increments = torch.where(verdict.dead, -torch.inf, 0.0) + self._settle(state, verdict.bonus)
        ancestors = self._weigh(state, increments, verdict.bonus, counts | {"copied": copied, "writing": writing})
        self._select(state, ancestors)
        self._append(state, ancestors, verdict)
        ops.clear(state.pages, state.finished == 1)
        state.cycle.add_(1)

    # ---- draft

    def _make_room(self, state: State, writing: Tensor) -> Tensor:
        """Pages for what this cycle writes, own where they are written; (S,) bool, the slots a page was copied for."""
        prompt, cap = state.of_slots(state.prompt), state.of_slots(state.cap)
        end = prompt + torch.minimum(cap, state.length + self.rules.block)
        source, copy = ops.grow(
            state.pages, (prompt + state.cached).int(), torch.where(writing, end, 0).int(), self.rules.page_size
        )
        if self.rules.page_size > 1:  # pages of one token are never partly filled
            self.passes.move_pages(source.long(), copy.long())
        return source != 0

    def _draft(self, state: State, writing: Tensor) -> _Block:
        """K passes of the draft, (2)."""
        K, length = self.rules.block, state.length
        temperature = self._temperature(state)
        drafted: list[Tensor] = []
        log_q: list[Tensor] = []
        found: list[tuple[Law, Sums]] = []
        for k in range(K):
            width = 2 if k == 0 else 1
            if k == 0:
                back = (length[:, None] - torch.arange(2, 0, -1, device=state.device)).clamp(min=0)
                tokens = state.tokens.gather(1, back)
                live = torch.arange(2, 0, -1, device=state.device) <= state.lag[:, None]
            else:
                tokens, live = drafted[-1][:, None], torch.ones_like(writing)[:, None]
            frame = self._frame(state, writing, k, live)
            rows = torch.arange(width - 1, tokens.numel(), width, device=state.device)
            logits = self.passes.draft_fixed(tokens.flatten(), frame, rows)
            law = Law(logits, temperature, floor=self._floor(logits, temperature))
            partial = ops.sums(law)
            every = torch.arange(len(logits), device=state.device)
            token, log = ops.draw(law, partial, every, state.key(k, Stream.DRAFT))
            drafted.append(token)
            log_q.append(log)
            found.append((law, partial))
        if not K:
            none = length[:, None][:, :0]
            return _Block(none, none.double(), [], none.bool(), torch.zeros_like(length), ~writing)
        tokens = torch.stack(drafted, 1)
        room = (state.of_slots(state.cap) - length)[:, None]
        ends = self.is_eos[tokens]
        before = ends.cumsum(1) - ends.long()
        valid = (torch.arange(K, device=state.device) < room) & (before == 0) & writing[:, None]
        count = valid.sum(1)
        ended = (ends & valid).any(1) | (count == room[:, 0]) | ~writing
        return _Block(tokens, torch.stack(log_q, 1), found, valid, count, ended)

    def _frame(self, state: State, writing: Tensor, ahead: int, live: Tensor) -> Frame:
        """A pass over the last tokens of each slot's text and ``ahead`` drafted ones; ``live`` (S, Q)."""
        prompt, cap = state.of_slots(state.prompt), state.of_slots(state.cap)
        width = live.shape[1]
        length = torch.where(writing, prompt + state.length + ahead, width).clamp(min=width)
        frame = Frame(state.pages.rows, length, live, self.rules.page_size)
        inside = frame.positions < (prompt + cap)[:, None]
        return dataclasses.replace(frame, live=live & inside & writing[:, None])

    def _temperature(self, state: State) -> Tensor:
        """1/T of the draft in each slot: (S,) float32. As declared, else the target's over the exponent."""
        own = None if self.rules.draft is None else self.rules.draft.temperature
        lanes = state.alpha / state.temperature if own is None else torch.full_like(state.alpha, 1 / own)
        return state.of_slots(lanes).float()

    def _floor(self, logits: Tensor, temperature: Tensor) -> Tensor | None:
        draft = self.rules.draft
        assert draft is not None
        if draft.top_k is None and draft.top_p is None:
            return None
        return ops.floor(logits, temperature, draft.top_k, draft.top_p)

    # ---- score, judge

    def _judge(self, state: State, block: _Block, writing: Tensor) -> tuple[_Verdict, dict[str, Tensor]]:
        """One pass of the target, (3); each drafted token is kept, redrawn or carried as weight, (4)."""
        K = self.rules.block
        law, partial = self._score(state, block, writing)
        norm = laws.log_norm(partial.top, partial.total)
        tokens, refused, ratio = self._strict(state, block, law, norm)
        padded = torch.nn.functional.pad(tokens, (0, 1))
        log_pa, log_z = (x.view(-1, K + 1) for x in ops.score(law, partial, padded.flatten()))
        weight = log_pa[:, :K] - block.log_q if ratio is None else ratio + log_z[:, :K]
        stands = block.valid & (refused.cumsum(1) - refused.long() == 0)  # before, or at, the first refusal
        barren = stands & torch.isneginf(log_z[:, :K])
        kept = (stands & ~barren).sum(1)
        over = (refused & stands).any(1)
        bonus = ~over & ~block.ended
        log_w = torch.where(stands, weight, 0.0)
        last = torch.where(bonus, log_z.gather(1, block.count[:, None])[:, 0], 0.0)  # (5)
        dead = torch.isneginf(log_w.sum(1) + last)
        log_p = torch.where(stands & ~barren, log_pa[:, :K], 0.0).sum(1) / state.of_slots(state.alpha)
        self._write(state, tokens, kept, over, torch.cat([log_w, last[:, None]], 1), bonus, dead)
        state.log_p.add_(log_p)
        state.finished.masked_fill_(writing & (kept > 0) & self._ends(state), 1)
        for flags in (state.dead, state.finished):
            flags.masked_fill_(dead, 1)
        judged = stands & (ratio is not None)
        counts = {"judged": judged, "accepted": judged & ~refused}
        verdict = _Verdict(law, partial, log_z, kept, over, bonus & ~dead, dead)
        return verdict, counts

    def _score(self, state: State, block: _Block, writing: Tensor) -> tuple[Law, Sums]:
        """The targets' laws at the K + 1 positions of each slot: S · (K + 1) rows."""
        K = self.rules.block
        tokens = torch.cat([state.last()[:, None], block.tokens], 1).flatten()
        frame = self._frame(state, writing, K, torch.ones_like(writing)[:, None].expand(-1, K + 1))
        logits = self.passes.target_fixed(tokens, frame, torch.arange(len(tokens), device=state.device))
        law = self._law(logits, state.of_slots(state.temperature), state.of_slots(state.alpha), K + 1)
        return law, ops.sums(law, base=True)

    def _law(self, logits: Tensor, temperature: Tensor, alpha: Tensor, each: int) -> Law:
        """The target's law at ``each`` rows of some slots, or lanes: (n,) float64 → n · each rows."""
        inverse, exponent = (
            x[:, None].expand(-1, each).contiguous().view(-1) for x in ((1 / temperature).float(), alpha.float())
        )
        return Law(logits, inverse, None if self.rules.plain else exponent)

    def _strict(self, state: State, block: _Block, law: Law, norm: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens (S, K), which of them a refusal drew (S, K), and log r − log e of each; None at strictness 0."""
        K, draft = self.rules.block, self.rules.draft
        if draft is None or not draft.strict:
            return block.tokens, torch.zeros_like(block.valid), None
        columns = []
        for k, (q, partial) in enumerate(block.laws):
            rows = torch.arange(k, len(norm), K + 1, device=state.device)
            columns.append(
                ops.judge(
                    q, laws.log_norm(partial.top, partial.total), law, norm, rows, block.tokens[:, k].contiguous(),
                    state.of_slots(state.strictness), state.key(k, Stream.ACCEPT), state.key(k, Stream.REDRAW),
                )
            )  # fmt: skip
        tokens, refused, ratio = (torch.stack(column, 1) for column in zip(*columns, strict=True))
        return tokens, refused, ratio

    def _write(
        self, state: State, tokens: Tensor, kept: Tensor, refused: Tensor, log_w: Tensor, bonus: Tensor, dead: Tensor
    ) -> None:
        """Append the tokens that stand, and note what they and the bonus token are owed."""
        K = self.rules.block
        place = state.length[:, None] + torch.arange(K + 1, device=state.device)
        owed = torch.where(dead[:, None], 0.0, log_w)
        inside = place.clamp(max=state.owed.shape[1] - 1)  # places behind it are owed 0
        state.owed.scatter_add_(1, inside, owed.masked_fill(place != inside, 0.0))
        state.put(place[:, :K], tokens, torch.arange(K, device=state.device) < kept[:, None])
        moved = (kept > 0) | bonus
        state.length.add_(kept)
        state.cached.copy_(torch.where(moved, state.length - refused.long(), state.cached))
        state.lag.copy_(torch.where(moved, torch.where(refused | (kept == 0), 1, 2), state.lag))

    def _ends(self, state: State) -> Tensor:
        """Whether the last own token completes its text: an end, or the cap. (S,) bool."""
        return self.is_eos[state.last()] | (state.length == state.of_slots(state.cap))

    # ---- weigh, select, append

    def _settle(self, state: State, bonus: Tensor) -> Tensor:
        """See ``Slots.settle``: (S,) float64."""
        T = state.owed.shape[1]
        reach = torch.where(state.finished == 1, T, state.length + bonus.long())
        common = state.of_slots(reach.view(state.lanes, state.particles).amin(1))
        due = torch.arange(T, device=state.device) < common[:, None]
        taken = torch.where(due, state.owed, 0.0).sum(1)
        state.owed.masked_fill_(due, 0.0)
        return taken

    def _weigh(self, state: State, increments: Tensor, bonus: Tensor, counts: dict[str, Tensor]) -> Tensor:
        """Weights, resampling and the report, as in ``infer.smc.run``: ancestors (G, N)."""
        increments = increments.view(state.lanes, state.particles)
        finished = (state.finished == 1).view(state.lanes, state.particles).all(1)
        chi2 = weights.chi2_plus_one(increments, state.log_w)
        log_z = state.log_z.clone()
        place = torch.zeros_like(state.cycle)
        key = Key(state.seed, place, state.cycle, place, Stream.RESAMPLE)
        may = state.running & ~finished
        weighed = ops.weigh(state.log_w, increments, state.log_z, may, state.threshold, key, self.rules.stratified)
        done = state.running & (finished | torch.isneginf(weighed.log_mean))
        numbers = {
            "log_z": log_z + weighed.log_mean, "ess": weighed.ess, "chi2": chi2, "first_log_z": state.first_log_z,
            "resamplings": state.resamplings, "running": state.running, "resampled": weighed.resampled, "done": done,
        }  # fmt: skip
        self._report(state, weighed, numbers | {name: _of_lanes(state, flags) for name, flags in counts.items()}, bonus)
        worth = multinomial_equivalents(weights.normalise(weighed.log_w), weighed.ancestors)
        state.resamplings.add_(torch.where(weighed.resampled, worth, 0.0))
        state.running.logical_and_(~done)
        return weighed.ancestors

    def _report(self, state: State, weighed: Weighed, lanes: dict[str, Tensor], bonus: Tensor) -> None:
        """What the host will read of this cycle; lengths are those after it."""
        length = (state.length + bonus.long())[_parents(state, weighed.ancestors)]
        slots = {
            "log_w": weighed.log_w.flatten(), "log_p": state.log_p, "ancestor": weighed.ancestors.flatten(),
            "origin": state.origin, "length": length, "count": state.length - state.told, "dead": state.dead,
        }  # fmt: skip
        place = state.told[:, None] + torch.arange(self.rules.block + 1, device=state.device)
        written = state.tokens.gather(1, place.clamp(max=state.tokens.shape[1] - 1))
        state.write_report(lanes, slots, written)

    def _select(self, state: State, ancestors: Tensor) -> None:
        """Slots become copies: rows of the page table move, keys and values stay."""
        tokens = state.of_slots(state.prompt) + state.cached
        keep = (-(-tokens // self.rules.page_size)).int()
        ops.select(state.pages, _parents(state, ancestors), keep, (state.ints, state.floats))
        state.told.copy_(state.length)

    def _append(self, state: State, ancestors: Tensor, verdict: _Verdict) -> None:
        """Draw the bonus token of every slot whose ancestor scored one, (5)."""
        parent = _parents(state, ancestors)
        row = parent * (self.rules.block + 1) + verdict.kept[parent]
        token, log_r = ops.draw(verdict.law, verdict.sums, row, state.key(0, Stream.BONUS))
        drawn = verdict.bonus[parent]
        log_pa = log_r + verdict.log_z.flatten()[row]
        self._write_one(state, token, log_pa, drawn)

    def _write_one(self, state: State, token: Tensor, log_pa: Tensor, drawn: Tensor) -> None:
        """Write a token (S,) with log p^α (S,) behind the text of each slot where ``drawn``."""
        state.put(state.length[:, None], token[:, None], drawn[:, None])
        state.length.add_(drawn.long())
        state.log_p.add_(torch.where(drawn, log_pa / state.of_slots(state.alpha), 0.0))
        state.finished.masked_fill_(drawn & self._ends(state), 1)

    # ---- the first cycle

    @torch.inference_mode()
    def begin(self, state: State, lane: int, logits: Tensor) -> None:
        """The first cycle of a lane that was just opened, from the target's logits (1, V) behind its prompt.

        All particles have one law, and draw from it independently; their weights are equal.
        """
        here = slice(lane, lane + 1)
        law = self._law(logits, state.temperature[here], state.alpha[here], 1)
        partial = ops.sums(law, base=True)
        _, log_z = ops.score(law, partial, torch.zeros_like(state.seed[here]))
        slots = torch.arange(state.particles, device=state.device)
        zero = torch.zeros_like(slots)
        key = Key(state.seed[here] + zero, slots, zero, zero, Stream.BONUS)
        token, log_r = ops.draw(law, partial, zero, key)
        alone = _lane(state, lane)
        barren = torch.isneginf(log_z)
        alone.log_w.copy_(log_z[:, None].expand(1, state.particles))
        alone.first_log_z.copy_(log_z)
        self._write_one(alone, token, log_r + log_z, ~barren.expand(state.particles))
        for flags in (alone.dead, alone.finished):
            flags.masked_fill_(barren.expand(state.particles), 1)
        alone.cycle.fill_(1)


def _lane(state: State, lane: int) -> State:
    """A state of one lane, over the same memory, but with the pages of all."""
    S = slice(lane * state.particles, (lane + 1) * state.particles)
    own = {f.name: getattr(state, f.name)[lane : lane + 1] for f in dataclasses.fields(state)[3:]}
    return dataclasses.replace(state, ints=state.ints[S], floats=state.floats[S], **own)


def _of_lanes(state: State, flags: Tensor) -> Tensor:
    """How many flags (S, …) are set in each lane: (G,) int64."""
    return flags.view(state.lanes, -1).sum(1)


def _parents(state: State, ancestors: Tensor) -> Tensor:
    """The slot that each slot becomes a copy of: (G, N) places in the lane → (S,)."""
    return (ancestors + torch.arange(state.lanes, device=state.device)[:, None] * state.particles).flatten()
