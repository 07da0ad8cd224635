"""A language model whose passes take a time of their own, to measure what overlaps. Knows a table and a clock."""

import time
from typing import Any

import torch

from smcdecode.declare.target import Algebra, Target
from smcdecode.engine.cache import KVStore, Layout
from smcdecode.potentials.vocabulary import Vocabulary

_LATE = 2e-4  # seconds that a sleep may take too long


class Timed(Algebra):
    """A Markov chain with a language model's signature whose passes take a time of their own."""

    tokenizer, context = None, None

    def __init__(self, name: str, logits: Any, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.logits = torch.tensor(logits, dtype=torch.float32)  # (V, V)
        self.vocabulary = Vocabulary(len(logits), frozenset(), None, frozenset(), name)
        self.layout = Layout((), torch.float32, torch.device("cpu"))

    def as_target(self) -> Target:
        """Itself."""
        return Target(self)

    def store(self, pages: int, page_size: int) -> KVStore:
        """Room for nothing."""
        return KVStore(self.layout, pages, page_size)

    def plan(self, batch: Any, store: Any) -> None:
        """What a pass attends to: nothing."""

    def __call__(self, tokens: Any, positions: Any, view: Any, rows: Any) -> Any:  # noqa: ARG002  the engine's call
        """The law behind each position, when the time is up."""
        end = time.perf_counter() + self.seconds
        logits = self.logits[tokens[rows]]
        while (left := end - time.perf_counter()) > 0:
            time.sleep(
                max(0.0, left - _LATE)
            )  # the last moment is spent looking at the clock, as a device is waited for
        return logits
