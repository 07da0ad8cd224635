"""Which token completes a text: an EOS, or one that completes a stop string. Knows what slots hold; no weights.

Both are absorbing and cut a drafted block alike. A length cap completes a text too; that is counted in slots.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from smcdecode.engine.slots import Slots
from smcdecode.potentials.stops import Stops
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["Endings"]


class Endings:
    """Says of next tokens whether they end the text of their slot, by the request its lane runs."""

    def __init__(self, vocabulary: Vocabulary, slots: Slots) -> None:
        self.vocabulary, self.slots = vocabulary, slots
        self.is_eos = torch.zeros(vocabulary.size, dtype=torch.bool)
        self.is_eos[sorted(vocabulary.eos)] = True
        self.stops = [Stops()] * slots.lanes

    def of(self, slots: Tensor, tokens: Tensor, drafted: Tensor | None = None) -> Tensor:
        """Whether a token completes the text of each of some slots: (n,) bool.

        Args:
            slots: (n,) int64.
            tokens: (n,) int64, behind the slot's own tokens and what is drafted. No earlier token completed the text.
            drafted: (n, k) int64, drafted tokens between; none by default.
        """
        eos = self.is_eos[tokens]
        return eos | self._stopped(slots, tokens, self.slots.length[slots], drafted) if any(self.stops) else eos

    def completes(self, slot: int, drafted: Sequence[int], token: int) -> bool:
        """Whether a token completes the text of one slot behind its own tokens and some drafted ones."""
        if token in self.vocabulary.eos or not self.stops[slot // self.slots.N]:
            return token in self.vocabulary.eos
        return self._completes(slot, token, int(self.slots.length[slot]), torch.tensor(drafted, dtype=torch.int64))

    def last(self, slots: Tensor) -> Tensor:
        """Whether the last own token of each of some slots (n,) completed its text: (n,) bool."""
        tokens = self.slots.last(slots)
        eos = torch.from_numpy(self.is_eos.numpy()[tokens.numpy()])
        return eos | self._stopped(slots, tokens, self.slots.length[slots] - 1, None) if any(self.stops) else eos

    def cut(self, slots: Tensor, tokens: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks up to the first token that completes the text of their slot.

        Args:
            slots: (n,) int64.
            tokens: (n, K) int64.
            count: (n,) int64, tokens that each block has.

        Returns:
            how many tokens of each stand, (n,) int64, and whether the last of them completes the text, (n,) bool.
        """
        ends = torch.from_numpy(self.is_eos.numpy()[tokens.numpy()])
        if any(self.stops):
            for k in range(tokens.shape[1]):
                ends[:, k] |= self._stopped(slots, tokens[:, k], self.slots.length[slots], tokens[:, :k])
        stops = ends.numpy() & (np.arange(tokens.shape[1]) < count.numpy()[:, None])
        ended = stops.any(1)
        kept = np.where(ended, stops.argmax(1) + 1, count.numpy()) if tokens.shape[1] else count.numpy()
        return torch.from_numpy(kept), torch.from_numpy(ended)

    def _stopped(self, slots: Tensor, tokens: Tensor, length: Tensor, drafted: Tensor | None) -> Tensor:
        """Whether a token completes a stop string behind the first ``length`` own tokens and what is drafted."""
        found = torch.zeros(len(slots), dtype=torch.bool)
        for i, (slot, token, n) in enumerate(zip(slots.tolist(), tokens.tolist(), length.tolist(), strict=True)):
            found[i] = self._completes(slot, token, n, None if drafted is None else drafted[i])
        return found

    def _completes(self, slot: int, token: int, n: int, drafted: Tensor | None) -> bool:
        """Whether a token completes a stop string behind the first ``n`` own tokens of a slot and some drafted ones."""
        stops, spelt = self.stops[slot // self.slots.N], self.vocabulary.shown[token]
        if not stops or not spelt:
            return False
        row = self.slots.tokens[slot, :n]
        return stops.completes(self._tail(row if drafted is None else torch.cat([row, drafted]), stops.reach), spelt)

    def _tail(self, row: Tensor, reach: int) -> bytes:
        """At least the last ``reach`` bytes that some tokens spell, or all."""
        width = max(reach, 1)
        while True:
            tail = self.vocabulary.bytes_of(row[-width:].tolist())
            if len(tail) >= reach or width >= len(row):
                return tail
            width *= 2
