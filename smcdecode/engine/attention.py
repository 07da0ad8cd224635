"""Paged attention on plain torch: which slots a pass reads, and the reading. Knows page numbers, not particles or text.

``plan`` does all index arithmetic of a pass once; ``View.attend`` then runs once a layer. A shared prompt is read once
for all rows of its group, each row's own pages are gathered, and the two partial results are merged by their
log-sum-exp (a cascade, as in FlashInfer; Ye et al. 2025, arXiv 2501.01005).

A row's result does not depend on which other rows share the pass: whatever decides the order of floating-point sums
(lengths, paddings, the split of a call) follows from the row's own group.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from smcdecode.engine.cache import KVStore

__all__ = ["Batch", "Rule", "TorchView", "View", "causal", "plan"]

LENGTH_STEP = 32  # own lengths are padded to a multiple, so that a kernel's vector tails do not depend on the padding
FOLD_BYTES = 1 << 18  # a lone row's prompt of at most so many bytes a layer is gathered with its own pages
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
        device, size = store.layout.device, store.page_size
        rows = _rows(batch)
        table = _slots(batch.own_pages, size)  # (B, M · page_size)
        row = torch.arange(len(rows)).repeat_interleave(batch.q_len)  # (T,)
        self.total, self.groups = len(row), batch.group[row]
        within = torch.arange(self.total) - torch.tensor([r.token for r in rows])[row]
        at = (batch.own_len - batch.q_len)[row] + within  # (T,) index into the suffix
        positions = torch.tensor([r.prefix_len for r in rows])[row] + at
        prompts = [_slots(p, size)[:n] for p, n in zip(batch.prefix_pages, batch.prefix_len, strict=True)]
        folded = {r.row for r in rows if _folds(r, store)}
        self.new = table[row, at].to(device)
        self.fresh = [r for r in rows if r.fresh]
        self.shared = [_Shared(*part, device) for part in _prompts(rows, folded, prompts, positions)]
        keyed = [(r, (prompts[r.group] if r.row in folded else None)) for r in rows if not r.fresh]
        self.own = [_own(piece, table, positions, device) for piece in _pieces(keyed, store.layout.dtype)]
        self.whole = len(self.own) == 1 and self.own[0].covers(self.total)

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
        query = torch.unflatten(query, 1, (key.shape[1], -1))  # (T, Hk, fold, D): the heads that share a key head
        out, lse = self._own_part(layer, query, key, value, rule)  # (T, Hk, fold, Dv), (T, Hk, fold)
        for shared in self.shared:
            self._add_prompt(shared, layer, query, out, lse, rule)
        return out.flatten(1, 2)

    def _own_part(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        keys, values = self.store.slot_keys[layer], self.store.slot_values[layer]
        if self.whole:
            return self.own[0].attend(query, keys, values, rule)
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        for piece in self.own:
            part, part_lse = piece.attend(query, keys, values, rule)
            out.index_copy_(0, piece.tokens, part)  # a padding query repeats its row's last one, and its result
            lse.index_copy_(0, piece.tokens, part_lse)
        for row in self.fresh:
            new = slice(row.token, row.token + row.q_len)
            out[new], lse[new] = causal(query[new], key[new], value[new], rule)
        return out, lse

    def _add_prompt(self, shared: "_Shared", layer: int, query: Tensor, out: Tensor, lse: Tensor, rule: Rule) -> None:
        """Merge the prompt's part into out and lse, in place."""
        new = slice(shared.start, shared.stop)
        part = shared.attend(query[new], self.store.slot_keys[layer], self.store.slot_values[layer], rule)
        if part is not None:
            weight = torch.sigmoid(part[1] - lse[new])  # of the prompt's part in the softmax over both
            out[new] = torch.lerp(out[new], part[0], weight[..., None].to(out.dtype))


class _Shared:
    """A prompt read once for all queries of its group.

    Args:
        start, stop: packed indices of the queries.
        slots: (n,) int64 slots of the prompt.
        positions: (stop − start,) int64 absolute positions of the queries.
        device: of the store.
    """

    def __init__(self, start: int, stop: int, slots: Tensor, positions: Tensor, device: torch.device) -> None:
        self.start, self.stop, self.length = start, stop, len(slots)
        self.lowest, self.highest = int(positions.min()), int(positions.max())
        self.positions = positions.to(device)
        first = int(slots[0])
        self.first = first if torch.equal(slots, torch.arange(first, first + len(slots))) else None
        self.slots = slots.to(device)
        self._masks: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> tuple[Tensor, Tensor] | None:
        """Output (n, Hk, fold, Dv) and log-sum-exp (n, Hk, fold) over the prompt; None if no query sees any of it."""
        begin = 0 if rule.window is None else max(self.lowest - rule.window + 1, 0)
        if begin >= self.length:
            return None
        n, fold = query.shape[0], query.shape[2]
        mask, blind = self._mask(rule.window, begin, fold, query.dtype)
        folded = query.transpose(0, 1).flatten(1, 2)[None]  # (1, Hk, n · fold, D)
        out, lse = _attention(folded, self._read(keys, begin), self._read(values, begin), mask, rule)
        if blind is not None:
            lse = lse.masked_fill(blind, -torch.inf)
        out, lse = (torch.unflatten(x[0], 1, (n, fold)).transpose(0, 1) for x in (out, lse))  # (n, Hk, fold, …)
        return out, lse

    def _read(self, stored: Tensor, begin: int) -> Tensor:
        if self.first is None:
            rows = stored.index_select(0, self.slots[begin:])
        else:
            rows = stored[self.first + begin : self.first + self.length]
        return rows.transpose(0, 1)[None]  # (1, Hk, n, D)

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


class _Own:
    """Rows attended together with what only they read, padded to one shape.

    Args:
        tokens: (B, Q) int64 packed indices of the queries; a row with fewer repeats its last one.
        slots: (B, L) int64 slots of keys; a row with fewer is padded by the null page.
        positions: (B, Q) int64 absolute positions of the queries.
        first: (B,) int64 absolute position of each row's key 0.
        device: of the store.
    """

    def __init__(self, tokens: Tensor, slots: Tensor, positions: Tensor, first: Tensor, device: torch.device) -> None:
        self.shape, self.length = tokens.shape, slots.shape[1]
        at = first[:, None] + torch.arange(self.length)  # (B, L)
        self.at, self.positions = at[:, None].to(device), positions[:, :, None].to(device)
        self.tokens, self.slots = tokens.flatten().to(device), slots.flatten().to(device)
        self.in_order = torch.equal(self.tokens, torch.arange(len(self.tokens), device=device))
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = {}

    def covers(self, total: int) -> bool:
        """Whether the queries are all ``total`` packed tokens, in order."""
        return self.in_order and len(self.tokens) == total

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """Output (B · Q, Hk, fold, Dv) and log-sum-exp (B · Q, Hk, fold) over the rows' own keys."""
        picked = query if self.covers(len(query)) else query.index_select(0, self.tokens)
        rows = torch.unflatten(picked, 0, self.shape).transpose(1, 2).flatten(2, 3)  # (B, Hk, Q · fold, D)
        mask = self._mask(rule.window, query.shape[2], query.dtype)
        out, lse = _attention(rows, self._read(keys), self._read(values), mask, rule)
        return self._packed(out), self._packed(lse)

    def _packed(self, out: Tensor) -> Tensor:
        """(B, Hk, Q · fold, …) → (B · Q, Hk, fold, …)."""
        return torch.unflatten(out, 2, (self.shape[1], -1)).transpose(1, 2).flatten(0, 1)

    def _read(self, stored: Tensor) -> Tensor:
        return torch.unflatten(stored.index_select(0, self.slots), 0, (self.shape[0], self.length)).transpose(1, 2)

    def _mask(self, window: int | None, fold: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask (B, 1, Q · fold or 1, L); None where every query sees every key."""
        key = (window, fold if self.shape[1] > 1 else 1, dtype)
        if key not in self._masks:
            hidden = self.at > self.positions  # (B, Q, L)
            if window is not None:
                hidden |= self.at <= self.positions - window
            self._masks[key] = _additive(hidden.repeat_interleave(key[1], 1), dtype)[:, None] if hidden.any() else None
        return self._masks[key]


class _Row(NamedTuple):
    """One row of a batch in plain numbers."""

    row: int
    group: int
    lone: bool  # no other row shares its prompt
    token: int  # packed index of its first new token
    q_len: int
    own_len: int
    prefix_len: int

    @property
    def fresh(self) -> bool:
        """Whether its suffix holds new tokens only, and enough of them to be attended without padding."""
        return self.q_len == self.own_len and self.q_len >= LONG_QUERY


def _rows(batch: Batch) -> list[_Row]:
    q_len, own_len, group = batch.q_len.tolist(), batch.own_len.tolist(), batch.group.tolist()
    starts, count = [0, *accumulate(q_len)], Counter(group)
    return [
        _Row(i, g, count[g] == 1, starts[i], q_len[i], own_len[i], batch.prefix_len[g]) for i, g in enumerate(group)
    ]


def _slots(pages: Tensor, page_size: int) -> Tensor:
    """The slots of pages (…, n), in order: (…, n · page_size) int64."""
    return (pages[..., None] * page_size + torch.arange(page_size)).flatten(-2)


def _folds(row: _Row, store: KVStore) -> bool:
    """Whether a row's prompt is gathered with its own pages: one call instead of two, at the price of a copy."""
    widest = max(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in store.layout.layers)
    small = row.prefix_len * widest * store.layout.dtype.itemsize <= FOLD_BYTES
    return row.lone and row.prefix_len > 0 and small and not row.fresh


def _prompts(
    rows: Sequence[_Row], folded: set[int], prompts: Sequence[Tensor], positions: Tensor
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """First and last packed index, slots and query positions of each prompt that is read apart."""
    for group, of_group in groupby(rows, key=lambda r: r.group):
        members = list(of_group)
        if len(prompts[group]) and members[0].row not in folded:
            start, stop = members[0].token, members[-1].token + members[-1].q_len
            yield start, stop, prompts[group], positions[start:stop]


_Keyed = tuple[_Row, Tensor | None]  # a row, and the slots of its prompt if they are gathered with its own


def _pieces(rows: Sequence[_Keyed], dtype: torch.dtype) -> list[list[_Keyed]]:
    """Rows to be attended together.

    In bfloat16 the CPU kernel gives a row the same bits under any padding by LENGTH_STEP, so rows of like length go
    together; in other types only rows of one padded shape do, so that the padding is a row's own affair.
    """
    pieces: dict[tuple[int, ...], list[_Keyed]] = defaultdict(list)
    for row, prompt in rows:
        length = _padded(row.own_len + (0 if prompt is None else len(prompt)))
        shape = (max(length, 256).bit_length(),) if dtype == torch.bfloat16 else (length, row.q_len)
        pieces[shape].append((row, prompt))
    return list(pieces.values())


def _padded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def _own(piece: Sequence[_Keyed], table: Tensor, positions: Tensor, device: torch.device) -> _Own:
    index = torch.tensor([row.row for row, _ in piece])
    q_len = torch.tensor([row.q_len for row, _ in piece])
    start = torch.tensor([row.token for row, _ in piece])
    first = torch.tensor([0 if prompt is not None else row.prefix_len for row, prompt in piece])
    tokens = start[:, None] + torch.minimum(torch.arange(int(q_len.max())), q_len[:, None] - 1)  # (B, Q)
    length = _padded(max(row.own_len + (0 if prompt is None else len(prompt)) for row, prompt in piece))
    slots = functional.pad(table[index], (0, length))[:, :length].contiguous()
    for i, (row, prompt) in enumerate(piece):
        if prompt is not None:
            slots[i] = torch.cat([prompt, functional.pad(table[row.row], (0, length))])[:length]
    return _Own(tokens, slots, positions[tokens], first, device)


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
    """Causal attention of one row's new tokens among themselves: (T, Hk, fold, Dv) and log-sum-exp (T, Hk, fold).

    Queries go in blocks, each against the keys it can see, so that the masks stay small for prompts of any length.
    """
    total, _, fold, _ = query.shape
    step = 512 if rule.window is None else min(512, max(rule.window, LENGTH_STEP))
    parts = []
    for start in range(0, total, step):
        stop = min(start + step, total)
        low = 0 if rule.window is None else max(start - rule.window + 1, 0)
        at, seen = torch.arange(start, stop, device=query.device)[:, None], torch.arange(low, stop, device=query.device)
        hidden = seen > at
        if rule.window is not None:
            hidden |= seen <= at - rule.window
        q = query[start:stop].permute(1, 2, 0, 3).flatten(0, 1)[None]  # (1, H, n, D)
        k, v = (x[low:stop].transpose(0, 1).repeat_interleave(fold, 0)[None] for x in (key, value))
        out, lse = _attention(q, k, v, _additive(hidden, query.dtype), rule)
        parts.append((out[0].transpose(0, 1), lse[0].transpose(0, 1)))
    out, lse = (torch.unflatten(torch.cat(part), 1, query.shape[1:3]) for part in zip(*parts, strict=True))
    return out, lse
