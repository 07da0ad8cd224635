"""Two processes and messages between them, over a pair of sockets that nobody else can reach. Knows bytes only.

A message is some int64 words and perhaps a payload of bytes, behind a head that tells how many of each there are. Who
sends takes in what arrives meanwhile, so that two long messages that cross do not wait for each other.
"""

import select
import socket
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Broken", "Channel", "Message"]

_MARK = 0x534D4344
_HEAD = 3  # words before a message: a mark, how many words follow, and how many bytes behind them, −1 for no payload
_CHUNK = 2**16

A = TypeVar("A")
R = TypeVar("R")


class Broken(Exception):
    """The other side is gone, silent for too long, or sent something cut short."""


class Message(NamedTuple):
    """What was sent."""

    words: NDArray[np.int64]  # (n,)
    payload: Tensor | None  # (m,) uint8


class Channel:
    """One end of a pair.

    Args:
        end: one of the two sockets of ``socket.socketpair()``; it is the channel's from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end, self._poll = end, select.poll()
        self._poll.register(end, select.POLLIN)
        self._held = bytearray()  # arrived while this side was sending
        self._next: Message | None = None  # looked at, and not received yet

    def send(self, words: NDArray[np.int64], payload: Tensor | None = None, seconds: float | None = None) -> None:
        """Send a message; waits only where the sockets hold no more.

        Args:
            words: (n,) int64.
            payload: (m,) uint8 that follows, or None.
            seconds: how long to wait for the other side to take some of it; None for as long as it takes.

        Raises:
            Broken: the other side is gone, or takes nothing for too long.
        """
        head = [_MARK, len(words), -1 if payload is None else len(payload)]
        self._write(np.concatenate([head, words]).view(np.uint8), seconds)
        if payload is not None:
            self._write(payload.numpy(), seconds)

    def receive(self, seconds: float | None = None) -> Message:
        """The next message.

        Args:
            seconds: how long to wait for more of it; None for as long as it takes.

        Raises:
            Broken: the other side is gone or silent for too long, or the message was cut short.
        """
        message, self._next = self._next or self._read(seconds), None
        return message

    def coming(self) -> Message | None:
        """What :meth:`receive` will return, if it has begun to arrive, else None. Raises as that does."""
        if self._next is None and (self._held or self._poll.poll(0)):
            self._next = self._read(None)
        return self._next

    def close(self) -> None:
        """Nothing is sent or received from now on."""
        self._end.close()

    def _write(self, data: NDArray[np.uint8], seconds: float | None) -> None:
        left = data.data
        while left:
            if (sent := _unless_it_waits(self._end.send, left)) is not None:
                left = left[sent:]
            elif self._wait(select.POLLIN | select.POLLOUT, seconds) & select.POLLIN:
                self._held += _unless_it_waits(self._end.recv, _CHUNK) or b""

    def _read(self, seconds: float | None) -> Message:
        mark, words, size = self._take(8 * _HEAD, seconds).view(np.int64).tolist()
        if mark != _MARK:
            self.close()
            raise Broken("a message was cut short")
        told = self._take(8 * words, seconds).view(np.int64)
        return Message(told, None if size < 0 else torch.from_numpy(self._take(size, seconds)))

    def _take(self, size: int, seconds: float | None) -> NDArray[np.uint8]:
        """The next bytes, (size,)."""
        taken = np.empty(size, np.uint8)
        here = min(size, len(self._held))
        taken[:here] = self._held[:here]
        del self._held[:here]
        left = taken.data[here:]
        while left:
            got = _unless_it_waits(self._end.recv_into, left)
            if got is None:
                self._wait(select.POLLIN, seconds)
            elif not got:
                raise Broken("a message was cut short" if len(left) < size else "the other end is closed")
            else:
                left = left[got:]
        return taken

    def _wait(self, events: int, seconds: float | None) -> int:
        """Which of some events came first; nothing is trusted behind a silence."""
        self._poll.modify(self._end, events)
        found = self._poll.poll(None if seconds is None else 1e3 * seconds)
        self._poll.modify(self._end, select.POLLIN)
        if not found:
            self.close()
            raise Broken(f"Timed out after {seconds:g} s")
        return found[0][1]


def _unless_it_waits(act: Callable[[A], R], what: A) -> R | None:
    """What a socket's method returns; None where it would have to wait."""
    try:
        return act(what)
    except BlockingIOError:
        return None
    except OSError as error:
        raise Broken(str(error)) from error
