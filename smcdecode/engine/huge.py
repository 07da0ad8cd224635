"""Huge pages under what every pass reads. Knows addresses and the kernel's advice; nothing of models.

A pass over few rows is a walk through all weights, and in pages of 4 KiB a good part of it is spent on looking pages
up: with pages of 2 MiB, passes of small models take two thirds of the time. Linux makes huge pages by itself only where
it is told to ("madvise", the usual setting), so weights are moved into them once they lie where they will stay. Where
the system has none, or another system runs, nothing changes but the speed.
"""

import collections
import ctypes
import sys
from collections.abc import Iterable

__all__ = ["HUGE", "gather"]

HUGE = 2 << 20  # bytes of a huge page
_MOSTLY = 0.75  # of a huge page that must be what is asked for, so that little else is moved
_HUGEPAGE, _COLLAPSE = 14, 25  # madvise(2): in time; at once, since Linux 6.1


def gather(ranges: Iterable[tuple[int, int]]) -> int:
    """Move memory that is in use into huge pages, contents untouched.

    Args:
        ranges: (address, bytes) each, of this process's own anonymous memory.

    Returns:
        Bytes that lie in huge pages now.
    """
    if not sys.platform.startswith("linux"):
        return 0
    covered: collections.Counter[int] = collections.Counter()
    for start, size in ranges:
        for page in range(start // HUGE, -(-(start + size) // HUGE)):
            covered[page] += min(start + size, (page + 1) * HUGE) - max(start, page * HUGE)
    pages = [page * HUGE for page, size in covered.items() if size >= _MOSTLY * HUGE]
    return HUGE * sum(_collapse(page) for page in pages)


def _collapse(page: int) -> bool:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if advise(page, HUGE, _COLLAPSE) == 0:
        return True
    advise(page, HUGE, _HUGEPAGE)
    return False
