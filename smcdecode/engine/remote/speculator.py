"""The draft's side of a run: answers with prepared continuations, then prepares the next. Knows no target, no process.

One round: what became of the last blocks is told (k kept, token t behind them); where that was prepared the answer is
there, elsewhere it is drafted now, or needs no model. Then, while the target verifies, the likeliest outcomes of the
new blocks get branches, and each branch its K tokens. Uniforms are keyed by request, particle, cycle and place, so a
continuation is the same tokens whether it was prepared or not.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from smcdecode.engine.drafting import Stream
from smcdecode.engine.draw import draw
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.remote.backup import backed
from smcdecode.engine.remote.messages import Answer, Backup, Entries, Lanes, Setup
from smcdecode.engine.remote.texts import Texts
from smcdecode.infer.fanout import Outcomes

__all__ = ["Speculator"]

Outcome = tuple[int, int, int, int]  # particle, whose block it goes on with, tokens kept, the token behind them


class Speculator:
    """Texts of a run and the outcomes prepared for them.

    Args:
        model: the draft.
        setup: the run.
        next_entries: a look at the next request: its entries if it has come already, else None.
    """

    def __init__(self, model: LanguageModel, setup: Setup, next_entries: Callable[[], Entries | None]) -> None:
        self.setup, self.next_entries = setup, next_entries
        self.texts = Texts(model, setup)
        self.prepared: dict[Outcome, int] = {}  # → branch
        most, K = self.texts.guesses, setup.block
        self.outcomes = {
            False: Outcomes(setup.block, most),
            True: Outcomes(setup.block, most, acceptance=0.0),  # behind a backup block
        }
        self.backed = torch.zeros_like(self.texts.ended)  # trunks whose last block was a backup's
        self._guessed = torch.full((setup.slots, K + 1, most + 1), -1)  # guesses at each k, the likeliest first
        self._drawn = torch.empty(0, setup.size)  # logits of the blocks just answered
        self._fanouts: dict[tuple[bool, int, bool], list[int]] = {}
        self._moves: tuple[Entries, Tensor] | None = None  # what was told, and the texts that foresaw it
        self._seconds = 0.0

    # ---- messages

    def open(self, lanes: Lanes) -> None:
        """Read the prompts of lanes that begin, and prepare for their first tokens."""
        trunks, logits = self.texts.open(lanes)
        temperature = lanes.temperature.repeat_interleave(self.setup.particles)
        self._drawn = logits[:0]
        even = torch.zeros_like(temperature)
        self._prepare(trunks, logits, torch.ones_like(trunks), temperature, temperature, even, 1.0)

    def close(self, lanes: Tensor) -> None:
        """Forget lanes."""
        self._forget((lanes[:, None] * self.setup.particles + torch.arange(self.setup.particles)).flatten())
        self.texts.close(lanes)

    def answer(self, entries: Entries, backup: Backup, share: float) -> Answer:
        """Blocks for what the entries tell, sorted by slot; :meth:`prepare` is to be called behind it.

        Args:
            entries: outcomes of the last blocks.
            backup: what is done where they were not prepared.
            share: C of σ_{F,C}, for what is drafted from now on.
        """
        found = self._found(entries)
        hit = torch.tensor([branch is not None for branch in found], dtype=torch.bool)
        sources = self.texts.trunk(entries.source).tolist()
        origins = torch.tensor([s if b is None else b for s, b in zip(sources, found, strict=True)])
        self._moves = entries, origins
        if len(hit) and bool(hit.all()):
            return self._read_off(origins, hit, share, 0.0)  # what becomes of the texts can wait until it is on its way
        self._follow()
        start = time.perf_counter()
        missed = self.texts.trunk(entries.slot[~hit])
        if backup == Backup.REDRAFT:
            self.texts.draft(missed, entries.temperature[~hit], share, lambda: None)
        elif len(missed):
            self._back_up(missed, backup)
        seconds = time.perf_counter() - start if len(missed) and backup == Backup.REDRAFT else 0.0
        return self._read_off(self.texts.trunk(entries.slot), hit, share, seconds)

    def _follow(self) -> None:
        """Texts become what the last entries told, if they are not yet."""
        if self._moves is None:
            return
        (entries, origins), self._moves = self._moves, None
        trunks = self.texts.trunk(entries.slot)
        self._observe(entries)
        self.texts.follow(trunks, origins, entries.kept, entries.token)
        self._forget(entries.slot)
        self.texts.slots.cycle[self.texts.slots.lane[trunks]] = entries.cycle

    def prepare(self, entries: Entries, share: float) -> None:
        """Branches for the likeliest outcomes of the blocks just answered, and their continuations."""
        self._follow()
        texts = self.texts
        trunks = texts.trunk(entries.slot)
        unread = (texts.slots.length > texts.slots.cached)[trunks]
        reading = unread & (~texts.ended | self.backed)[trunks]
        logits, fresh = torch.empty(0, self.setup.size), torch.zeros_like(trunks)
        if reading.any():
            logits, fresh[reading] = texts.read(trunks[reading], whole=True)
        self._prepare(trunks, logits, fresh, entries.temperature, entries.following, entries.weight, share)

    # ---- what became of the last blocks

    def _found(self, entries: Entries) -> list[int | None]:
        columns = (entries.slot, entries.source, entries.kept, entries.token)
        return [self.prepared.get(outcome) for outcome in zip(*(column.tolist() for column in columns), strict=True)]

    def _observe(self, entries: Entries) -> None:
        """Learn how often each k comes, and at which place among the guesses its token."""
        sources = self.texts.trunk(entries.source)
        guesses = self._guessed[entries.source, entries.kept]  # (n, M + 1)
        order = (guesses >= 0).cumsum(1) - 1
        place = torch.where(guesses == entries.token[:, None], order, self.texts.guesses).amin(1)
        kept = torch.where(entries.kept == self.texts.count(sources), self.setup.block, entries.kept)
        for backup, k, at in zip(self.backed[sources].tolist(), kept.tolist(), place.tolist(), strict=True):
            self.outcomes[backup].observe(k, at)

    def _forget(self, slots: Tensor) -> None:
        """Drop what was prepared for some particles."""
        gone = set(slots.tolist())
        self.prepared = {key: branch for key, branch in self.prepared.items() if key[0] not in gone}
        trunks = self.texts.trunk(slots)
        self._guessed[slots] = -1
        self.backed[trunks] = False
        self.texts.prune(trunks)

    def _back_up(self, trunks: Tensor, backup: Backup) -> None:
        """Blocks that need no model; the target's side computes the same."""
        texts = self.texts
        blocks = backed(backup, texts.slots, trunks, self.setup.block, texts.is_eos)
        texts.put(trunks, blocks.tokens, blocks.count)
        self.backed[trunks] = True

    def _read_off(self, trunks: Tensor, hit: Tensor, share: float, seconds: float) -> Answer:
        """The blocks that stand behind some trunks now; what they were drawn from is kept for the next guesses."""
        texts, K = self.texts, self.setup.block
        backed = self.backed[trunks]
        count = texts.count(trunks).masked_fill(backed, -1)
        drafted = torch.arange(K) < count[:, None]
        own = trunks[~backed]
        logits, shares = texts.logits(own)
        self._drawn = logits
        laws, log_q = texts.laws(own, logits, shares)
        wanted = self.setup.strict or bool(torch.isneginf(laws).any())
        top = logits.topk(texts.width).indices.cpu() if share < 1 else None
        tokens = texts.blocks(trunks).masked_fill(~drafted, 0)
        spread = torch.zeros(drafted.shape, dtype=torch.float64).masked_scatter_(drafted, log_q)
        return Answer(hit.long(), count, tokens, spread, laws if wanted else None, top, self._seconds, seconds)

    # ---- the next outcomes

    def _prepare(
        self, trunks: Tensor, logits: Tensor, fresh: Tensor, temperature: Tensor, following: Tensor, weight: Tensor,
        share: float,
    ) -> None:  # fmt: skip
        """Guess, then branch.

        Args:
            trunks: (n,) int64.
            logits: (T, V) float32 behind the tokens just read, trunk by trunk.
            fresh: (n,) int64, how many those are of each.
            temperature: (n,) float64, of the laws that guesses are made of.
            following: (n,) float64, of the continuations.
            weight: (n,) float64, log-weights that the particles carry.
            share: C of the continuations.
        """
        start = time.perf_counter()
        row, kept, tokens = self._likeliest(trunks, logits, fresh, temperature)
        source = row
        if self.setup.ancestors:
            row, source, kept, tokens = self._replaced(trunks, logits, fresh, temperature, weight, row, kept, tokens)
        self._fanouts.clear()
        if len(row):
            self._branch(trunks, row, source, kept, tokens, following, share)
        self._seconds = time.perf_counter() - start

    def _likeliest(
        self, trunks: Tensor, logits: Tensor, fresh: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The outcomes to prepare for: rows of ``trunks``, tokens kept and the token behind them, (m,) int64 each."""
        texts, slots, K = self.texts, self.texts.slots, self.setup.block
        count, base, n = texts.count(trunks), texts.base[trunks], len(trunks)
        every = torch.arange(K + 1)
        at_end = every == count[:, None]  # (n, K + 1)
        drafted = every < count[:, None]
        bonus = ~texts.ended[trunks]
        guesses = torch.full((n, K + 1, texts.guesses + 1), -1)
        own = drafted & ~self.backed[trunks][:, None]
        guesses[:, :, 1:][own] = self._drawn.topk(texts.guesses).indices.cpu()
        read = ((count - fresh)[:, None] < every) & (every <= count[:, None])
        guesses[:, :, 1:][read] = logits.topk(texts.guesses).indices.cpu()
        likely = torch.full_like(trunks, -1)
        asked = bonus.nonzero()[:, 0]
        likely[asked] = self._likely(trunks[asked], logits[fresh.cumsum(0)[asked] - 1], temperature[asked])
        guesses[:, :, 0] = likely[:, None].masked_fill(~at_end, -1)  # comes first, and only once
        other = torch.where(drafted, texts.blocks(trunks, K + 1), likely[:, None])  # refused, it cannot come again
        guesses[:, :, 1:].masked_fill_(guesses[:, :, 1:] == other[:, :, None], -1)
        guesses.masked_fill_(~(drafted | (at_end & bonus[:, None]))[:, :, None], -1)
        self._guessed[trunks // (1 + texts.B)] = guesses
        kinds = zip(self.backed[trunks].tolist(), count.tolist(), bonus.tolist(), strict=True)
        fanout = torch.tensor([self._fanout(*kind) + [0] * (K - kind[1]) for kind in kinds])
        known = guesses >= 0
        wanted = known & (known.cumsum(-1) <= fanout[:, :, None]) & ~texts.is_eos[guesses.clamp(min=0)]
        wanted &= (base[:, None] + every + 1 < slots.cap[slots.lane[trunks]][:, None])[:, :, None]
        row, kept, place = wanted.nonzero(as_tuple=True)
        return row, kept, guesses[row, kept, place]

    def _likely(self, trunks: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
        """What the target would draw behind whole blocks, were its law the draft's, by their uniforms: (n,) int64."""
        if not len(trunks):
            return trunks
        return draw(self.texts.law(logits, temperature), self.texts.slots.uniform(trunks, 0, Stream.BONUS))[0]

    def _replaced(
        self, trunks: Tensor, logits: Tensor, fresh: Tensor, temperature: Tensor, weight: Tensor, row: Tensor,
        kept: Tensor, tokens: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Outcomes of :meth:`_likeliest`, and between them those of light particles that are replaced by heavy ones.

        Returns:
            rows of ``trunks``, the rows whose block they go on with, tokens kept and the token behind: (m,) int64 each.
        """
        texts, slots = self.texts, self.texts.slots
        pairs = _heavier(slots.lane[trunks].tolist(), weight.tolist(), self.setup.ancestors)
        light, heavy = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T
        open_ = ~texts.ended[trunks[heavy]]
        light, heavy = light[open_], heavy[open_]
        at_end = logits[fresh.cumsum(0)[heavy] - 1]
        behind = self._likely(trunks[light], at_end, temperature[heavy])
        count = texts.count(trunks[heavy])
        fits = texts.base[trunks[heavy]] + count + 1 < slots.cap[slots.lane[trunks[heavy]]]
        fits &= ~texts.is_eos[behind]
        every = torch.cat([row, light[fits]])
        order = every.argsort(stable=True)
        columns = ((row, heavy), (kept, count), (tokens, behind))
        return every[order], *(torch.cat([own, other[fits]])[order] for own, other in columns)  # type: ignore[return-value]

    def _fanout(self, backed: bool, count: int, bonus: bool) -> list[int]:
        """How many guesses at each k; computed once a round for each kind of block."""
        kind = (backed, count, bonus)
        if kind not in self._fanouts:
            self._fanouts[kind] = self.outcomes[backed].fanout(self.setup.budget, count, bonus).tolist()
        return self._fanouts[kind]

    def _branch(
        self, trunks: Tensor, row: Tensor, source: Tensor, kept: Tensor, tokens: Tensor, temperature: Tensor,
        share: float,
    ) -> None:  # fmt: skip
        """A branch for each outcome, and its continuation; outcomes that turn out otherwise meanwhile are left."""
        texts = self.texts
        each = torch.bincount(row, minlength=len(trunks))
        branches = trunks[row] + 1 + torch.arange(len(row)) - (each.cumsum(0) - each)[row]
        texts.branch(branches, trunks[source], kept, tokens)
        particles = trunks // (1 + texts.B)
        outcomes = zip(*(x.tolist() for x in (particles[row], particles[source], kept, tokens)), strict=True)
        self.prepared |= dict(zip(outcomes, branches.tolist(), strict=True))
        lanes = torch.unique_consecutive(texts.slots.lane[trunks])
        texts.slots.cycle[lanes] += 1
        texts.draft(branches, temperature[row], share, self._wanted)
        texts.slots.cycle[lanes] -= 1

    def _wanted(self) -> Tensor | None:
        """The branches that the next request asks for, once it has come."""
        entries = self.next_entries()
        if entries is None:
            return None
        return torch.tensor([branch for branch in self._found(entries) if branch is not None], dtype=torch.int64)


def _heavier(lanes: list[int], weights: list[float], most: int) -> list[tuple[int, int]]:
    """Pairs of rows of a lane, the first of less weight than the second, which is among the ``most`` heaviest there."""
    rows: dict[int, list[int]] = {}
    for i, lane in enumerate(lanes):
        rows.setdefault(lane, []).append(i)
    return [
        (i, a)
        for here in rows.values()
        for i in here
        for a in sorted(here, key=lambda row: -weights[row])[:most]
        if weights[i] < weights[a]
    ]
