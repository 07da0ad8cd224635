"""A limit on the time that one call may take. Knows clocks and signals; nothing of what is called.

Python code is interrupted, wherever it sleeps, waits or computes, by a signal that the main thread gets. Code of
another language that never returns to Python hears of no signal: after a grace period the whole process ends itself, by
a timer that needs no Python, with all threads' tracebacks on stderr.
"""

import contextlib
import faulthandler
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

__all__ = ["GRACE", "Overdue", "limit"]

GRACE = 10.0  # seconds from the signal to the end of the process
_AGAIN = 1.0  # seconds from one signal to the next, for code that catches everything
_STDERR = 2  # the descriptor, whatever Python calls stderr meanwhile


class Overdue(BaseException):
    """A call took too long. No ``Exception``, so that a caller's ``except Exception`` does not swallow it."""


@contextlib.contextmanager
def limit(seconds: float, *, deadly: bool = True) -> Iterator[None]:
    """Raise :class:`Overdue` in the block when it has run so long.

    On other threads than the main one only the process's end is there to help.

    Args:
        seconds: for the block.
        deadly: end the process ``GRACE`` seconds later, if the block still runs; costs a thread.
    """
    if deadly:
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=_STDERR)
    try:
        if threading.current_thread() is threading.main_thread():
            with _alarm(seconds):
                yield
        else:
            yield
    finally:
        if deadly:
            faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    armed = True

    def ring(_signal: int, _frame: FrameType | None) -> None:
        if armed:
            _overdue()

    start = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    others = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        try:
            yield
        finally:
            armed = False
    finally:
        left = max(1e-3, others[0] - (time.monotonic() - start)) if others[0] else 0.0
        signal.setitimer(signal.ITIMER_REAL, left, others[1])
        signal.signal(signal.SIGALRM, before)


def _overdue() -> NoReturn:
    raise Overdue
