"""Paged attention on plain torch: which slots a pass reads, and the reading. Knows page numbers, not particles or text.

``plan`` does all index arithmetic of a pass once; ``View.attend`` then runs once a layer. A shared prompt is read once
for all rows of its group, each row's own pages are gathered, and the two partial results are merged by their
log-sum-exp (a cascade, as in FlashInfer; Ye et al. 2025, arXiv 2501.01005).

A row's result does not depend on which other rows share the pass: whatever decides the order of floating-point sums
(lengths, paddings, the split of a call) follows from the row's own group.
"""

from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from smcdecode.engine.attention import Batch, Frame, Rule
from smcdecode.engine.cache import KVStore
from smcdecode.engine.dense import additive, attention, causal
from smcdecode.engine.fixed_view import FixedView
from smcdecode.engine.pools import Entry, Pool, alike, fits, rows_of, slots_of

__all__ = ["TorchAttention", "TorchView"]


class TorchAttention:
    """Attention on plain torch."""

    name = "torch"

    def plan(self, batch: Batch, store: KVStore) -> "TorchView":
        """The view of a batch on a store."""
        return TorchView(batch, store)

    def fixed(self, frame: Frame, store: KVStore) -> FixedView:
        """The view of a pass of fixed shape on a store."""
        return FixedView(frame, store)


class TorchView:
    """A pass planned for plain torch kernels, on any device; quick on a CPU. See :class:`View`."""

    def __init__(self, batch: Batch, store: KVStore) -> None:
        self.store = store
        rows = rows_of(batch, store.page_size)
        self.kin = batch.kin_of_tokens
        device = store.layout.device
        self.new = torch.from_numpy(np.concatenate([row.slots[row.own_len - row.q_len :] for row in rows])).to(device)
        prompts = [slots_of(p, store.page_size)[:n] for p, n in zip(batch.prefix_pages, batch.prefix_len, strict=True)]
        self.fresh = [row for row in rows if row.fresh]
        self.shared: list[_Shared] = []
        entries: list[Entry] = []
        for group, of_group in groupby(rows, key=lambda row: row.group):
            whole = Entry(list(of_group), prompts[group])
            if fits(whole, store):
                entries.append(whole)
                continue
            entries += [Entry([row], prompts[group][:0]) for row in whole.rows if not row.fresh]
            if len(whole.prompt):
                self.shared.append(_Shared(whole, device))
        self.pools = [Pool(pool, device) for pool in alike(entries, store.layout.dtype)]
        self.whole = len(self.pools) == 1 and self.pools[0].covers(len(self.kin))

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
        """See :class:`View`."""
        self.store.write(layer, self.new, key, value)
        rule = Rule(scaling, window, softcap)
        if self.whole and not self.shared:
            return self.pools[0].attend(self.store, layer, query, rule)[0]
        out, lse = self._own(layer, query, key, value, rule)  # (T, heads, value_dim), (T, heads)
        for shared in self.shared:
            out = shared.merge(self.store, layer, query, out, lse, rule)
        return out

    def _own(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of all queries over everything but the prompts that are read apart."""
        if self.whole:
            out, lse = self.pools[0].attend(self.store, layer, query, rule)
            return out, self.pools[0].sums(lse)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        for pool in self.pools:
            part, part_lse = pool.attend(self.store, layer, query.index_select(0, pool.tokens), rule)
            out.index_copy_(0, pool.tokens, part)  # a padding query repeats its entry's last one, and its result
            lse.index_copy_(0, pool.tokens, pool.sums(part_lse))
        for row in self.fresh:
            new = slice(row.token, row.token + row.q_len)
            out[new], lse[new] = causal(query[new], key[new], value[new], rule)
        return out, lse


class _Shared:
    """A prompt read once for all queries of its group, apart from the rows' own keys."""

    def __init__(self, group: Entry, device: torch.device) -> None:
        rows, prompt = group
        self.tokens = slice(rows[0].token, rows[-1].token + rows[-1].q_len)
        self.length = len(prompt)
        positions = np.concatenate([np.arange(row.total - row.q_len, row.total) for row in rows])
        self.lowest, self.highest = int(positions.min()), int(positions.max())
        self.positions, self.slots = (torch.from_numpy(numbers).to(device) for numbers in (positions, prompt))
        first = int(prompt[0])
        self.first = first if (prompt == np.arange(first, first + len(prompt))).all() else None
        self._masks: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def merge(self, store: KVStore, layer: int, query: Tensor, out: Tensor, lse: Tensor, rule: Rule) -> Tensor:
        """``out`` (T, heads, value_dim) with the prompt's part merged into the group's queries."""
        begin = 0 if rule.window is None else max(self.lowest - rule.window + 1, 0)
        if begin >= self.length:
            return out  # no query sees any of it
        part, part_lse = self._attend(store, layer, query[self.tokens], begin, rule)
        weight = torch.sigmoid(part_lse - lse[self.tokens])[..., None].to(out.dtype)  # in the softmax over both
        if len(part) == len(out):
            return torch.lerp(out, part, weight)
        out[self.tokens] = torch.lerp(out[self.tokens], part, weight)
        return out

    def _attend(self, store: KVStore, layer: int, query: Tensor, begin: int, rule: Rule) -> tuple[Tensor, Tensor]:
        """Output (n, heads, value_dim) and log-sum-exp (n, heads) over prompt positions from ``begin`` on."""
        slots = self.slots[begin:] if self.first is None else slice(self.first + begin, self.first + self.length)
        key, value = store.split(layer, store.read(layer, slots))
        n, heads, fold = len(query), key.shape[1], query.shape[1] // key.shape[1]
        folded = query.view(n, heads, fold, -1).transpose(0, 1).reshape(1, heads, n * fold, -1)
        mask, blind = self._mask(rule.window, begin, fold, query.dtype)
        out, lse = attention(folded, key.transpose(0, 1)[None], value.transpose(0, 1)[None], mask, rule)
        if blind is not None:
            lse = lse.masked_fill(blind, -torch.inf)
        out, lse = out.view(heads, n, fold, -1).transpose(0, 1), lse.view(heads, n, fold).transpose(0, 1)
        return out.reshape(n, heads * fold, -1), lse.reshape(n, heads * fold)

    def _mask(
        self, window: int | None, begin: int, fold: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Additive mask (n · fold, keys) and which of its rows see nothing; two Nones where every query sees all."""
        if window is None or self.highest - window < begin:
            return None, None
        if (window, fold, dtype) not in self._masks:
            at = torch.arange(begin, self.length, device=self.positions.device)
            hidden = (at <= self.positions[:, None] - window).repeat_interleave(fold, 0)
            self._masks[window, fold, dtype] = additive(hidden, dtype)[None, None], hidden.all(1)
        return self._masks[window, fold, dtype]
