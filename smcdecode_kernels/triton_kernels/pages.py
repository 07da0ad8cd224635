"""The Triton twin of ``pages``: one program a slot, reference counts by atomic additions."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from smcdecode_kernels.pages import Pages
from smcdecode_kernels.triton_kernels.parts import empty

__all__ = ["clear", "grow", "select"]

_BLOCK = 128  # entries of a row a step


def select(pages: Pages, ancestors: Tensor, keep: Tensor, state: tuple[Tensor, ...]) -> None:
    """See :func:`smcdecode_kernels.pages.select`. Freed pages come onto the free list in any order."""
    if len(state) > 3 or not all(columns.is_contiguous() for columns in state):
        raise ValueError("state is up to three contiguous tensors (S, F)")
    columns = [*state, None, None, None][:3]
    if len(ancestors):
        _select[(len(ancestors),)](
            pages.rows, pages.used, pages.counts, pages.free, pages.left, ancestors, keep, *columns,
            pages.rows.shape[1], *(0 if c is None else c.shape[1] for c in columns), BLOCK=_BLOCK,
        )  # fmt: skip


@triton.jit
def _select(
    rows, used, counts, free, left, ancestors, keep, state_a, state_b, state_c, M, width_a, width_b, width_c,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One slot becomes a copy of its ancestor.

    ``rows`` (S, M), ``used``, ``keep`` (S,), ``counts``, ``free`` (P + 1,), ``left`` (1,) int32, ``ancestors`` (S,)
    int64, ``state_*`` (S, width) of any type or None. Rows (5), (6) and ancestors (0, 0) make rows (5), (5), count 5
    twice and free 6. No other program writes what this one reads: an ancestor is its own ancestor.
    """
    i = tl.program_id(0).to(tl.int64)
    a = tl.load(ancestors + i)
    if a != i:
        had = tl.load(used + i)
        has = tl.minimum(tl.load(keep + a), tl.load(used + a))
        for start in range(0, tl.maximum(had, has), BLOCK):
            at = start + tl.arange(0, BLOCK)
            gained = tl.load(rows + a * M + at, mask=at < has, other=0)
            lost = tl.load(rows + i * M + at, mask=at < had, other=0)
            tl.atomic_add(counts + gained, 1, mask=at < has, sem="relaxed")
            _let_go(counts, free, left, lost, at < had)
            tl.store(rows + i * M + at, gained, mask=at < M)
        tl.store(used + i, has)
        _copy_state(state_a, i, a, width_a, BLOCK)
        _copy_state(state_b, i, a, width_b, BLOCK)
        _copy_state(state_c, i, a, width_c, BLOCK)


@triton.jit
def _let_go(counts, free, left, page, held):
    """Lower the counts of a block of pages, and put those that nobody holds any more on the free list."""
    freed = held & (tl.atomic_add(counts + page, -1, mask=held, sem="acq_rel") == 1)
    rank = tl.cumsum(freed.to(tl.int32), 0)
    place = tl.atomic_add(left, tl.max(rank, 0), sem="relaxed") + rank - 1
    tl.store(free + place, page, mask=freed)


@triton.jit
def _copy_state(state, i, a, width, BLOCK: tl.constexpr):
    """One row of a state tensor becomes another."""
    if state is not None:
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(state + i * width + at, tl.load(state + a * width + at, mask=at < width), mask=at < width)


def clear(pages: Pages, slots: Tensor) -> None:
    """See :func:`smcdecode_kernels.pages.clear`. Freed pages come onto the free list in any order."""
    if len(slots):
        _clear[(len(slots),)](
            pages.rows, pages.used, pages.counts, pages.free, pages.left, slots, pages.rows.shape[1], BLOCK=_BLOCK
        )


@triton.jit
def _clear(rows, used, counts, free, left, slots, M, BLOCK: tl.constexpr):
    """One slot gives back its pages: as in :func:`_select`, with ``slots`` (S,) bool."""
    i = tl.program_id(0).to(tl.int64)
    if tl.load(slots + i):
        had = tl.load(used + i)
        for start in range(0, had, BLOCK):
            at = start + tl.arange(0, BLOCK)
            lost = tl.load(rows + i * M + at, mask=at < had, other=0)
            _let_go(counts, free, left, lost, at < had)
            tl.store(rows + i * M + at, tl.zeros_like(lost), mask=at < had)
        tl.store(used + i, 0)


def grow(pages: Pages, cached: Tensor, length: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """See :func:`smcdecode_kernels.pages.grow`. Of slots that all write to one page any one keeps it."""
    S, M = pages.rows.shape
    source, copy = (empty(cached, S, dtype=torch.int32) for _ in range(2))
    if S:
        _grow[(S,)](
            pages.rows, pages.used, pages.counts, pages.free, pages.left, cached, length, source, copy, M, page_size,
            BLOCK=_BLOCK,
        )  # fmt: skip
    return source, copy


@triton.jit
def _grow(rows, used, counts, free, left, cached, length, source, copy, M, page_size, BLOCK: tl.constexpr):
    """One slot gets the pages it will write to.

    As in :func:`_select`, with ``cached``, ``length`` (S,) int32; out: ``source``, ``copy`` (S,) int32. Cached 3,
    length 6 and pages of 2 tokens need the second page owned and a third taken.
    """
    i = tl.program_id(0).to(tl.int64)
    kept, end = tl.load(cached + i), tl.load(length + i)
    had = tl.load(used + i)
    writes = end > kept
    partial = writes & (kept % page_size != 0)
    column = kept // page_size
    page = tl.load(rows + i * M + column, mask=partial, other=0)
    holders = tl.atomic_add(counts + page, -1, mask=partial, sem="acq_rel")
    shared = partial & (holders > 1)  # whoever is last to let go of a page keeps it
    tl.atomic_add(counts + page, 1, mask=partial & (holders == 1), sem="relaxed")
    extra = tl.where(writes, tl.maximum((end + page_size - 1) // page_size - had, 0), 0)
    need = extra + shared.to(tl.int32)
    first = tl.atomic_add(left, -need, sem="relaxed") - need
    own = tl.load(free + first, mask=shared, other=0)
    tl.store(counts + own, 1, mask=shared)
    tl.store(rows + i * M + column, own, mask=shared)
    tl.store(source + i, tl.where(shared, page, 0))
    tl.store(copy + i, own)
    for start in range(0, extra, BLOCK):
        at = start + tl.arange(0, BLOCK)
        fresh = tl.load(free + first + shared.to(tl.int32) + at, mask=at < extra, other=0)
        tl.store(counts + fresh, 1, mask=at < extra)
        tl.store(rows + i * M + had + at, fresh, mask=at < extra)
    tl.store(used + i, had + extra)
