"""Attention of passes of fixed shape on plain torch: nothing is read by the host. Knows page numbers, no particle.

Shapes and addresses stay from one pass to the next, only numbers change, and none of them is asked for by the host: so
a pass can be recorded once, as a CUDA graph, and replayed.
"""

import torch
from torch import Tensor

from smcdecode.engine.attention import Frame, Rule
from smcdecode.engine.cache import KVStore
from smcdecode.engine.dense import additive, attention

__all__ = ["FixedView", "new_slots"]


def new_slots(frame: Frame) -> Tensor:
    """Where keys and values of the tokens go: (S · Q,) int64, page · page_size + offset; into page 0 unless live."""
    at, size = frame.positions, frame.page_size
    page = frame.pages.gather(1, (at // size).clamp(max=frame.pages.shape[1] - 1)).long()
    return (page * size + at % size).masked_fill(~frame.live, 0).flatten()


class FixedView:
    """Attention of a frame on plain torch, over all pages that a row may have: for small contexts, and for tests."""

    def __init__(self, frame: Frame, store: KVStore) -> None:
        self.store, self.frame, self.new = store, frame, new_slots(frame)
        self.kin = torch.zeros_like(self.new)
        offset = torch.arange(store.page_size, device=self.new.device)
        self.slots = (frame.pages.long()[..., None] * store.page_size + offset).flatten()  # (S · L,)
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See :class:`~smcdecode.engine.attention.View`."""
        self.store.write(layer, self.new, key, value)
        (S, Q), L = self.frame.live.shape, len(self.slots) // len(self.frame.live)
        keys, values = (
            x.view(S, L, *x.shape[1:]).transpose(1, 2)
            for x in self.store.split(layer, self.store.read(layer, self.slots))
        )
        heads = keys.shape[1]
        fold = query.shape[1] // heads
        folded = query.view(S, Q, heads, fold, -1).permute(0, 2, 1, 3, 4).reshape(S, heads, Q * fold, -1)
        mask = self._mask(window, query.dtype).repeat_interleave(fold, 1)[:, None]
        out, _ = attention(folded, keys, values, mask, Rule(scaling, window, softcap))
        return out.view(S, heads, Q, fold, -1).permute(0, 2, 1, 3, 4).reshape(S * Q, heads * fold, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to scores: (S, Q, L)."""
        if window not in self._masks:
            at = self.frame.positions[..., None]
            key = torch.arange(len(self.slots) // len(at), device=at.device)
            hidden = key > at
            if window is not None:
                hidden |= key <= at - window
            self._masks[window] = additive(hidden, dtype)
        return self._masks[window]
