"""The draft's process: loads its model, joins the other, and serves run after run until the other side is gone.

Started as ``python -c`` with everything it needs on its standard input, which stays open: its end means that the parent
is gone, however it went, and the process ends at once. Nothing is written to disk and nothing is left behind.
"""

import contextlib
import io
import os
import pickle
import socket
import sys
import threading
from typing import Any

import numpy as np
import torch

from smcdecode.engine.load import load
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.remote.channel import Broken, Channel, Message
from smcdecode.engine.remote.messages import Backup, Entries, Kind, Lanes, packed, unpacked
from smcdecode.engine.remote.speculator import Speculator
from smcdecode.errors import SMCDecodeError

__all__ = ["main", "serve"]


def main() -> None:
    """Read the order from standard input, load, report, serve."""
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    order = pickle.loads(sys.stdin.buffer.read(size))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if order["threads"] is not None:
        torch.set_num_threads(order["threads"])
    channel = Channel(socket.socket(fileno=order["end"]))
    try:
        model = _load(order)
        described = {part: getattr(model, part) for part in ("name", "vocabulary", "context", "layout")}
        report = {"model": described}
    except Exception as error:
        report = {"error": {"what": f"{type(error).__name__}: {error}"}}
    channel.send(np.array([Kind.REPORT]), packed(report))
    if "error" not in report:
        serve(channel, model)


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # past Python's buffer, whose lock would outlive a main thread that fails
        pass
    os._exit(0)


def _load(order: dict[str, Any]) -> LanguageModel:
    source = torch.load(io.BytesIO(order["source"]), weights_only=False)
    if callable(getattr(source, "plan", None)):
        ready: LanguageModel = source
        return ready
    return load(source, **order["options"])


def serve(channel: Channel, model: LanguageModel) -> None:
    """Answer until the other side is gone."""
    run: _Run | None = None
    with contextlib.suppress(Broken):
        while True:
            message = channel.receive()
            kind = int(message.words[0])
            if kind == Kind.START:
                setup = unpacked(message.payload)
                run = _Run(channel, Speculator(model, setup, lambda: _next_entries(channel)))
            elif kind == Kind.STOP:
                run = None
            elif run is not None:
                run.act(message)


class _Run:
    """One run: its requests in order. What goes wrong is told in the next answer, where the caller hears it."""

    def __init__(self, channel: Channel, speculator: Speculator) -> None:
        self.channel, self.speculator = channel, speculator
        self.failure: SMCDecodeError | None = None

    @torch.inference_mode()
    def act(self, message: Message) -> None:
        """Do what a message asks for."""
        words, payload = message
        kind, serial, n = words[:3].tolist()
        answered = False
        try:
            if self.failure is None and kind == Kind.OPEN and payload is not None:
                self.speculator.open(Lanes.unpacked(payload, n))
            elif self.failure is None and kind == Kind.CLOSE:
                self.speculator.close(words[3:])
            elif self.failure is None and kind == Kind.ASK:
                entries, share = Entries.of(words[5:]), float(words[4:5].view(np.float64)[0])
                answer = self.speculator.answer(entries, Backup(words[3]), share)
                self.channel.send(answer.words(serial), answer.packed())
                answered = True
                self.speculator.prepare(entries, share)
        except SMCDecodeError as error:
            self.failure = error
        if self.failure is not None and kind == Kind.ASK and not answered:
            self.channel.send(np.array([Kind.FAILURE, serial]), packed(self.failure))


def _next_entries(channel: Channel) -> Entries | None:
    """What the next request tells, if it has come."""
    message = channel.coming()
    return Entries.of(message.words[5:]) if message is not None and message.words[0] == Kind.ASK else None
