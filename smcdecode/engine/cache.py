"""The keys and values of one model, in pages. Knows page numbers and tensors; not who owns a page, nor why."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["KVStore", "LayerShape", "Layout", "bytes_per_page"]


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores for a token: ``kv_heads`` keys and values of these many dimensions."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Layout:
    """What a model stores for a token, layer by layer, as its own attention calls showed it.

    Attributes:
        layers: one shape per attention layer, in the model's order.
        dtype: of keys and values.
        device: where they live.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device


def bytes_per_page(layout: Layout, page_size: int) -> int:
    """Bytes that one page of ``page_size`` tokens takes over all layers."""
    numbers = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layout.layers)
    return page_size * numbers * layout.dtype.itemsize


class KVStore:
    """Keys and values of one model: per layer ``(pages, page_size, kv_heads, dim)``.

    Page 0 is the null page that pads tables; it is read, behind a mask, so it always holds finite numbers.

    Attributes:
        keys, values: one tensor a layer.
        slot_keys, slot_values: the same memory as ``(slots, kv_heads, dim)``, where slot = page · page_size + offset.
        bytes_moved: bytes that ``copy_pages`` has copied so far.
    """

    def __init__(self, layout: Layout, pages: int, page_size: int) -> None:
        self.layout, self.pages, self.page_size = layout, pages, page_size
        self.keys = [self._zeros(layer.kv_heads, layer.key_dim) for layer in layout.layers]
        self.values = [self._zeros(layer.kv_heads, layer.value_dim) for layer in layout.layers]
        self.slot_keys = [keys.flatten(0, 1) for keys in self.keys]
        self.slot_values = [values.flatten(0, 1) for values in self.values]
        self.bytes_moved = 0

    def _zeros(self, heads: int, dim: int) -> Tensor:
        return torch.zeros(self.pages, self.page_size, heads, dim, dtype=self.layout.dtype, device=self.layout.device)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put key and value (T, kv_heads, dim) of one layer into slots (T,) int64."""
        self.slot_keys[layer].index_copy_(0, slots, key)
        self.slot_values[layer].index_copy_(0, slots, value)

    def copy_pages(self, src: Tensor, dst: Tensor) -> None:
        """Copy pages src (n,) int64 over pages dst (n,) int64 in every layer, and count the bytes."""
        for stored in (*self.keys, *self.values):
            stored.index_copy_(0, dst, stored.index_select(0, src))
        self.bytes_moved += len(src) * bytes_per_page(self.layout, self.page_size)
