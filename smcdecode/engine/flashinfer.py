"""Attention by FlashInfer's kernels: plans, and the merge of prompts with rows' own keys. Knows no particle, no text.

A batch is read in one of two ways (Ye et al. 2025, arXiv 2501.01005): *whole*, a request a row over its prompt's pages
and its own, or as a *cascade*, each prompt once for all rows of its group, each row's own pages, and the two results
merged by their log-sum-exp. FlashInfer's log-sum-exps are of base 2, both of them, and its own merge reads them so.
"""

from typing import Any

import torch
from torch import Tensor

from smcdecode.engine.attention import Batch, Frame, Rule
from smcdecode.engine.cache import KVStore
from smcdecode.engine.fixed_flashinfer import FixedFlashInfer, FixedFlashInferView, numbers
from smcdecode.engine.page_lists import PageLists, new_slots, own_lists, prompt_lists, visible, whole_lists

__all__ = ["FlashInfer", "FlashInferView"]

CASCADE_FROM = 8192  # tokens of a prompt from which reading it once pays for a second call and a merge
WORKSPACE = 128 << 20  # bytes of scratch memory, as FlashInfer's documentation asks


class FlashInfer:
    """FlashInfer on one device: its scratch memory and its wrappers, which all passes share, one after another.

    Args:
        library: the module ``flashinfer``, or what stands for it.
        device: where keys and values lie.
        backend: FlashInfer's own choice of kernels: "auto", "fa2", "fa3", …
    """

    name = "flashinfer"

    def __init__(self, library: Any, device: torch.device, backend: str = "auto") -> None:
        self.library, self.device, self.backend = library, device, backend
        self._scratch = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._fixed = FixedFlashInfer(library, self._scratch)
        self._wrappers: dict[tuple[str, Rule, int], tuple[Any, object]] = {}

    def plan(self, batch: Batch, store: KVStore) -> "FlashInferView":
        """The view of a batch on a store."""
        return FlashInferView(batch, store, self)

    def fixed(self, frame: Frame, store: KVStore) -> FixedFlashInferView:
        """The view of a pass of fixed shape on a store."""
        return FixedFlashInferView(frame, store, self._fixed)

    def wrapper(self, part: str, rule: Rule, kv_heads: int, owner: object) -> tuple[Any, bool]:
        """The wrapper of one part of a batch under one rule, and whether ``owner`` was the last to plan it."""
        key = (part, rule, kv_heads)
        if key not in self._wrappers:
            made = self.library.BatchPrefillWithPagedKVCacheWrapper(
                self._scratch, kv_layout="NHD", backend=self.backend
            )
            self._wrappers[key] = (made, None)
        wrapper, planned_by = self._wrappers[key]
        self._wrappers[key] = (wrapper, owner)
        return wrapper, planned_by is owner


class FlashInferView:
    """A pass planned for FlashInfer; see :class:`~smcdecode.engine.attention.View`. Layers of one rule share a plan."""

    def __init__(self, batch: Batch, store: KVStore, flashinfer: FlashInfer) -> None:
        self.store, self._batch, self._flashinfer = store, batch, flashinfer
        self.kin = batch.kin_of_tokens
        size = store.page_size
        self._new = new_slots(batch, size).to(flashinfer.device)
        self._whole = whole_lists(batch, size)
        self._long = max(batch.prefix_len) >= CASCADE_FROM
        if self._whole is None or self._long:
            self._own = own_lists(batch, size)
            self._prompts, tokens = prompt_lists(batch, size)
            self._tokens = None if len(tokens) == len(self.kin) else tokens.to(flashinfer.device)
        self._seen: dict[int, Tensor | None] = {}

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
        self.store.write(layer, self._new, key, value)
        rule = Rule(scaling, window, softcap)
        if self._whole is not None and (window is not None or not self._long):
            out: Tensor = self._run("whole", self._whole, layer, query, rule, causal=True)
            return out
        out, lse = self._run("own", self._own, layer, query, rule, causal=True, return_lse=True)
        return self._with_prompts(layer, query, rule, out, lse)

    def _with_prompts(self, layer: int, query: Tensor, rule: Rule, out: Tensor, lse: Tensor) -> Tensor:
        """``out`` (T, heads, value_dim) and its log-sum-exp (T, heads), with the prompts' parts merged in."""
        mask = None if rule.window is None else self._mask(rule.window)
        if mask is not None and not mask.any():
            return out
        picked = [query, out, lse] if self._tokens is None else [x[self._tokens] for x in (query, out, lse)]
        name = "prompts" if mask is None else f"prompts within {rule.window}"
        every = Rule(rule.scaling, None, rule.softcap)
        part, part_lse = self._run(name, self._prompts, layer, picked[0], every, mask=mask, return_lse=True)
        if mask is not None:
            blind = self._blind(mask)
            part, part_lse = (
                part.masked_fill(blind[:, None, None], 0.0),
                part_lse.masked_fill(blind[:, None], -torch.inf),
            )
        merged: Tensor = self._flashinfer.library.merge_state(picked[1], picked[2], part, part_lse)[0]
        return merged if self._tokens is None else out.index_copy(0, self._tokens, merged)

    def _mask(self, window: int) -> Tensor | None:
        if window not in self._seen:
            self._seen[window] = visible(self._batch, window)
        return self._seen[window]

    def _blind(self, mask: Tensor) -> Tensor:
        """Queries that see nothing of their prompt: (T',) bool."""
        lengths = torch.tensor([n for n in self._batch.prefix_len if n > 0])
        per_query = lengths.repeat_interleave(self._prompts.qo_indptr.diff().long())
        owner = torch.arange(len(per_query)).repeat_interleave(per_query)
        seen = torch.zeros(len(per_query), dtype=torch.int64).scatter_add_(0, owner, mask.long())
        return (seen == 0).to(self._flashinfer.device)

    def _run(
        self,
        part: str,
        lists: PageLists,
        layer: int,
        query: Tensor,
        rule: Rule,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """One part of the batch: output, or output and base-2 log-sum-exp."""
        keys, values = self.store.keys[layer], self.store.values[layer]  # (pages, page_size, kv_heads, dim)
        wrapper, planned = self._flashinfer.wrapper(part, rule, keys.shape[2], self)
        if not planned:
            wrapper.plan(
                lists.qo_indptr,
                lists.indptr,
                lists.indices[: int(lists.indptr[-1])],
                lists.last_page_len,
                query.shape[1],
                keys.shape[2],
                keys.shape[3],
                self.store.page_size,
                custom_mask=None if mask is None else mask.to(self._flashinfer.device),
                causal=causal,
                **numbers(rule, query, keys, values),
            )
        return wrapper.run(query, (keys, values), return_lse=return_lse)
