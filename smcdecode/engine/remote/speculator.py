"""The draft's side of a run: answers with prepared continuations, then prepares the next. Knows no target, no process.

One round: what became of the last blocks is told (k kept, token t behind them); where that was prepared the answer is
there, elsewhere a branch is made for it now, and drafted, or needs no model. Then, while the target verifies, texts
become what was told, the likeliest outcomes of the new blocks get branches, and each branch its K tokens. Uniforms are
keyed by request, particle, cycle and place, so a continuation is the same tokens whether it was prepared or not.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from smcdecode.engine.model import LanguageModel
from smcdecode.engine.remote.backup import backed
from smcdecode.engine.remote.likely import Likely
from smcdecode.engine.remote.messages import Answer, Backup, Entries, Flags, Floats, Ints, Lanes, Setup
from smcdecode.engine.remote.texts import Texts

__all__ = ["Speculator"]

Outcome = tuple[int, int, int]  # whose block a particle goes on with, tokens kept, the token behind them


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
        self.prepared: list[dict[Outcome, int]] = [{} for _ in range(setup.slots)]  # of each particle → branch
        self.likely = Likely(self.texts, setup)
        self._drawn = torch.empty(0, setup.size)  # logits of the blocks just answered
        self._moves: tuple[Entries, Ints] | None = None  # what was told, and the branches that say so
        self._seconds = 0.0

    # ---- messages

    def open(self, lanes: Lanes) -> None:
        """Read the prompts of lanes that begin, and prepare for their first tokens."""
        trunks, logits = self.texts.open(lanes)
        temperature = lanes.temperature.repeat(self.setup.particles)
        self._drawn = logits[:0]
        even = np.zeros_like(temperature)
        self._prepare(trunks, logits, np.ones_like(trunks), temperature, temperature, even, 1.0)

    def close(self, lanes: Ints) -> None:
        """Forget lanes."""
        self._forget((lanes[:, None] * self.setup.particles + np.arange(self.setup.particles)).ravel())
        self.texts.close(lanes)

    def answer(self, entries: Entries, backup: Backup, share: float) -> Answer:
        """Blocks for what the entries tell, sorted by slot; :meth:`prepare` is to be called behind it.

        Args:
            entries: outcomes of the last blocks.
            backup: what is done where they were not prepared.
            share: C of σ_{F,C}, for what is drafted from now on.
        """
        texts, found = self.texts, self._found(entries)
        texts.cycle[texts.lane[texts.trunk(entries.slot)]] = entries.cycle
        hit = np.array([branch is not None for branch in found], dtype=bool)
        branches = np.where(hit, np.array([branch or 0 for branch in found]), texts.spare(entries.slot))
        self._moves = entries, branches
        seconds = 0.0
        if not hit.all():
            seconds = self._miss(entries, branches, ~hit, backup, share)
        return self._read_off(branches, hit, share, seconds)

    def _miss(self, entries: Entries, branches: Ints, missed: Flags, backup: Backup, share: float) -> float:
        """Branches for outcomes that were not prepared, and their blocks; seconds that their drafting took."""
        start, texts, which = time.perf_counter(), self.texts, branches[missed]
        texts.branch(which, texts.trunk(entries.source[missed]), entries.kept[missed], entries.token[missed])
        if backup == Backup.REDRAFT:
            texts.draft(which, entries.temperature[missed], share, lambda: None)
            return time.perf_counter() - start
        blocks = backed(backup, texts.slots, torch.from_numpy(which), self.setup.block, torch.from_numpy(texts.is_eos))
        texts.put(which, blocks.tokens.numpy(), blocks.count.numpy())  # the target's side computes the same
        texts.backed[which] = True
        return 0.0

    def prepare(self, entries: Entries, share: float) -> None:
        """Branches for the likeliest outcomes of the blocks just answered, and their continuations."""
        self._follow()
        texts = self.texts
        trunks = texts.trunk(entries.slot)
        reading = (texts.length > texts.cached)[trunks] & (~texts.ended | texts.backed)[trunks]
        logits, fresh = torch.empty(0, self.setup.size), np.zeros_like(trunks)
        if reading.any():
            logits, fresh[reading] = texts.read(trunks[reading])
        self._prepare(trunks, logits, fresh, entries.temperature, entries.following, entries.weight, share)

    # ---- what became of the last blocks

    def _follow(self) -> None:
        """Texts become what the last entries told."""
        if self._moves is None:
            return
        (entries, branches), self._moves = self._moves, None
        self.likely.observe(entries)
        self.texts.follow(self.texts.trunk(entries.slot), branches)
        self._forget(entries.slot)

    def _found(self, entries: Entries) -> list[int | None]:
        columns = (entries.source, entries.kept, entries.token)
        outcomes = zip(*(column.tolist() for column in columns), strict=True)
        return [self.prepared[slot].get(told) for slot, told in zip(entries.slot.tolist(), outcomes, strict=True)]

    def _forget(self, particles: Ints) -> None:
        """Drop what was prepared for some particles."""
        for particle in particles.tolist():
            self.prepared[particle] = {}
        self.likely.forget(particles)
        self.texts.prune(self.texts.trunk(particles))

    def _read_off(self, slots: Ints, hit: Flags, share: float, seconds: float) -> Answer:
        """The blocks that stand behind some slots; what they were drawn from is kept for the next guesses."""
        texts, K = self.texts, self.setup.block
        backed = texts.backed[slots]
        count = np.where(backed, -1, texts.count(slots))
        drafted = np.arange(K) < count[:, None]
        own = slots[~backed]
        self._drawn, shares = texts.logits(own)
        laws, log_q = texts.laws(own, self._drawn, shares)
        wanted = self.setup.strict or (len(laws) > 0 and float(laws.amin()) == -np.inf)
        top = self._drawn.topk(texts.width).indices.cpu() if share < 1 else None
        tokens = np.where(drafted, texts.blocks(slots), 0)
        spread = np.zeros(drafted.shape)
        spread[drafted] = log_q
        return Answer(hit, count, tokens, spread, laws if wanted else None, top, self._seconds, seconds)

    # ---- the next outcomes

    def _prepare(
        self, trunks: Ints, logits: Tensor, fresh: Ints, temperature: Floats, following: Floats, weight: Floats,
        share: float,
    ) -> None:  # fmt: skip
        """Guess, then branch.

        Args:
            trunks: (n,).
            logits: (T, V) float32 behind the tokens just read, trunk by trunk.
            fresh: (n,), how many those are of each.
            temperature: (n,), of the laws that guesses are made of.
            following: (n,), of the continuations.
            weight: (n,), log-weights that the particles carry.
            share: C of the continuations.
        """
        start = time.perf_counter()
        row, source, kept, tokens = self.likely.outcomes_of(trunks, logits, fresh, temperature, weight, self._drawn)
        if len(row):
            self._branch(trunks, row, source, kept, tokens, following, share)
        self._seconds = time.perf_counter() - start

    def _branch(
        self, trunks: Ints, row: Ints, source: Ints, kept: Ints, tokens: Ints, temperature: Floats, share: float
    ) -> None:
        """A branch for each outcome, and its continuation; outcomes that turn out otherwise meanwhile are left."""
        texts = self.texts
        each = np.bincount(row, minlength=len(trunks))
        branches = trunks[row] + 1 + np.arange(len(row)) - (each.cumsum() - each)[row]
        texts.branch(branches, trunks[source], kept, tokens)
        particles = trunks // texts.each
        outcomes = zip(*(x.tolist() for x in (particles[source], kept, tokens)), strict=True)
        for particle, outcome, branch in zip(particles[row].tolist(), outcomes, branches.tolist(), strict=True):
            self.prepared[particle][outcome] = branch
        lanes = np.unique(texts.lane[trunks])
        texts.cycle[lanes] += 1
        texts.draft(branches, temperature[row], share, self._wanted)
        texts.cycle[lanes] -= 1

    def _wanted(self) -> Ints | None:
        """The branches that the next request asks for, once it has come."""
        entries = self.next_entries()
        if entries is None:
            return None
        return np.array([branch for branch in self._found(entries) if branch is not None], dtype=np.int64)
