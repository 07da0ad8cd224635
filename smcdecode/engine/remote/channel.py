"""Two processes and messages of known size between them, by torch.distributed. Knows bytes; not what they mean.

Every message is a fixed-size tensor of words, between marks, and sometimes a payload whose size the words tell.
The group belongs to the channel alone: the caller's own torch.distributed is left as it is. All of it listens on the
loopback address only.
"""

import datetime
import socket
from collections import deque
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

__all__ = ["Broken", "Channel", "Rendezvous"]

_MARK = 0x534D4344
_END = np.array([_MARK]).view(np.uint8)  # of a payload
_HOST = "127.0.0.1"
_WORDS, _PAYLOAD = 1, 2  # tags
_HEAD = 2  # words before a message: a mark, and how many messages and payloads its sender has taken
_LONG = datetime.timedelta(days=365)


class Broken(Exception):
    """The other side is gone, silent for too long, or sent something cut short."""


class Rendezvous:
    """Where two processes meet: a small store on a port of its own, open until both are connected."""

    def __init__(self, seconds: float) -> None:
        listener = socket.create_server((_HOST, 0))
        self.port: int = listener.getsockname()[1]
        self.store = TCPStore(
            _HOST, self.port, None, True, datetime.timedelta(seconds=seconds), False, False, listener.detach(), False
        )

    @staticmethod
    def join(port: int, seconds: float) -> TCPStore:
        """The store of the process that opened it."""
        return TCPStore(_HOST, port, None, False, datetime.timedelta(seconds=seconds))


class Channel:
    """One end of a pair: rank 0 asks, rank 1 answers.

    Args:
        store: where both ends meet.
        rank: 0 or 1.
        words: int64 words of every message, marks excluded; both ends may change it between two messages.
    """

    def __init__(self, store: TCPStore, rank: int, words: int, seconds: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=seconds)
        options._devices = [ProcessGroupGloo.create_device(hostname=_HOST)]
        self._group: Any = ProcessGroupGloo(store, rank, 2, options)
        self._other, self.words = 1 - rank, words
        self._sent: deque[list[Any]] = deque()  # kept until the other side has said that it has taken them
        self._gone = self._taken = 0  # how many of those it has taken, and how many this side has

    def send(self, words: Tensor | NDArray[np.int64], payload: Tensor | None = None) -> None:
        """Send a message without waiting for the other side to take it.

        Args:
            words: (n,) int64, n ≤ the channel's words.
            payload: (m,) uint8 that follows, or None.
        """
        message = np.zeros(_HEAD + self.words + 1, np.int64)
        message[0], message[1], message[-1] = _MARK, self._taken, _MARK
        message[_HEAD : _HEAD + len(words)] = words
        self._post(torch.from_numpy(message), _WORDS)
        if payload is not None:
            self._post(torch.from_numpy(np.concatenate([payload.numpy(), _END])), _PAYLOAD)

    def _post(self, message: Tensor, tag: int) -> None:
        held: list[Any] = [message]
        self._sent.append(held)
        try:
            held.append(self._group.send([message], self._other, tag))
        except RuntimeError as error:
            raise Broken(_first_line(error)) from error

    def receive(self, seconds: float | None = None) -> Tensor:
        """The next message's words, (words,) int64.

        Args:
            seconds: how long to wait; None for as long as it takes.

        Raises:
            Broken: the other side is gone or silent for too long, or the message was cut short.
        """
        message = np.zeros(_HEAD + self.words + 1, np.int64)
        self._take(message, _WORDS, seconds)
        if message[0] != _MARK or message[-1] != _MARK:
            raise Broken("a message was cut short")
        while self._gone < message[1]:
            self._sent.popleft()
            self._gone += 1
        return torch.from_numpy(message[_HEAD:-1])

    def payload(self, size: int, seconds: float | None = None) -> Tensor:
        """The payload of ``size`` bytes behind the last message: (size,) uint8. Raises as :meth:`receive` does."""
        message = np.empty(size + len(_END), np.uint8)
        message[size:] = 0
        self._take(message, _PAYLOAD, seconds)
        if (message[size:] != _END).any():
            raise Broken("a payload was cut short")
        return torch.from_numpy(message[:size])

    def _take(self, into: NDArray[Any], tag: int, seconds: float | None) -> None:
        wait = _LONG if seconds is None else datetime.timedelta(seconds=seconds)
        try:
            self._group.recv([torch.from_numpy(into)], self._other, tag).wait(wait)
        except RuntimeError as error:
            raise Broken(_first_line(error)) from error
        self._taken += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sent.clear()
        del self._group


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0].split("] ", 1)[-1]
