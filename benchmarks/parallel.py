"""What splitting a model over ranks makes of its passes, and how much of them is telling the other ranks.

    torchrun --nproc-per-node 2 benchmarks/parallel.py --target FOLDER [--context 256] [--whole]

Passes of n particles over q positions behind a prompt, medians in milliseconds, by all ranks together; with ``--whole``
also by the whole model on rank 0 alone, where one device holds it, and the ratio. "telling" is the part of a split pass
that passes before rank 0 begins with its own: the message with tokens and pages.
"""

import argparse
import json
import time
from typing import Any

import torch
from common import PassTimes

import smcdecode as smc
from smcdecode.engine.ranks import first, together

SHAPES = [(1, 1), (8, 1), (1, 5), (8, 5), (16, 9)]


class Ear:
    """Counts the seconds in which a model's ranks are told things."""

    def __init__(self, ranks: Any) -> None:
        self.seconds, self.calls, self._tell = 0.0, 0, ranks.tell
        ranks.tell = self.tell

    def tell(self, *order: Any) -> None:
        """Tell, and note how long it took."""
        start = time.perf_counter()
        self._tell(*order)
        self.seconds, self.calls = self.seconds + time.perf_counter() - start, self.calls + 1


def main() -> None:
    """Time the passes, and print a table and JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    p = smc.load(options.target, parallel=True)
    whole = smc.load(options.target) if options.whole and first() else None
    if p.ranks is None:
        raise SystemExit("there is one process: torchrun --nproc-per-node 2 benchmarks/parallel.py …")

    def measure() -> list[dict[str, float]]:
        ear, times, rows = Ear(p.ranks), PassTimes(p, whole, options.context), []
        for particles, positions in SHAPES:
            ear.seconds, ear.calls = 0.0, 0
            row = {"particles": particles, "positions": positions, "split": 1e3 * times("p", particles, positions)}
            row["telling"] = 1e3 * ear.seconds / ear.calls
            if whole is not None:
                row["whole"] = 1e3 * times("q", particles, positions)
                row["ratio"] = row["whole"] / row["split"]
            rows.append(row)
        return rows

    torch.set_num_threads(1)
    rows = together(p, measure)
    if first():
        print(f"{p}, {options.context} tokens of prompt; milliseconds a pass")
        for row in rows:
            print("  ".join(f"{name} {value:.3g}" for name, value in row.items()))
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
