"""The keys and values of one model, in pages. Knows page numbers and tensors; not who owns a page, nor why."""

from dataclasses import astuple, dataclass

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
    """Keys and values of one model in pages; a token's keys and values of a layer lie side by side.

    Page 0 is the null page that pads tables; it is read, behind a mask, so it always holds finite numbers.

    Attributes:
        keys: one ``(pages, page_size, kv_heads, key_dim)`` view a layer.
        values: one ``(pages, page_size, kv_heads, value_dim)`` view a layer.
        bytes_moved: bytes that ``copy_pages`` has copied so far.
    """

    def __init__(self, layout: Layout, pages: int, page_size: int) -> None:
        self.layout, self.pages, self.page_size = layout, pages, page_size
        self.bytes_moved = 0
        self._shapes = [astuple(layer) for layer in layout.layers]
        widths = [heads * (key_dim + value_dim) for heads, key_dim, value_dim in self._shapes]
        self._rows = [  # a row per slot, where slot = page · page_size + offset
            torch.zeros(pages * page_size, width, dtype=layout.dtype, device=layout.device) for width in widths
        ]
        parts = [self.split(layer, rows) for layer, rows in enumerate(self._rows)]
        self.keys = [torch.unflatten(key, 0, (pages, page_size)) for key, _ in parts]
        self.values = [torch.unflatten(value, 0, (pages, page_size)) for _, value in parts]

    def split(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The keys (n, kv_heads, key_dim) and values (n, kv_heads, value_dim) that rows of a layer hold."""
        heads, key_dim, value_dim = self._shapes[layer]
        cut = heads * key_dim
        return rows[:, :cut].view(-1, heads, key_dim), rows[:, cut:].view(-1, heads, value_dim)

    def close(self) -> None:
        """Let the memory go, whoever still knows the store."""
        for tensors in (self._rows, self.keys, self.values):
            tensors.clear()

    def read(self, layer: int, slots: Tensor | slice) -> Tensor:
        """The rows of a layer in slots: a view for a slice, a copy for (n,) int64 numbers."""
        return self._rows[layer][slots] if isinstance(slots, slice) else self._rows[layer].index_select(0, slots)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put key (T, kv_heads, key_dim) and value (T, kv_heads, value_dim) of a layer into slots (T,) int64."""
        row = _joined(key, value)
        self._rows[layer].index_copy_(0, slots, row)

    def copy_pages(self, src: Tensor, dst: Tensor) -> None:
        """Copy pages src (n,) int64 over pages dst (n,) int64 in every layer, and count the bytes."""
        self.move_pages(*(pages.to(self.layout.device) for pages in (src, dst)))
        self.bytes_moved += len(src) * bytes_per_page(self.layout, self.page_size)

    def move_pages(self, src: Tensor, dst: Tensor) -> None:
        """Copy pages src (n,) int64 over pages dst (n,) int64 in every layer."""
        for rows in self._rows:
            paged = torch.unflatten(rows, 0, (self.pages, self.page_size))
            paged.index_copy_(0, dst, paged.index_select(0, src))


def _joined(key: Tensor, value: Tensor) -> Tensor:
    """Key and value of each token in one row, (T, kv_heads · (key_dim + value_dim)); no copy if they lie so already."""
    tokens, heads, dim = key.shape
    step = key.stride(0)
    alike = key.device.type == "cpu" and value.stride(0) == step  # elsewhere the two come from two products
    beside = alike and key.data_ptr() + heads * dim * key.element_size() == value.data_ptr()
    if beside and key.stride()[1:] == value.stride()[1:] == (dim, 1) and value.shape == key.shape:
        return key.as_strided((tokens, 2 * heads * dim), (step, 1))
    return torch.cat([key.reshape(tokens, -1), value.reshape(tokens, -1)], 1)
