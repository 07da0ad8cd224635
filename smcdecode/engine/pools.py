"""Rows of a batch padded to one shape and attended by one call. Knows slots of pages; no prompt that is read apart."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from smcdecode.engine.attention import Batch, Rule
from smcdecode.engine.cache import KVStore
from smcdecode.engine.dense import LENGTH_STEP, additive, attention

__all__ = ["Entry", "Numbers", "Pool", "Row", "alike", "fits", "rows_of", "slots_of"]

COPY_BYTES = 1 << 18  # a prompt of at most so many bytes a layer may be gathered together with its rows' own pages
WASTED_SCORES = 12000  # and queries · own keys of its group may be at most this
LONG_QUERY = 96  # new rows from this length on are attended one by one, without padding
SHORT = 256  # keys: up to so many, queries that are padded cost less than another call


Numbers = npt.NDArray[np.int64]


class Row(NamedTuple):
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


def rows_of(batch: Batch, page_size: int) -> list[Row]:
    """The rows of a batch, in order."""
    q_len, own_len, group = batch.q_len.tolist(), batch.own_len.tolist(), batch.group.tolist()
    starts, slots = [0, *accumulate(q_len)], slots_of(batch.own_pages, page_size)
    return [
        Row(i, g, starts[i], q_len[i], own_len[i], batch.prefix_len[g], slots[i, : own_len[i]])
        for i, g in enumerate(group)
    ]


def slots_of(pages: Tensor, page_size: int) -> Numbers:
    """The slots of pages (…, n), in order: (…, n · page_size) int64."""
    slots: Numbers = (pages.cpu()[..., None] * page_size + torch.arange(page_size)).flatten(-2).numpy()
    return slots


class Entry(NamedTuple):
    """One batch entry of an attention call: rows, and the prompt that all of them see (empty if it is read apart)."""

    rows: list[Row]
    prompt: Numbers

    @property
    def queries(self) -> int:
        """Queries of all its rows."""
        return sum(row.q_len for row in self.rows)

    @property
    def keys(self) -> int:
        """Keys of its prompt and of all its rows."""
        return len(self.prompt) + sum(row.own_len for row in self.rows)


def fits(entry: Entry, store: KVStore) -> bool:
    """Whether a group is attended as one entry that holds its prompt and all its rows' keys.

    That saves a call and a merge, at the price of copying the prompt and of scores that the mask throws away.
    """
    widest = max(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in store.layout.layers)
    copied = len(entry.prompt) * widest * store.layout.dtype.itemsize
    wasted = 0 if len(entry.rows) == 1 else entry.queries * (entry.keys - len(entry.prompt))
    return copied <= COPY_BYTES and wasted <= WASTED_SCORES and not any(row.fresh for row in entry.rows)


def alike(entries: Sequence[Entry], dtype: torch.dtype) -> list[list[Entry]]:
    """Entries to be attended by one call.

    In bfloat16 the CPU kernel gives a query the same bits under any padding of keys by LENGTH_STEP, so entries of like
    size go together, and short ones however many queries they have up to 127; in other types only entries of one padded
    shape do, so that the padding is an entry's own affair.
    """
    pools: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        length, queries = _padded(entry.keys), entry.queries
        like = (max(length, SHORT).bit_length(), max(queries, 64 if length <= SHORT else 8).bit_length())
        pools[like if dtype == torch.bfloat16 else (length, queries)].append(entry)
    return list(pools.values())


def _padded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


class Pool:
    """Entries attended by one call, padded to one shape: E entries of Q queries and L keys."""

    def __init__(self, entries: Sequence[Entry], device: torch.device) -> None:
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
        folded = folded.reshape(self.entries, heads, self.width * fold, -1)
        out, lse = attention(
            folded if self.width * fold > 1 else folded.repeat(1, 1, 2, 1),  # one alone is rounded in another way
            key.view(self.entries, self.length, heads, -1).transpose(1, 2),
            value.view(self.entries, self.length, heads, -1).transpose(1, 2),
            self._mask(rule.window, fold, query.dtype),
            rule,
        )
        out, lse = out[:, :, : self.width * fold], lse[:, :, : self.width * fold]
        out = out.reshape(self.entries, heads, self.width, fold, -1).transpose(1, 2)
        return out.reshape(self.entries * self.width, heads * fold, -1), lse

    def sums(self, lse: Tensor) -> Tensor:
        """Log-sum-exp as :meth:`attend` returned it, per query and head: (E · Q, heads)."""
        return torch.unflatten(lse, 2, (self.width, -1)).transpose(1, 2).reshape(self.entries * self.width, -1)

    def _mask(self, window: int | None, fold: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask (E, 1, Q · fold or 1, L); None where every query sees every key."""
        key = (window, fold if self.width > 1 else 1, dtype)
        if key not in self._masks:
            hidden = self._hidden if window is None else self._hidden | (self._distance >= window)
            self._masks[key] = additive(hidden.repeat_interleave(key[1], 1), dtype)[:, None] if hidden.any() else None
        return self._masks[key]


ANYONE, NO_ONE = -1, -2  # owners of a prompt's keys, and of padding


def _fill_queries(entry: Entry, tokens: Numbers, owner: Numbers, at: Numbers) -> None:
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


def _fill_keys(entry: Entry, slots: Numbers, owner: Numbers, at: Numbers) -> None:
    """Slots, rows and absolute positions of an entry's keys, the prompt's first."""
    start = len(entry.prompt)
    slots[:start], owner[:start], at[:start] = entry.prompt, ANYONE, np.arange(start)
    for row in entry.rows:
        stop = start + row.own_len
        slots[start:stop], owner[start:stop] = row.slots, row.row
        at[start:stop] = np.arange(row.prefix_len, row.total)
        start = stop
