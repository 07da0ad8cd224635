"""A worker of benchmarks/constraints.py: this library, under the same protocol as its peers.

Reads one JSON object a line (task, method, particles, seed), answers with one. Methods: "masked" and "rejection" are
the two checks of ``Local``; "ahead" is the first with tokens guessed where masks leave few, under the same law. The
prompt is read inside the clock.
"""

import functools
import json
import sys
import time
from typing import Any, TextIO

import torch

import smcdecode as smc

METHODS = {
    "ahead": smc.Local(ahead=8),
    "masked": smc.Local(),
    "rejection": smc.Local(check="rejection", acceptances=2),
}
CONSTRAINTS = {"regex": smc.Regex, "schema": lambda text: smc.JsonSchema(json.loads(text), whitespace=None),
               "grammar": smc.Grammar}  # fmt: skip


class Worker:
    """One model, and targets by task."""

    def __init__(self, folder: str, dtype: str) -> None:
        self.p = smc.load(folder, dtype=getattr(torch, dtype))

    @functools.cache  # noqa: B019  one worker a process
    def target(self, kind: str, text: str) -> smc.Target:
        """The model under the constraint."""
        return self.p * CONSTRAINTS[kind](text)

    def run(self, ask: dict[str, Any]) -> dict[str, Any]:
        """One run of SMC."""
        task = ask["task"]
        target = self.target(task["kind"], task["text"])
        method = smc.SMC(METHODS[ask["method"]], ask["particles"])
        start, cpu = time.perf_counter(), time.process_time()
        out = smc.sample(
            target, task["prompt"], method=method, max_tokens=task["max_tokens"], seed=ask["seed"], progress=False
        )
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu,
            "tokens": sum(map(len, out.tokens)),
            "positions": out.stats.target_positions + out.stats.draft_positions,
            "log_z": out.log_z,
            "weights": out.weights.tolist(),
            "sequences": [repr(tokens) for tokens in out.tokens],
            "texts": out.texts,
        }


def serve(replies: TextIO) -> None:
    """Answer line by line until there are no more."""
    folder, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    worker = Worker(folder, dtype)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed must not mix with the answers
    serve(answers)
