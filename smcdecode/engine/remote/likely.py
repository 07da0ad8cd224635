"""Which outcomes of blocks are likely, by the draft's own laws and by what came. Knows texts; prepares nothing."""

import numpy as np
import torch
from torch import Tensor

from smcdecode.engine.drafting import Stream
from smcdecode.engine.draw import draw
from smcdecode.engine.remote.messages import Entries, Floats, Ints, Setup
from smcdecode.engine.remote.texts import Texts
from smcdecode.infer.fanout import Outcomes

__all__ = ["Likely"]


class Likely:
    """Guesses of a run, and how good they were."""

    def __init__(self, texts: Texts, setup: Setup) -> None:
        self.texts, self.setup = texts, setup
        most, K = self.texts.guesses, setup.block
        self.outcomes = {
            False: Outcomes(setup.block, most),
            True: Outcomes(setup.block, most, acceptance=0.0),  # behind a backup block
        }
        self._guessed = np.full((setup.slots, K + 1, most + 1), -1)  # guesses at each k, the likeliest first
        self._fanouts: dict[tuple[bool, int, bool], list[int]] = {}

    def observe(self, entries: Entries) -> None:
        """Learn how often each k comes, and at which place among the guesses its token."""
        sources = self.texts.trunk(entries.source)
        guesses = self._guessed[entries.source, entries.kept]  # (n, M + 1)
        found = guesses == entries.token[:, None]
        order = (guesses >= 0).cumsum(1) - 1
        place = np.where(found.any(1), order[np.arange(len(order)), found.argmax(1)], self.texts.guesses)
        kept = np.where(entries.kept == self.texts.count(sources), self.setup.block, entries.kept)
        for backup, k, at in zip(self.texts.backed[sources].tolist(), kept.tolist(), place.tolist(), strict=True):
            self.outcomes[backup].observe(k, at)

    def forget(self, particles: Ints) -> None:
        """Nothing is guessed for some particles (n,)."""
        self._guessed[particles] = -1

    def outcomes_of(
        self, trunks: Ints, logits: Tensor, fresh: Ints, temperature: Floats, weight: Floats, drawn: Tensor
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """The outcomes to prepare for.

        Args:
            trunks: (n,).
            logits: (T, V) float32 behind the tokens just read, trunk by trunk.
            fresh: (n,), how many those are of each.
            temperature: (n,), of the laws that guesses are made of.
            weight: (n,), log-weights that the particles carry.
            drawn: (R, V) float32, what the blocks that the draft wrote were drawn from.

        Returns:
            rows of ``trunks``, the rows whose block they go on with, tokens kept and the token behind: (m,) each.
        """
        row, kept, tokens = self._own(trunks, logits, fresh, temperature, drawn)
        self._fanouts.clear()
        if not self.setup.ancestors:
            return row, row, kept, tokens
        return self._replaced(trunks, logits, fresh, temperature, weight, row, kept, tokens)

    def _own(
        self, trunks: Ints, logits: Tensor, fresh: Ints, temperature: Floats, drawn: Tensor
    ) -> tuple[Ints, Ints, Ints]:
        """Outcomes of the trunks' own blocks: rows of ``trunks``, tokens kept and the token behind, (m,) each."""
        texts, K = self.texts, self.setup.block
        count, base, n, backed = texts.count(trunks), texts.base[trunks], len(trunks), texts.backed[trunks]
        every = np.arange(K + 1)
        at_end = every == count[:, None]  # (n, K + 1)
        drafted = every < count[:, None]
        bonus = ~texts.ended[trunks]
        guesses = np.full((n, K + 1, texts.guesses + 1), -1)
        others = guesses[:, :, 1:]
        others[drafted & ~backed[:, None]] = self._top(drawn)
        read = ((count - fresh)[:, None] < every) & (every <= count[:, None])
        others[read] = self._top(logits)
        likely = np.full_like(trunks, -1)
        asked = np.flatnonzero(bonus)
        likely[asked] = self._likely(trunks[asked], logits, fresh.cumsum()[asked] - 1, temperature[asked])
        guesses[:, :, 0] = np.where(at_end, likely[:, None], -1)  # comes first, and only once
        other = np.where(drafted, texts.blocks(trunks, K + 1), likely[:, None])  # refused, it cannot come again
        others[others == other[:, :, None]] = -1
        guesses[~(drafted | (at_end & bonus[:, None]))] = -1
        self._guessed[trunks // texts.each] = guesses
        kinds = zip(backed.tolist(), count.tolist(), bonus.tolist(), strict=True)
        fanout = np.array([self._fanout(*kind) + [0] * (K - kind[1]) for kind in kinds])
        known = guesses >= 0
        wanted = known & (known.cumsum(-1) <= fanout[:, :, None]) & ~texts.is_eos[guesses]  # −1 is not known
        wanted &= (base[:, None] + every + 1 < texts.cap[texts.lane[trunks]][:, None])[:, :, None]
        row, kept, place = wanted.nonzero()
        return row, kept, guesses[row, kept, place]

    def _top(self, logits: Tensor) -> Ints:
        """The likeliest tokens of each row, the likeliest first."""
        return np.asarray(logits.topk(self.texts.guesses).indices.cpu().numpy())

    def _likely(self, trunks: Ints, logits: Tensor, rows: Ints, temperature: Floats) -> Ints:
        """What the target would draw by the uniforms of trunks (n,), were its law the draft's at some rows (n,)."""
        if not len(trunks):
            return trunks
        law = self.texts.law(logits[torch.from_numpy(rows).to(logits.device)], temperature)
        return draw(law, self.texts.slots.uniform(trunks, 0, Stream.BONUS))[0].numpy()

    def _replaced(
        self, trunks: Ints, logits: Tensor, fresh: Ints, temperature: Floats, weight: Floats, row: Ints,
        kept: Ints, tokens: Ints,
    ) -> tuple[Ints, Ints, Ints, Ints]:  # fmt: skip
        """Outcomes of :meth:`_own`, and between them those of light particles that are replaced by heavy ones.

        Returns:
            rows of ``trunks``, the rows whose block they go on with, tokens kept and the token behind: (m,) each.
        """
        texts = self.texts
        pairs = _heavier(texts.lane[trunks].tolist(), weight.tolist(), self.setup.ancestors)
        light, heavy = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        open_ = ~texts.ended[trunks[heavy]]
        light, heavy = light[open_], heavy[open_]
        behind = self._likely(trunks[light], logits, fresh.cumsum()[heavy] - 1, temperature[heavy])
        count = texts.count(trunks[heavy])
        fits = texts.base[trunks[heavy]] + count + 1 < texts.cap[texts.lane[trunks[heavy]]]
        fits &= ~texts.is_eos[behind]
        every = np.concatenate([row, light[fits]])
        order = every.argsort(kind="stable")
        columns = ((row, heavy), (kept, count), (tokens, behind))
        source, kept, tokens = (np.concatenate([own, other[fits]])[order] for own, other in columns)
        return every[order], source, kept, tokens

    def _fanout(self, backed: bool, count: int, bonus: bool) -> list[int]:
        """How many guesses at each k; computed once a round for each kind of block."""
        kind = (backed, count, bonus)
        if kind not in self._fanouts:
            self._fanouts[kind] = self.outcomes[backed].fanout(self.setup.budget, count, bonus).tolist()
        return self._fanouts[kind]


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
