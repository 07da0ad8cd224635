"""Paged attention on plain torch: which slots a pass reads, and the reading. Knows page numbers, not particles or text.

``plan`` does all index arithmetic of a pass once; ``View.attend`` then runs once a layer. A shared prompt is read once
for all rows of its group, each row's own pages are gathered, and the two partial results are merged by their
log-sum-exp (a cascade, as in FlashInfer; Ye et al. 2025, arXiv 2501.01005).

A row's result does not depend on which other rows share the pass: whatever decides the order of floating-point sums
(lengths, paddings, the split of a call) follows from the row's own group.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from smcdecode.engine.cache import KVStore

__all__ = ["Batch", "Rule", "TorchView", "View", "causal", "plan"]

LENGTH_STEP = 32  # own lengths are padded to a multiple, so that a kernel's vector tails do not depend on the padding
COPY_BYTES = 1 << 18  # a prompt of at most so many bytes a layer may be gathered together with its rows' own pages
WASTED_SCORES = 6000  # and queries · own keys of its group may be at most this
LONG_QUERY = 32  # new rows from this length on are attended one by one, without padding


@dataclass(frozen=True)
class Batch:
    """What one pass attends to, in page numbers: B rows, T = Σ q_len packed tokens, rows ordered by group.

    Attributes:
        q_len: (B,) int64, new tokens of each row; they are the last of its suffix.
        own_pages: (B, M) int64, the pages of each row's suffix; page 0 is padding.
        own_len: (B,) int64, tokens in the suffix, new ones included.
        group: (B,) int64, nondecreasing; the group whose prompt precedes the suffix.
        prefix_pages: per group, the (n,) int64 pages of the shared prompt.
        prefix_len: per group, tokens in the shared prompt; 0 for none.
    """

    q_len: Tensor
    own_pages: Tensor
    own_len: Tensor
    group: Tensor
    prefix_pages: tuple[Tensor, ...]
    prefix_len: tuple[int, ...]


class View(Protocol):
    """One pass's way into keys and values. Planned once, then called once a layer.

    Attributes:
        groups: (T,) int64, the group of each packed token.
    """

    groups: Tensor

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
        """Store the new keys and values of a layer, attend, and return (T, heads, value_dim).

        Args:
            layer: index of the attention layer.
            query: (T, heads, key_dim), packed as the batch's rows.
            key: (T, kv_heads, key_dim).
            value: (T, kv_heads, value_dim).
            scaling: factor of the scores.
            window: a query at position p sees positions above p − window only; None for all.
            softcap: scores s become softcap · tanh(s / softcap); None for no cap.
        """


def plan(batch: Batch, store: KVStore) -> "TorchView":
    """The view of a batch on a store."""
    return TorchView(batch, store)


class Rule(NamedTuple):
    """How one layer scores; see :meth:`View.attend`."""

    scaling: float
    window: int | None
    softcap: float | None


class TorchView:
    """A pass planned for plain torch kernels, on any device; quick on a CPU. See :class:`View`."""

    def __init__(self, batch: Batch, store: KVStore) -> None:
        self.store = store
        rows = _rows(batch, store.page_size)
        self.groups = batch.group.repeat_interleave(batch.q_len)  # (T,)
        device = store.layout.device
        self.new = torch.from_numpy(np.concatenate([row.slots[row.own_len - row.q_len :] for row in rows])).to(device)
        prompts = [_slots(p, store.page_size)[:n] for p, n in zip(batch.prefix_pages, batch.prefix_len, strict=True)]
        self.fresh = [row for row in rows if row.fresh]
        self.shared: list[_Shared] = []
        entries: list[_Entry] = []
        for group, of_group in groupby(rows, key=lambda row: row.group):
            whole = _Entry(list(of_group), prompts[group])
            if _fits(whole, store):
                entries.append(whole)
                continue
            entries += [_Entry([row], prompts[group][:0]) for row in whole.rows if not row.fresh]
            if len(whole.prompt):
                self.shared.append(_Shared(whole, device))
        self.pools = [_Pool(pool, device) for pool in _alike(entries, store.layout.dtype)]
        self.whole = len(self.pools) == 1 and self.pools[0].covers(len(self.groups))

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


Numbers = npt.NDArray[np.int64]


class _Row(NamedTuple):
    """One row of a batch in plain numbers."""

    row: int
    group: int
    token: int  # packed index of its first new token
    q_len: int
    own_len: int
    prefix_len: int
    slots: Numbers  # (own_len,) of its suffix

    @property
    def fresh(self) -> bool:
        """Whether its suffix holds new tokens only, and enough of them to be attended without padding."""
        return self.q_len == self.own_len and self.q_len >= LONG_QUERY

    @property
    def total(self) -> int:
        """Tokens of prompt and suffix."""
        return self.prefix_len + self.own_len


def _rows(batch: Batch, page_size: int) -> list[_Row]:
    q_len, own_len, group = batch.q_len.tolist(), batch.own_len.tolist(), batch.group.tolist()
    starts, slots = [0, *accumulate(q_len)], _slots(batch.own_pages, page_size)
    return [
        _Row(i, g, starts[i], q_len[i], own_len[i], batch.prefix_len[g], slots[i, : own_len[i]])
        for i, g in enumerate(group)
    ]


def _slots(pages: Tensor, page_size: int) -> Numbers:
    """The slots of pages (…, n), in order: (…, n · page_size) int64."""
    slots: Numbers = (pages.cpu()[..., None] * page_size + torch.arange(page_size)).flatten(-2).numpy()
    return slots


class _Entry(NamedTuple):
    """One batch entry of an attention call: rows, and the prompt that all of them see (empty if it is read apart)."""

    rows: list[_Row]
    prompt: Numbers

    @property
    def queries(self) -> int:
        """Queries of all its rows."""
        return sum(row.q_len for row in self.rows)

    @property
    def keys(self) -> int:
        """Keys of its prompt and of all its rows."""
        return len(self.prompt) + sum(row.own_len for row in self.rows)


def _fits(entry: _Entry, store: KVStore) -> bool:
    """Whether a group is attended as one entry that holds its prompt and all its rows' keys.

    That saves a call and a merge, at the price of copying the prompt and of scores that the mask throws away.
    """
    widest = max(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in store.layout.layers)
    copied = len(entry.prompt) * widest * store.layout.dtype.itemsize
    wasted = 0 if len(entry.rows) == 1 else entry.queries * (entry.keys - len(entry.prompt))
    return copied <= COPY_BYTES and wasted <= WASTED_SCORES and not any(row.fresh for row in entry.rows)


def _alike(entries: Sequence[_Entry], dtype: torch.dtype) -> list[list[_Entry]]:
    """Entries to be attended by one call.

    In bfloat16 the CPU kernel gives a query the same bits under any padding of keys by LENGTH_STEP, so entries of like
    size go together; in other types only entries of one padded shape do, so that the padding is an entry's own affair.
    """
    pools: dict[tuple[int, int], list[_Entry]] = defaultdict(list)
    for entry in entries:
        length, queries = _padded(entry.keys), entry.queries
        like = (max(length, 256).bit_length(), max(queries, 8).bit_length())
        pools[like if dtype == torch.bfloat16 else (length, queries)].append(entry)
    return list(pools.values())


def _padded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


class _Pool:
    """Entries attended by one call, padded to one shape: E entries of Q queries and L keys."""

    def __init__(self, entries: Sequence[_Entry], device: torch.device) -> None:
        self.entries, self.width = len(entries), max(entry.queries for entry in entries)
        self.length = _padded(max(entry.keys for entry in entries))
        tokens, query_owner, query_at = np.zeros((3, self.entries, self.width), np.int64)
        slots, key_owner, key_at = np.zeros((3, self.entries, self.length), np.int64)
        key_owner[:] = NO_ONE
        for e, entry in enumerate(entries):
            _fill_queries(entry, tokens[e], query_owner[e], query_at[e])
            _fill_keys(entry, slots[e], key_owner[e], key_at[e])
        distance = query_at[:, :, None] - key_at[:, None]  # (E, Q, L)
        foreign = (key_owner[:, None] != query_owner[:, :, None]) & (key_owner[:, None] != ANYONE)
        self._hidden = torch.from_numpy(foreign | (distance < 0)).to(device)
        self._distance = torch.from_numpy(distance).to(device)
        self._in_order = bool((tokens.ravel() == np.arange(tokens.size)).all())
        self.tokens, self.slots = (torch.from_numpy(numbers.ravel()).to(device) for numbers in (tokens, slots))
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = {}

    def covers(self, total: int) -> bool:
        """Whether the queries are all ``total`` packed tokens, in order."""
        return self._in_order and len(self.tokens) == total

    def attend(self, store: KVStore, layer: int, query: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """Output (E · Q, heads, value_dim), and log-sum-exp for ``sums``, of queries (E · Q, heads, key_dim)."""
        key, value = store.split(layer, store.read(layer, self.slots))
        heads, fold = key.shape[1], query.shape[1] // key.shape[1]  # ``fold`` query heads share a key head
        folded = query.view(self.entries, self.width, heads, fold, -1).transpose(1, 2)
        out, lse = _attention(
            folded.reshape(self.entries, heads, self.width * fold, -1),
            key.view(self.entries, self.length, heads, -1).transpose(1, 2),
            value.view(self.entries, self.length, heads, -1).transpose(1, 2),
            self._mask(rule.window, fold, query.dtype),
            rule,
        )
        out = out.view(self.entries, heads, self.width, fold, -1).transpose(1, 2)
        return out.reshape(self.entries * self.width, heads * fold, -1), lse

    def sums(self, lse: Tensor) -> Tensor:
        """Log-sum-exp as :meth:`attend` returned it, per query and head: (E · Q, heads)."""
        return torch.unflatten(lse, 2, (self.width, -1)).transpose(1, 2).reshape(self.entries * self.width, -1)

    def _mask(self, window: int | None, fold: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask (E, 1, Q · fold or 1, L); None where every query sees every key."""
        key = (window, fold if self.width > 1 else 1, dtype)
        if key not in self._masks:
            hidden = self._hidden if window is None else self._hidden | (self._distance >= window)
            self._masks[key] = _additive(hidden.repeat_interleave(key[1], 1), dtype)[:, None] if hidden.any() else None
        return self._masks[key]


ANYONE, NO_ONE = -1, -2  # owners of a prompt's keys, and of padding


def _fill_queries(entry: _Entry, tokens: Numbers, owner: Numbers, at: Numbers) -> None:
    """Packed indices, rows and absolute positions of an entry's queries; its last one is repeated to the end."""
    start = 0
    for row in entry.rows:
        stop = start + row.q_len
        tokens[start:stop] = np.arange(row.token, row.token + row.q_len)
        owner[start:stop] = row.row
        at[start:stop] = np.arange(row.total - row.q_len, row.total)
        start = stop
    for numbers in (tokens, owner, at):
        numbers[start:] = numbers[start - 1]


def _fill_keys(entry: _Entry, slots: Numbers, owner: Numbers, at: Numbers) -> None:
    """Slots, rows and absolute positions of an entry's keys, the prompt's first."""
    start = len(entry.prompt)
    slots[:start], owner[:start], at[:start] = entry.prompt, ANYONE, np.arange(start)
    for row in entry.rows:
        stop = start + row.own_len
        slots[start:stop], owner[start:stop] = row.slots, row.row
        at[start:stop] = np.arange(row.prefix_len, row.total)
        start = stop


class _Shared:
    """A prompt read once for all queries of its group, apart from the rows' own keys."""

    def __init__(self, group: _Entry, device: torch.device) -> None:
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
        out, lse = _attention(folded, key.transpose(0, 1)[None], value.transpose(0, 1)[None], mask, rule)
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
            self._masks[window, fold, dtype] = _additive(hidden, dtype)[None, None], hidden.all(1)
        return self._masks[window, fold, dtype]


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Softmax attention of q (b, h, n, D) over k, v (b, h, L, D): output (b, h, n, Dv), log-sum-exp (b, h, n) float32.

    A query that sees nothing gives a finite output and an arbitrary log-sum-exp.
    """
    if rule.softcap is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        flash = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        )  # unlike its public face, it returns the sums
        out, lse = flash(q, k, v, attn_mask=mask, scale=rule.scaling)
        return out, lse
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp().to(v.dtype)
    return torch.matmul(weights, v), lse


def causal(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Causal attention of one row's T new tokens among themselves: (T, heads, value_dim) and log-sum-exp (T, heads).

    Queries go in blocks, each against the keys it can see, so that the masks stay small for prompts of any length.
    """
    total, fold = len(query), query.shape[1] // key.shape[1]
    step = 512 if rule.window is None else min(512, max(rule.window, LENGTH_STEP))
    parts = []
    for start in range(0, total, step):
        stop = min(start + step, total)
        low = 0 if rule.window is None else max(start - rule.window + 1, 0)
        at, seen = torch.arange(start, stop, device=query.device)[:, None], torch.arange(low, stop, device=query.device)
        hidden = seen > at
        if rule.window is not None:
            hidden |= seen <= at - rule.window
        q = query[start:stop].transpose(0, 1)[None]  # (1, heads, n, D)
        k, v = (x[low:stop].transpose(0, 1).repeat_interleave(fold, 0)[None] for x in (key, value))
        parts.append(_attention(q, k, v, _additive(hidden, query.dtype), rule))
    out, lse = (torch.cat(part, 2)[0].transpose(0, 1) for part in zip(*parts, strict=True))
    return out, lse
