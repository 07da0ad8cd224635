"""Does particles="auto" pay? Error of log Ẑ against particle-tokens, fixed N and auto, on prompts of unlike difficulty.

    python benchmarks/population.py [--runs 300]

Markov chains in place of models, so that log Z is known and nothing depends on the machine. A chain stays in one of two
halves of its letters: in the easy half the draft is nearly right, in the hard half far off. Prompts begin in both.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

import smcdecode as smc

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from table import TableLM

HALF, TOKENS = 6, 40


def chain(seed: int, apart: float, name: str) -> TableLM:
    """A chain of two halves; in the second half the table is mixed with another one by ``apart``."""
    rng = np.random.default_rng(0)
    law = np.zeros((2 * HALF, 2 * HALF))
    other = np.random.default_rng(seed)
    for u in range(2 * HALF):
        at = slice(0, HALF) if u < HALF else slice(HALF, None)
        row, mixed = rng.dirichlet(np.full(HALF, 0.5)), other.dirichlet(np.full(HALF, 0.5))
        share = 0.03 if u < HALF else apart
        law[u, at] = 0.98 * ((1 - share) * row + share * mixed) + 0.02 / HALF
    with np.errstate(divide="ignore"):
        return TableLM(law, name=name)


def main() -> None:
    """Print a line for each N."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300, help="of each half")
    runs = parser.parse_args().runs
    p, q = chain(1, 0.0, "p"), chain(2, 0.6, "q")
    print(
        f"{'N':>5} {'particle-tokens':>16} {'rms log Ẑ easy':>15} {'hard':>6} {'all':>6} {'squared error × tokens':>23}"
    )
    for N in (4, 8, 16, 32, "auto"):
        show(N, *(measure(p, q, N, start, runs) for start in (0, HALF)))


def measure(p: Any, q: Any, N: Any, start: int, runs: int) -> tuple[float, float]:
    """Particle-tokens of a run, and mean squared log Ẑ, whose truth is 0."""
    method = smc.SMC(smc.Draft(q, 2, strictness=0.0), N)
    outs = smc.sample(p, [[start]] * runs, method=method, max_tokens=TOKENS, seed=0, progress=False)
    tokens = statistics.mean(sum(step.particles for step in out.steps) * TOKENS / len(out.steps) for out in outs)
    return tokens, statistics.mean(out.log_z**2 for out in outs)


def show(N: Any, easy: tuple[float, float], hard: tuple[float, float]) -> None:
    """One line."""
    tokens, error = (easy[0] + hard[0]) / 2, (easy[1] + hard[1]) / 2
    print(
        f"{N:>5} {tokens:16.0f} {easy[1] ** 0.5:15.3f} {hard[1] ** 0.5:6.3f} {error**0.5:6.3f} {error * tokens:23.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
