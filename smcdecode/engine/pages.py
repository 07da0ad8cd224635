"""Pages by number: which are free, who shares them, which rows hold them. Knows counts and tables, no keys.

All of it lies on the host and moves a few numbers at a time, which numpy does in a fraction of torch's time.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcdecode.errors import OutOfPages

__all__ = ["NULL", "BlockTable", "PagePool"]

NULL = 0  # the page that pads table rows; never handed out

Numbers = Tensor | NDArray[np.int64]


class PagePool:
    """Reference counts of ``pages`` pages, numbered from 1. A page with count 0 is free.

    Attributes:
        counts: (pages + 1,) int64, how many hold each page.
        kept: (pages + 1,) bool, pages whose content is worth keeping while they are free: handed out last.
        reclaim: asked to :meth:`forget` so many free pages where only kept ones are left.
    """

    def __init__(self, pages: int) -> None:
        self.counts = torch.zeros(pages + 1, dtype=torch.int64)
        self.kept = torch.zeros(pages + 1, dtype=torch.bool)
        self.reclaim: Callable[[int], None] | None = None
        self.peak = 0
        self.used = 0
        self._free = torch.arange(1, pages + 1)  # a queue; refilled from the counts when it runs out

    @property
    def size(self) -> int:
        """Pages in all."""
        return len(self.counts) - 1

    @property
    def free(self) -> int:
        """Pages with count 0."""
        return self.size - self.used

    def take(self, n: int) -> Tensor:
        """Hand out n free pages with count 1: (n,) int64, in ascending runs, which are read without gathering.

        Raises:
            OutOfPages: when fewer than n are free; nothing is taken then.
        """
        if n > self.free:
            raise OutOfPages(f"{n} pages wanted, {self.free} of {self.size} free: raise memory=, or lower particles=")
        if n > len(self._free):
            self._free = self._blank()
        if n > len(self._free) and self.reclaim is not None:
            self.reclaim(n - len(self._free))
            self._free = self._blank()
        taken, self._free = self._free[:n], self._free[n:]
        self.counts[taken] = 1
        self.used += n
        self.peak = max(self.peak, self.used)
        return taken

    def hold(self, pages: Tensor) -> None:
        """Raise the count of distinct pages (n,), free ones too."""
        self.used += int((self.counts[pages] == 0).sum())
        self.peak = max(self.peak, self.used)
        self.counts[pages] += 1

    def keep(self, pages: Tensor) -> None:
        """Remember that the content of pages (n,), which are held, is worth keeping."""
        self.kept[pages] = True

    def forget(self, pages: Tensor) -> None:
        """Pages (n,) are as good as any others."""
        self.kept[pages] = False

    def share(self, pages: Numbers) -> None:
        """Raise the count of each page once for every time it is listed; NULL is skipped."""
        pages = np.asarray(pages)
        np.add.at(self.counts.numpy(), pages[pages != NULL], 1)

    def release(self, pages: Numbers) -> None:
        """Lower the count of each page once for every time it is listed; NULL is skipped."""
        pages, counts = np.asarray(pages), self.counts.numpy()
        pages = pages[pages != NULL]
        np.subtract.at(counts, pages, 1)
        freed = np.sort(pages[counts[pages] == 0])
        self.used -= len(freed) - int(np.count_nonzero(freed[1:] == freed[:-1]))  # a page may be listed twice

    def audit(self, holders: Iterable[Tensor]) -> None:
        """Check the counts against everything that holds pages.

        Args:
            holders: page lists or tables, any shape; NULL entries do not count.

        Raises:
            AssertionError: naming the first page whose count is not the number of its holders, or a stale free list.
        """
        held = torch.zeros_like(self.counts)
        for pages in holders:
            flat = pages.flatten()
            held.index_add_(0, flat, torch.ones_like(flat))
        held[NULL] = 0
        wrong = (held != self.counts).nonzero()[:, 0]
        if len(wrong):
            page = int(wrong[0])
            raise AssertionError(f"page {page} is held {int(held[page])} times but counted {int(self.counts[page])}")
        if self.used != int((held > 0).sum()):
            raise AssertionError(f"{int((held > 0).sum())} pages are held but {self.used} are counted as used")
        if bool(self.kept[self._free].any()):
            raise AssertionError("a page that is kept lies on the free list")
        if bool(self.counts[self._free].any()) or len(set(self._free.tolist())) != len(self._free):
            raise AssertionError("a page in use, or the same page twice, lies on the free list")

    def _blank(self) -> Tensor:
        """Free pages that are not kept, ascending."""
        return ((self.counts[1:] == 0) & ~self.kept[1:]).nonzero()[:, 0] + 1


class BlockTable:
    """One row of page numbers a slot: the pages of its own tokens, in order, padded with NULL."""

    def __init__(self, pool: PagePool, slots: int, width: int) -> None:
        self.pool = pool
        self.rows = torch.full((slots, width), NULL, dtype=torch.int64)
        self.used = torch.zeros(slots, dtype=torch.int64)

    def grow(self, slots: Numbers, pages: Numbers) -> None:
        """Take pages until each of ``slots`` (n,) holds at least ``pages`` (n,) of them."""
        slots, used = np.asarray(slots), self.used.numpy()
        held = used[slots]
        extra = np.maximum(np.asarray(pages) - held, 0)
        total = int(extra.sum())
        if not total:
            return
        taken = self.pool.take(total).numpy()
        held += extra
        columns = np.arange(total) + np.repeat(held - extra.cumsum(), extra)
        self.rows.numpy()[np.repeat(slots, extra), columns] = taken
        used[slots] = held

    def select(self, ancestors: Tensor, keep: Tensor) -> None:
        """Row i becomes a copy of the first ``keep[i]`` pages of row ``ancestors[i]``; rows with a_i = i stay whole.

        Args:
            ancestors: (slots,) int64.
            keep: (slots,) int64, pages worth sharing (those that hold cached tokens of the ancestor).
        """
        whose = ancestors.numpy()
        moved = np.flatnonzero(whose != np.arange(len(whose)))
        if len(moved):
            self.copy(moved, whose[moved], keep.numpy()[moved])

    def copy(self, slots: Numbers, ancestors: Numbers, keep: Numbers) -> None:
        """Rows ``slots`` become the first ``keep`` pages of rows ``ancestors``, as these are now: (n,) each."""
        slots, ancestors, keep = (np.asarray(x) for x in (slots, ancestors, keep))
        rows, used = self.rows.numpy(), self.used.numpy()
        most = int(max(used[slots].max(initial=0), used[ancestors].max(initial=0)))
        held = rows[:, :most]
        gained = np.where(np.arange(most) < keep[:, None], held[ancestors], NULL)
        kept = np.minimum(keep, used[ancestors])
        self.pool.share(gained)
        self.pool.release(held[slots])
        held[slots], used[slots] = gained, kept

    def clear(self, slots: Numbers) -> None:
        """Give back all pages of ``slots`` (n,)."""
        slots, used = np.asarray(slots), self.used.numpy()
        held = self.rows.numpy()[:, : int(used[slots].max(initial=0))]
        self.pool.release(held[slots])
        held[slots] = NULL
        used[slots] = 0

    def own(self, slots: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Make the page in ``column[i]`` of each slot its own before it is written: copy on write.

        Returns:
            (source, copy): page numbers, equal lengths, to be copied in every store. Of the slots that share a page
            one may keep it, when all its holders are about to write.
        """
        pages = self.rows[slots, column]
        order = pages.argsort(stable=True)
        distinct, place, writers = torch.unique_consecutive(pages[order], return_inverse=True, return_counts=True)
        first = torch.ones_like(place, dtype=torch.bool)
        first[1:] = place[1:] != place[:-1]
        keeps = first & (writers == self.pool.counts[distinct])[place]
        shared = (self.pool.counts[distinct] > 1)[place] & (pages[order] != NULL)
        copying = order[shared & ~keeps]
        source = pages[copying]
        if not len(source):
            return source, source
        copies = self.pool.take(len(source))
        self.pool.release(source)
        self.rows[slots[copying], column[copying]] = copies
        return source, copies
