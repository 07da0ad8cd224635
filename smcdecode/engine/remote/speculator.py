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

from smcdecode.engine.model import LanguageModel
from smcdecode.engine.remote.backup import backed
from smcdecode.engine.remote.likely import Likely
from smcdecode.engine.remote.messages import Answer, Backup, Entries, Lanes, Setup
from smcdecode.engine.remote.texts import Texts

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
        self.likely = Likely(self.texts, setup)
        self._drawn = torch.empty(0, setup.size)  # logits of the blocks just answered
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
        self.likely.observe(entries)
        self.texts.follow(trunks, origins, entries.kept, entries.token)
        self._forget(entries.slot)
        self.texts.slots.cycle[self.texts.slots.lane[trunks]] = entries.cycle

    def prepare(self, entries: Entries, share: float) -> None:
        """Branches for the likeliest outcomes of the blocks just answered, and their continuations."""
        self._follow()
        texts = self.texts
        trunks = texts.trunk(entries.slot)
        unread = (texts.slots.length > texts.slots.cached)[trunks]
        reading = unread & (~texts.ended | self.likely.backed)[trunks]
        logits, fresh = torch.empty(0, self.setup.size), torch.zeros_like(trunks)
        if reading.any():
            logits, fresh[reading] = texts.read(trunks[reading], whole=True)
        self._prepare(trunks, logits, fresh, entries.temperature, entries.following, entries.weight, share)

    # ---- what became of the last blocks

    def _found(self, entries: Entries) -> list[int | None]:
        columns = (entries.slot, entries.source, entries.kept, entries.token)
        return [self.prepared.get(outcome) for outcome in zip(*(column.tolist() for column in columns), strict=True)]

    def _forget(self, slots: Tensor) -> None:
        """Drop what was prepared for some particles."""
        gone = set(slots.tolist())
        self.prepared = {key: branch for key, branch in self.prepared.items() if key[0] not in gone}
        trunks = self.texts.trunk(slots)
        self.likely.forget(slots)
        self.texts.prune(trunks)

    def _back_up(self, trunks: Tensor, backup: Backup) -> None:
        """Blocks that need no model; the target's side computes the same."""
        texts = self.texts
        blocks = backed(backup, texts.slots, trunks, self.setup.block, texts.is_eos)
        texts.put(trunks, blocks.tokens, blocks.count)
        self.likely.backed[trunks] = True

    def _read_off(self, trunks: Tensor, hit: Tensor, share: float, seconds: float) -> Answer:
        """The blocks that stand behind some trunks now; what they were drawn from is kept for the next guesses."""
        texts, K = self.texts, self.setup.block
        backed = self.likely.backed[trunks]
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
        row, source, kept, tokens = self.likely.outcomes_of(trunks, logits, fresh, temperature, weight, self._drawn)
        if len(row):
            self._branch(trunks, row, source, kept, tokens, following, share)
        self._seconds = time.perf_counter() - start

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
