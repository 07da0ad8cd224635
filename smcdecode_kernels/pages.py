"""A page table with reference counts and a free list, in tensors. The plain definition; knows page numbers, no keys.

Nothing here depends on a number that only the device knows, so nothing waits for it. Page 0 pads rows and is never
handed out. Ancestors must keep survivors in place, a[a_i] = a_i, as :func:`smcdecode_kernels.groups.settle` makes
them: then every page that a row gains is held by the row it comes from, which itself does not move, and all rows can
move at once, in place.
"""

import dataclasses

import torch
from torch import Tensor

__all__ = ["Pages", "clear", "give", "grow", "select", "take"]


@dataclasses.dataclass(frozen=True)
class Pages:
    """Rows of pages for S slots over a pool of P pages, numbered from 1.

    Attributes:
        rows: (S, M) int32, the pages of each slot in order, 0 behind them.
        used: (S,) int32, how many there are.
        counts: (P + 1,) int32, how often each page is held; 0 for page 0.
        free: (P + 1,) int32, of which the first ``left`` entries are the pages with count 0, in any order.
        left: (1,) int32.
    """

    rows: Tensor
    used: Tensor
    counts: Tensor
    free: Tensor
    left: Tensor

    @classmethod
    def create(cls, slots: int, width: int, pages: int, device: torch.device) -> "Pages":
        """All pages free, no slot with any."""
        free = torch.arange(pages, -1, -1, dtype=torch.int32, device=device)  # the lowest are handed out first
        rows = torch.zeros(slots, width, dtype=torch.int32, device=device)
        return cls(rows, rows.new_zeros(slots), rows.new_zeros(pages + 1), free, rows.new_full((1,), pages))

    def audit(self, *held: Tensor) -> None:
        """Check the counts against the rows and other lists of pages that are held, and the free list; host only.

        Raises:
            AssertionError: naming what is wrong.
        """
        every = torch.cat([self.rows.flatten(), *(h.flatten() for h in held)]).long()
        counts = torch.bincount(every, minlength=len(self.counts))
        counts[0] = 0
        wrong = (counts != self.counts).nonzero()[:, 0].tolist()
        assert not wrong, f"page {wrong[0]} is held {counts[wrong[0]]} times but counted {self.counts[wrong[0]]}"
        free = sorted(self.free[: int(self.left)].tolist())
        assert free == ((counts == 0).nonzero()[1:, 0]).tolist(), "the free list is not the pages with count 0"
        assert ((self.rows != 0).sum(-1) == self.used).all(), "a row's pages are not as many as it says"


def take(pages: Pages, n: int) -> Tensor:
    """Hand out n pages with count 1, which the caller knows to be free: (n,) int32."""
    at = pages.left.long() - 1 - torch.arange(n, device=pages.left.device)
    taken = pages.free[at]
    pages.counts[taken.long()] = 1
    pages.left.sub_(n)
    return taken


def give(pages: Pages, held: Tensor) -> None:
    """Lower the count of each of some different pages (n,) once, and free those that nobody holds."""
    lower = torch.zeros_like(pages.counts)
    lower[held.long()] = 1
    _release(pages, lower)


def _release(pages: Pages, lower: Tensor) -> None:
    """Lower the counts by ``lower`` (P + 1,), and put the pages whose count becomes 0 on the free list."""
    freed = (pages.counts > 0) & (pages.counts == lower)
    freed[0] = False
    pages.counts.sub_(lower)
    pages.counts[0] = 0
    place = pages.left + freed.cumsum(0) - 1
    last = len(pages.free) - 1  # never an entry of the list
    numbers = torch.arange(len(freed), dtype=torch.int32, device=freed.device)
    pages.free.scatter_(0, torch.where(freed, place, last).long(), numbers)
    pages.left.add_(freed.sum())


def _holdings(pages: Pages, table: Tensor) -> Tensor:
    """How often each page is listed: int32 of any shape → (P + 1,) int32."""
    flat = table.flatten().long()
    return torch.zeros_like(pages.counts).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))


def select(pages: Pages, ancestors: Tensor, keep: Tensor, state: tuple[Tensor, ...]) -> None:
    """Slot i becomes a copy of slot a_i: its row, counts, and everything else that is kept for slots; in place.

    Args:
        pages: the table.
        ancestors: (S,) int64, a[a_i] = a_i.
        keep: (S,) int32, pages of each slot worth sharing: those that hold tokens read by the target.
        state: up to three tensors (S, F), each of any type and width: lengths, flags, tokens, ids of potential states.
    """
    slots = torch.arange(len(ancestors), device=ancestors.device)
    moved = ancestors != slots
    kept = torch.minimum(keep, pages.used)[ancestors]
    width = torch.arange(pages.rows.shape[1], device=ancestors.device)
    gained = pages.rows[ancestors].masked_fill(width >= kept[:, None], 0)
    rows = torch.where(moved[:, None], gained, pages.rows)
    lower = _holdings(pages, pages.rows) - _holdings(pages, rows)
    pages.rows.copy_(rows)
    pages.used.copy_(torch.where(moved, kept, pages.used))
    _release(pages, lower)
    for columns in state:
        columns.copy_(columns[ancestors])


def clear(pages: Pages, slots: Tensor) -> None:
    """Give back the pages of the slots where (S,) bool is true."""
    lower = _holdings(pages, pages.rows.masked_fill(~slots[:, None], 0))
    pages.rows.masked_fill_(slots[:, None], 0)
    pages.used.masked_fill_(slots, 0)
    _release(pages, lower)


def grow(pages: Pages, cached: Tensor, length: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Pages for tokens ``cached`` to ``length`` of every slot, owned where they will be written.

    The caller knows that enough pages are free. A partly filled page that other slots hold is copied before it is
    written; of slots that all write to one page the last keeps it.

    Args:
        pages: the table.
        cached: (S,) int32, tokens whose keys and values stay.
        length: (S,) int32; slots with length ≤ cached are left alone.
        page_size: tokens a page.

    Returns:
        (source, copy): (S,) int32 each, the page whose contents must be copied and where to; 0 and 0 for none.
    """
    S, M = pages.rows.shape
    slots = torch.arange(S, dtype=torch.int32, device=cached.device)
    writes = length > cached
    column = (cached // page_size).clamp_max(M - 1).long()[:, None]
    page = pages.rows.gather(1, column)[:, 0].masked_fill(~writes | (cached % page_size == 0), 0)
    writers = _holdings(pages, page)
    last = torch.zeros_like(pages.counts).scatter_reduce_(0, page.long(), slots, "amax", include_self=False)
    at = page.long()
    copying = (page != 0) & (pages.counts[at] > 1) & ~((writers == pages.counts)[at] & (last[at] == slots))
    extra = (-(-length // page_size) - pages.used).clamp_min(0).masked_fill(~writes, 0)
    need = extra + copying
    first = pages.left - need.cumsum(0)  # of each slot's share of the free list
    width = torch.arange(M, device=cached.device)
    beyond = (width >= pages.used[:, None]) & (width < (pages.used + extra)[:, None])
    index = (first + copying)[:, None] + width - pages.used[:, None]
    source = page.masked_fill(~copying, 0)
    copy = pages.free[first.clamp_min(0).long()].masked_fill(~copying, 0)
    fresh = pages.free[index.clamp(0, len(pages.free) - 1)].masked_fill(~beyond, 0)
    pages.rows.copy_(torch.where(beyond, fresh, pages.rows))
    pages.rows.scatter_(1, column, torch.where(copying, copy, pages.rows.gather(1, column)[:, 0])[:, None])
    pages.used.add_(extra)
    pages.counts.add_(_holdings(pages, fresh) + _holdings(pages, copy) - _holdings(pages, source))
    pages.counts[0] = 0
    pages.left.sub_(need.sum())
    return source, copy
