"""FlashInfer for passes of fixed shape: planned once, its lengths and page lists made on the device. Knows no particle.

FlashInfer plans on the host, from lengths that the host does not know here. Without splitting a row's keys over several
programs its plan depends on the numbers of queries alone, which are fixed; the kernels read lengths and pages from
buffers on the device, which each pass fills. What that costs is parallelism where few rows have long texts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smcdecode.engine.attention import Frame, Rule
from smcdecode.engine.cache import KVStore
from smcdecode.engine.fixed_view import new_slots
from smcdecode.engine.page_lists import PageLists

__all__ = ["FixedFlashInfer", "FixedFlashInferView", "frame_lists", "numbers"]


def frame_lists(frame: Frame) -> PageLists:
    """A request a row over its whole text, as in ``page_lists``, on the device: ``indices`` has room for all pages."""
    (S, Q), M, size = frame.live.shape, frame.pages.shape[1], frame.page_size
    held = -(-frame.length // size)
    zero = held.new_zeros(1)
    indptr = torch.cat([zero, held.cumsum(0)])
    column = torch.arange(M, device=held.device)
    place = torch.where(column < held[:, None], indptr[:-1, None] + column, S * M)  # behind the end: cut off
    indices = frame.pages.new_zeros(S * M + 1).scatter_(0, place.flatten(), frame.pages.flatten())[:-1]
    qo_indptr = torch.arange(S + 1, device=held.device) * Q
    return PageLists(qo_indptr.int(), indptr.int(), indices, ((frame.length - 1) % size + 1).int())


@dataclass
class _Shape:
    """The buffers of passes of one shape, which their wrappers read, and these by rule and shape of the heads."""

    lists: PageLists
    wrappers: dict[tuple[Any, ...], Any]


class FixedFlashInfer:
    """FlashInfer's wrappers for passes of fixed shape, and the buffers that they read.

    Args:
        library: the module ``flashinfer``, or what stands for it.
        scratch: memory for its kernels.
    """

    def __init__(self, library: Any, scratch: Tensor) -> None:
        self.library, self.scratch = library, scratch
        self._shapes: dict[tuple[int, ...], _Shape] = {}

    def fill(self, frame: Frame) -> _Shape:
        """The buffers of a frame's shape, filled with its lists."""
        key, lists = (*frame.live.shape, *frame.pages.shape, frame.page_size), frame_lists(frame)
        if key not in self._shapes:
            self._shapes[key] = _Shape(PageLists(*(x.clone() for x in _tensors(lists))), {})
        shape = self._shapes[key]
        for buffer, numbers in zip(_tensors(shape.lists), _tensors(lists), strict=True):
            buffer.copy_(numbers)
        return shape

    def wrapper(self, shape: _Shape, frame: Frame, rule: Rule, query: Tensor, keys: Tensor, values: Tensor) -> Any:
        """A planned wrapper over the buffers of a shape; made at the first pass, which is not recorded."""
        key = (rule, query.shape[1], *keys.shape[1:], values.shape[3], query.dtype)
        if key not in shape.wrappers:
            shape.wrappers[key] = self._plan(shape.lists, frame, rule, query, keys, values)
        return shape.wrappers[key]

    def _plan(self, lists: PageLists, frame: Frame, rule: Rule, query: Tensor, keys: Tensor, values: Tensor) -> Any:
        wrapper = self.library.BatchPrefillWithPagedKVCacheWrapper(
            self.scratch, kv_layout="NHD", use_cuda_graph=True, qo_indptr_buf=lists.qo_indptr,
            paged_kv_indptr_buf=lists.indptr, paged_kv_indices_buf=lists.indices,
            paged_kv_last_page_len_buf=lists.last_page_len, backend="fa2",
        )  # fmt: skip
        wrapper.plan(
            lists.qo_indptr.clone(),
            lists.indptr.clone(),
            lists.indices.clone(),
            lists.last_page_len.clone(),
            query.shape[1],
            keys.shape[2],
            keys.shape[3],
            frame.page_size,
            causal=True,
            disable_split_kv=True,
            **numbers(rule, query, keys, values),
        )
        return wrapper


def _tensors(lists: PageLists) -> tuple[Tensor, ...]:
    return lists.qo_indptr, lists.indptr, lists.indices, lists.last_page_len


def numbers(rule: Rule, query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Any]:
    """What a plan is told of scores and types, whatever its page lists are."""
    return {
        "head_dim_vo": values.shape[3], "sm_scale": rule.scaling, "logits_soft_cap": rule.softcap,
        "window_left": -1 if rule.window is None else rule.window - 1,
        "q_data_type": query.dtype, "kv_data_type": keys.dtype,
    }  # fmt: skip


class FixedFlashInferView:
    """A pass of fixed shape; see :class:`~smcdecode.engine.attention.View`."""

    def __init__(self, frame: Frame, store: KVStore, way: FixedFlashInfer) -> None:
        self.store, self.frame, self.way, self.new = store, frame, way, new_slots(frame)
        self.kin = torch.zeros_like(self.new)
        self.shape = way.fill(frame)

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
        keys, values = self.store.keys[layer], self.store.values[layer]  # (pages, page_size, kv_heads, dim)
        rule = Rule(scaling, window, softcap)
        wrapper = self.way.wrapper(self.shape, self.frame, rule, query, keys, values)
        out: Tensor = wrapper.run(query.contiguous(), (keys, values))
        return out
