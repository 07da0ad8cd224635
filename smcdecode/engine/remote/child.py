"""The draft's process: loads its model, joins the other, and serves run after run until the other side is gone.

Started as ``python -c`` with everything it needs on its standard input, which stays open: its end means that the parent
is gone, however it went, and the process ends at once. Nothing is written to disk and nothing is left behind.
"""

import io
import os
import pickle
import queue
import sys
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smcdecode.engine.load import load
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.remote.channel import Broken, Channel, Rendezvous
from smcdecode.engine.remote.messages import CONTROL_WORDS, Backup, Entries, Kind, Lanes, Setup
from smcdecode.engine.remote.speculator import Speculator
from smcdecode.errors import SMCDecodeError

__all__ = ["main", "serve"]

Message = tuple[Tensor, Tensor | None]


def main() -> None:
    """Read the order from standard input, load, report, serve."""
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    order = pickle.loads(sys.stdin.buffer.read(size))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if order["threads"] is not None:
        torch.set_num_threads(order["threads"])
    store = Rendezvous.join(order["port"], order["seconds"])
    try:
        model = _load(order)
        described = {part: getattr(model, part) for part in ("name", "vocabulary", "context", "layout")}
        report = {"model": described}
    except Exception as error:
        report = {"error": {"what": f"{type(error).__name__}: {error}"}}
    store.set("report", pickle.dumps(report))  # type: ignore[arg-type]  # bytes are fine
    if "error" not in report:
        with Channel(store, 1, CONTROL_WORDS, order["seconds"]) as channel:
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
    inbox: queue.Queue[Message | None] = queue.Queue()
    threading.Thread(target=_listen, args=(channel, inbox), daemon=True).start()
    run: _Run | None = None
    while (message := inbox.get()) is not None:
        words, payload = message
        if int(words[0]) == Kind.START:
            assert payload is not None
            run = _Run(channel, Speculator(model, Setup.unpacked(payload), lambda: _next_entries(inbox)))
        elif int(words[0]) == Kind.STOP:
            run = None
        elif run is not None:
            run.act(words, payload)


class _Run:
    """One run: its requests in order. What goes wrong is told in the next answer, where the caller hears it."""

    def __init__(self, channel: Channel, speculator: Speculator) -> None:
        self.channel, self.speculator = channel, speculator
        self.failure: SMCDecodeError | None = None

    @torch.inference_mode()
    def act(self, words: Tensor, payload: Tensor | None) -> None:
        """Do what a message asks for."""
        kind, serial, n = words[:3].tolist()
        answered = False
        try:
            if self.failure is None and kind == Kind.OPEN and payload is not None:
                self.speculator.open(Lanes.unpacked(payload, n))
            elif self.failure is None and kind == Kind.CLOSE:
                self.speculator.close(words[4 : 4 + n].numpy())
            elif self.failure is None and kind == Kind.ASK:
                asked = words.numpy()
                entries, share = Entries.of(asked[5:], n), float(asked[4:5].view(np.float64)[0])
                answer = self.speculator.answer(entries, Backup(asked[3]), share)
                self.channel.send(answer.words(serial), answer.packed())
                answered = True
                self.speculator.prepare(entries, share)
        except SMCDecodeError as error:
            self.failure = error
        if self.failure is not None and kind == Kind.ASK and not answered:
            told = torch.frombuffer(bytearray(pickle.dumps(self.failure)), dtype=torch.uint8)
            self.channel.send(torch.tensor([Kind.FAILURE, serial, len(told)]), told)


def _listen(channel: Channel, inbox: "queue.Queue[Message | None]") -> None:
    """Take messages as they come, so that the other side never waits for a pass to end; None when there are no more."""
    try:
        while True:
            words = channel.receive()
            payload = channel.payload(int(words[3])) if int(words[0]) in (Kind.START, Kind.OPEN) else None
            if int(words[0]) == Kind.START:
                channel.words = int(words[2])
            elif int(words[0]) == Kind.STOP:
                channel.words = CONTROL_WORDS
            inbox.put((words, payload))
    except Broken:
        inbox.put(None)


def _next_entries(inbox: "queue.Queue[Message | None]") -> Entries | None:
    """What the next request tells, if it has come."""
    with inbox.mutex:
        message = inbox.queue[0] if inbox.queue else None
    if message is None or int(message[0][0]) != Kind.ASK:
        return None
    words = message[0]
    return Entries.of(words[5:].numpy(), int(words[2]))
