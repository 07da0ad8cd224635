"""Messages between ranks: from the first to all others, and from each to each. Knows bytes and waiting; no meaning."""

import datetime
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from smcdecode.errors import RankError

__all__ = ["Wire"]

T = TypeVar("T")

_FRAME = 1 << 14  # bytes of a message's first part, in which most find room
_LONG = datetime.timedelta(days=365)


class Wire:
    """A control group on the host, beside the default process group, of the same ranks.

    Attributes:
        rank: this process's.
        size: how many there are.
        patience: seconds that ranks wait for what the others owe them at once.
        broken: why nothing can be sent any more; None while all is well.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_LONG)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.patience = 600.0
        self.broken: str | None = None

    def send(self, message: object) -> None:
        """Give a message to all other ranks; rank 0's to call.

        Raises:
            RankError: as all methods here do, when a rank is gone or keeps the others waiting too long.
        """
        body = _tensor(pickle.dumps(message, protocol=5))
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        frame[:8] = torch.tensor([len(body)]).view(torch.uint8)
        frame[8 : 8 + len(body)] = body[: _FRAME - 8]
        self._broadcast(frame, self.patience)
        if len(body) > _FRAME - 8:
            self._broadcast(body[_FRAME - 8 :].clone(), self.patience)

    def receive(self) -> Any:
        """Rank 0's next message, however long it thinks; the other ranks' to call."""
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        self._broadcast(frame, None)
        size = int(frame[:8].view(torch.int64)[0])
        body = frame[8 : 8 + size]
        if size > len(body):
            rest = torch.zeros(size - len(body), dtype=torch.uint8)
            self._broadcast(rest, self.patience)
            body = torch.cat([body, rest])
        return pickle.loads(body.numpy().tobytes())

    def exchange(self, mine: T) -> list[T]:
        """What each rank holds out, by rank: a small thing."""
        frame = _tensor(pickle.dumps(mine).ljust(_FRAME, b"\0"))
        frames = [torch.zeros(_FRAME, dtype=torch.uint8) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(frames, frame, group=self._group, async_op=True), self.patience)
        return [pickle.loads(frame.numpy().tobytes()) for frame in frames]

    def lost(self, error: Exception) -> RankError:
        """The error that stands for the loss of a rank, which this one shows; nothing can be sent from now on."""
        reason = str(error).split("] ", 1)[-1].split(". ", 1)[0].splitlines()[0]
        late = "timed out" in reason.lower()
        what = f"a rank kept rank {self.rank} waiting for {self.patience:g} s" if late else "a rank is gone"
        self.broken = f"{what} ({reason}): see what it printed, and that every rank makes the same calls"
        return RankError(self.broken)

    def _broadcast(self, frame: Tensor, seconds: float | None) -> None:
        self._wait(lambda: dist.broadcast(frame, 0, group=self._group, async_op=True), seconds)

    def _wait(self, begin: Callable[[], Any], seconds: float | None) -> None:
        if self.broken is not None:
            raise RankError(f"a model on several ranks does not outlive one of them, start all again; {self.broken}")
        try:
            begin().wait(_LONG if seconds is None else datetime.timedelta(seconds=seconds))
        except RuntimeError as error:
            raise self.lost(error) from error


def _tensor(body: bytes) -> Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)
