"""A model in a process of its own, seen from here: what it is, how it is reached, and how it ends. Knows no decoding.

The process is started from a source, not forked: a name or folder is loaded there, so this side never holds its
weights; an object is sent once through a pipe. It ends with :meth:`RemoteModel.close`, with the object, with this
process, or by itself when this process is gone.
"""

import dataclasses
import io
import pickle
import socket
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcdecode.engine.cache import KVStore, Layout
from smcdecode.engine.load import Source
from smcdecode.engine.ranks import joined
from smcdecode.engine.remote.channel import Broken, Channel, Message
from smcdecode.engine.remote.messages import Kind, Setup, packed, unpacked
from smcdecode.errors import DraftProcessError, InvalidOption
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["RemoteModel", "remote"]

_COMMAND = "import sys; sys.path[:] = {path!r}; from smcdecode.engine.remote.child import main; main()"


@dataclasses.dataclass
class _Line:
    """The process and the channel to it; ended once, by whoever comes first."""

    process: subprocess.Popen[bytes]
    channel: Channel

    def end(self) -> None:
        self.process.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()
        self.channel.close()


class RemoteModel:
    """A draft in a process of its own; made by :func:`smcdecode.remote`. Closed by ``with`` or :meth:`close`.

    Attributes:
        name, vocabulary, context, layout: as of the model there.
        patience: seconds without an answer after which the process is given up.
    """

    elsewhere = True  # it has no passes here

    def __init__(self, line: _Line | None, described: dict[str, Any], patience: float) -> None:
        self._line, self.patience = line, patience
        self._end = weakref.finalize(self, bool if line is None else line.end)
        self.name: str = described["name"]
        self.vocabulary: Vocabulary = described["vocabulary"]
        self.context: int | None = described["context"]
        self.layout: Layout = described["layout"]

    def __repr__(self) -> str:
        state = f"process {self.pid}" if self.alive else "closed" if self._line else "a process of rank 0"
        return f"RemoteModel({self.name!r}, {state})"

    @property
    def pid(self) -> int:
        """The process; −1 where another rank has it."""
        return -1 if self._line is None else self._line.process.pid

    @property
    def alive(self) -> bool:
        """Whether the process can be asked, from here."""
        return self._line is not None and self._end.alive and self._line.process.poll() is None

    def close(self) -> None:
        """End the process; nothing of it is left."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def store(self, pages: int, page_size: int) -> KVStore:
        """Nothing: its keys and values lie in its own process."""
        return KVStore(Layout((), self.layout.dtype, torch.device("cpu")), pages, page_size)

    # ---- messages

    def start(self, setup: Setup) -> None:
        """Begin a run.

        Raises:
            DraftProcessError: the process is gone.
        """
        if not self.alive:
            raise DraftProcessError(f"the process of {self.name} has ended: make another with smc.remote(…)")
        self.send(np.array([Kind.START]), packed(setup))

    def stop(self) -> None:
        """End a run, if the process is still there."""
        if self.alive:
            try:
                self.send(np.array([Kind.STOP]))
            except Broken:
                self.close()

    def send(self, words: NDArray[np.int64], payload: Tensor | None = None) -> None:
        """Send a message. Raises :class:`~smcdecode.engine.remote.channel.Broken`."""
        self._channel.send(words, payload, self.patience)

    def receive(self) -> Message:
        """The next answer. Raises :class:`~smcdecode.engine.remote.channel.Broken`."""
        return self._channel.receive(self.patience)

    @property
    def _channel(self) -> Channel:
        if self._line is None:
            raise Broken("the process is that of rank 0")
        return self._line.channel


def remote(
    source: Source | Any,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    name: str | None = None,
    batch_invariant: bool = True,
    threads: int | None = None,
    patience: float = 60.0,
    parallel: bool = False,
) -> RemoteModel:
    """Start a process that holds a draft model, for :class:`Saguaro` and ``SMC(…, overlap=True)``.

    It serves any number of calls of :func:`sample`, one at a time.

    Args:
        source: as of :func:`smcdecode.load`, in the new process: a name or a folder is loaded there. A loaded model, or
            any object that can stand as a draft, is sent there; its class must be importable by name.
        dtype: as of :func:`smcdecode.load`.
        device: as there.
        name: as there.
        batch_invariant: as there.
        threads: of the process; None leaves torch's choice.
        patience: seconds without an answer after which the process is given up: it is ended, and decoding goes on
            without it. More than its longest prompt takes.
        parallel: start one process for all that torchrun started, beside their rank 0; for a target that is split over
            them by ``load(…, parallel=True)``.

    Raises:
        InvalidOption: ``patience`` or ``threads`` means nothing, the source cannot be sent, or there are no ranks.
        DraftProcessError: the model could not be loaded there; says why.
    """
    options = {"dtype": dtype, "device": device, "name": name, "batch_invariant": batch_invariant}
    if not parallel:
        line, report = _start(source, options, threads, patience)
        return RemoteModel(line, report, patience)
    held: list[_Line] = []

    def start() -> dict[str, Any]:
        line, report = _start(source, options, threads, patience)
        held.append(line)
        return report

    report = joined().together(
        start, {"draft": str(source) if isinstance(source, (str, Path)) else type(source), **options}
    )
    return RemoteModel(held[0] if held else None, report, patience)


def _start(
    source: Source | Any, options: dict[str, Any], threads: int | None, patience: float
) -> tuple[_Line, dict[str, Any]]:
    """A process, and what it says of its model."""
    if not patience > 0:
        raise InvalidOption(f"patience must be a number of seconds > 0; got {patience!r}")
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise InvalidOption(f"threads must be an integer ≥ 1, or None; got {threads!r}")
    sent = _sent(source)
    here, there = socket.socketpair()
    with there:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND.format(path=sys.path)],
            stdin=subprocess.PIPE, pass_fds=[there.fileno()], start_new_session=True,
        )  # fmt: skip
        order = {"end": there.fileno(), "threads": threads, "source": sent, "options": options}
    line = _Line(process, Channel(here))
    try:
        return line, _report(line, pickle.dumps(order))
    except BaseException:
        line.end()
        raise


def _sent(source: Any) -> bytes:
    """A source as bytes."""
    buffer = io.BytesIO()
    try:
        torch.save(str(source) if isinstance(source, Path) else source, buffer)
    except Exception as error:
        raise InvalidOption(
            f"{type(source).__name__} cannot be sent to another process ({error}): give the name or the folder that "
            "it was loaded from, or the transformers model itself"
        ) from error
    return buffer.getvalue()


def _report(line: _Line, order: bytes) -> dict[str, Any]:
    """Give the process its order and wait until its model is loaded, however long that takes."""
    stdin = line.process.stdin
    assert stdin is not None
    try:
        stdin.write(len(order).to_bytes(8, "little") + order)
        stdin.flush()
        report = unpacked(line.channel.receive().payload)
    except (BrokenPipeError, Broken) as error:
        raise DraftProcessError("the draft process ended before it was ready; see its message above") from error
    if "error" in report:
        raise DraftProcessError(f"the draft process could not load its model: {report['error']['what']}")
    described: dict[str, Any] = report["model"]
    return described
