"""What the benchmarks share: prompts, endless models, interleaved rounds, pass times. Knows no contestant."""

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from smcdecode.engine.attention import Batch

PROMPTS = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many in all?",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
    "Explain to a child why the sky is blue and why the sunset is red.",
    "List five things to check before submitting a pull request, with one sentence for each.",
    "James decides to run 3 sprints 3 times a week. He runs 60 meters each sprint. How many meters a week?",
    "Write a SQL query that lists the ten customers with the largest total of orders.",
    "Summarise the story of the tortoise and the hare in three sentences.",
]

Run = Callable[[int], dict[str, Any]]
"""A contestant: round number → figures."""


def without_eos(model: Any) -> Any:
    """The same model with no token that ends a text, so that all contestants write equally long ones."""
    endless = copy.copy(model)
    endless.vocabulary = dataclasses.replace(model.vocabulary, eos=frozenset())
    return endless


def interleave(contestants: dict[str, Run], rounds: int) -> list[dict[str, Any]]:
    """Warm each contestant up, then time all of them in turn, round after round; medians."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            row = run(round_)
            row["seconds"] = time.perf_counter() - start
            if round_:
                results[name].append(row)
        print(f"round {round_} of {rounds} done", flush=True)
    return [summarise(name, rows) for name, rows in results.items()]


def summarise(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds; log Ẑ of every round is kept."""
    summary: dict[str, Any] = {"name": name, "log_z_all": [row["log_z"] for row in rows if "log_z" in row]}
    for key in rows[0]:
        summary[key] = statistics.median(row[key] for row in rows)
    summary["tokens_per_second"] = summary["tokens"] / summary["seconds"]
    return summary


class PassTimes:
    """Seconds of one pass of either model over n particles of q positions, measured behind a prompt."""

    def __init__(self, p: Any, q: Any, context: int) -> None:
        self.models = {"p": p, "q": q}
        self.context = context

    def __call__(self, which: str, particles: int, positions: int, repeats: int = 7) -> float:
        """Median seconds of a pass."""
        model = self.models[which]
        own = positions + 32
        store = model.store(1 + self.context + particles * own, 1)
        pages = torch.arange(1, 1 + self.context)
        rows = 1 + self.context + torch.arange(particles * own).view(particles, own)
        batch = Batch(
            torch.full((particles,), positions), rows, torch.full((particles,), own),
            torch.zeros(particles, dtype=torch.int64), (pages,), (self.context,),
        )  # fmt: skip
        tokens = torch.arange(particles * positions) % 1000
        where = (self.context + own - positions + torch.arange(positions)).repeat(particles)
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            model(tokens, where, model.plan(batch, store), torch.arange(len(tokens)))
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:])
