"""A real server on a free port, over a model that writes printable characters and needs no weights."""

import contextlib
import socket
import threading
import time

import numpy as np
import uvicorn
from table import TableLM, random_table

from smcdecode.integrations.server.app import create_app
from smcdecode.potentials.vocabulary import Vocabulary

EOS, FIRST, V = 0, 31, 96  # ids 1 to 95 are the characters from the blank to the tilde


class Characters:
    """A tokenizer: a token a character; a chat is its messages' contents."""

    chat_template = "yes"

    def __call__(self, text):
        return {"input_ids": [min(max(ord(c) - FIRST, 1), V - 1) for c in text]}

    def apply_chat_template(self, messages, *, add_generation_prompt, return_dict):
        if messages[0]["role"] == "nobody":
            raise ValueError("nobody may speak")
        return self("".join(message["content"] for message in messages) + ":")


class Typewriter(TableLM):
    """The next character depends on the last one."""

    tokenizer = Characters()

    def __init__(self, seed, name, pace=0.0):
        super().__init__(random_table(seed, V, floor=0.3), eos=[EOS], name=name)
        shown = (b"<eos>", *(bytes([FIRST + v]) for v in range(1, V)))
        self.vocabulary = Vocabulary(V, frozenset([EOS]), shown, frozenset([EOS]), name)
        self.table[:, EOS] = 1e-3
        self.logits[:, EOS] = np.log(1e-3)
        self.context, self.pace = 512, pace

    def __call__(self, tokens, positions, view, rows):
        time.sleep(self.pace)  # so that requests overlap
        return super().__call__(tokens, positions, view, rows)


@contextlib.contextmanager
def served(p, method, **options):
    """Serve a model on a free port: its address and its runner."""
    app = create_app(p, method, memory=1 << 26, **options)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
            assert thread.is_alive()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.runner
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def quiet(runner, seconds=20.0):
    """Wait until nothing runs; afterwards no page is held."""
    deadline = time.monotonic() + seconds
    while (runner.live or runner.scheduler.stores.pool.used) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert runner.live == 0
    assert runner.scheduler.stores.pool.used == 0
