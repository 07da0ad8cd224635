"""Which outcomes of blocks are likely, by the draft's own laws and by what came. Knows texts; prepares nothing."""

import torch
from torch import Tensor

from smcdecode.engine.drafting import Stream
from smcdecode.engine.draw import draw
from smcdecode.engine.remote.messages import Entries, Setup
from smcdecode.engine.remote.texts import Texts
from smcdecode.infer.fanout import Outcomes

__all__ = ["Likely"]


class Likely:
    """Guesses of a run, and how good they were.

    Attributes:
        backed: (S,) bool, trunks whose last block was a backup's.
    """

    def __init__(self, texts: Texts, setup: Setup) -> None:
        self.texts, self.setup = texts, setup
        most, K = self.texts.guesses, setup.block
        self.outcomes = {
            False: Outcomes(setup.block, most),
            True: Outcomes(setup.block, most, acceptance=0.0),  # behind a backup block
        }
        self.backed = torch.zeros_like(self.texts.ended)  # trunks whose last block was a backup's
        self._guessed = torch.full((setup.slots, K + 1, most + 1), -1)  # guesses at each k, the likeliest first
        self._fanouts: dict[tuple[bool, int, bool], list[int]] = {}

    def observe(self, entries: Entries) -> None:
        """Learn how often each k comes, and at which place among the guesses its token."""
        sources = self.texts.trunk(entries.source)
        guesses = self._guessed[entries.source, entries.kept]  # (n, M + 1)
        order = (guesses >= 0).cumsum(1) - 1
        place = torch.where(guesses == entries.token[:, None], order, self.texts.guesses).amin(1)
        kept = torch.where(entries.kept == self.texts.count(sources), self.setup.block, entries.kept)
        for backup, k, at in zip(self.backed[sources].tolist(), kept.tolist(), place.tolist(), strict=True):
            self.outcomes[backup].observe(k, at)

    def forget(self, slots: Tensor) -> None:
        """Nothing is guessed for some particles (n,), and their blocks are no backup's."""
        self._guessed[slots] = -1
        self.backed[self.texts.trunk(slots)] = False

    def outcomes_of(
        self, trunks: Tensor, logits: Tensor, fresh: Tensor, temperature: Tensor, weight: Tensor, drawn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The outcomes to prepare for.

        Args:
            trunks: (n,) int64.
            logits: (T, V) float32 behind the tokens just read, trunk by trunk.
            fresh: (n,) int64, how many those are of each.
            temperature: (n,) float64, of the laws that guesses are made of.
            weight: (n,) float64, log-weights that the particles carry.
            drawn: (R, V) float32, what the blocks that the draft wrote were drawn from.

        Returns:
            rows of ``trunks``, the rows whose block they go on with, tokens kept and the token behind: (m,) int64 each.
        """
        row, kept, tokens = self._own(trunks, logits, fresh, temperature, drawn)
        self._fanouts.clear()
        if not self.setup.ancestors:
            return row, row, kept, tokens
        return self._replaced(trunks, logits, fresh, temperature, weight, row, kept, tokens)

    def _own(
        self, trunks: Tensor, logits: Tensor, fresh: Tensor, temperature: Tensor, drawn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outcomes of the trunks' own blocks: rows of ``trunks``, tokens kept and the token behind, (m,) int64 each."""
        texts, slots, K = self.texts, self.texts.slots, self.setup.block
        count, base, n = texts.count(trunks), texts.base[trunks], len(trunks)
        every = torch.arange(K + 1)
        at_end = every == count[:, None]  # (n, K + 1)
        drafted = every < count[:, None]
        bonus = ~texts.ended[trunks]
        guesses = torch.full((n, K + 1, texts.guesses + 1), -1)
        own = drafted & ~self.backed[trunks][:, None]
        guesses[:, :, 1:][own] = drawn.topk(texts.guesses).indices.cpu()
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
        """Outcomes of :meth:`_own`, and between them those of light particles that are replaced by heavy ones.

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
