"""Milliseconds and acceptance of every coupling at full vocabulary sizes, on one CPU thread.

Target laws are Zipf's at exponent 1.1; the draft's logits are the target's plus normal noise, which decides how much
the two overlap. Run: ``python benchmarks/exact_solver.py`` (about a minute; ``--repeats 20`` for steadier medians).
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from smcdecode.infer.coupling.global_resolution import GlobalResolution, GlobalResolutionPlan
from smcdecode.infer.coupling.greedy import Greedy
from smcdecode.infer.coupling.kseq import KSeq
from smcdecode.infer.coupling.optimum import optimal_acceptance
from smcdecode.infer.coupling.protocol import Coupling
from smcdecode.infer.coupling.recursive import RecursiveRejection, RecursiveRejectionWithoutReplacement

COUPLINGS: tuple[Coupling, ...] = (
    RecursiveRejection(), RecursiveRejectionWithoutReplacement(), KSeq(), Greedy(), GlobalResolution(),
)  # fmt: skip
SIZES = (49_152, 151_936)
LAWS = ((1.0, 1.0), (1.0, 0.6), (0.4, 1.0), (0.4, 0.6))  # (noise of the draft's logits, temperature)
POSITIONS = 64  # tuples of drafts over which acceptance is averaged where it has no closed form


def laws(V: int, noise: float, temperature: float, seed: int) -> tuple[Tensor, Tensor]:
    """A target and a draft law, (1, V) float64 each."""
    target = -1.1 * np.log(np.arange(1, V + 1))
    draft = target + noise * np.random.default_rng(seed).standard_normal(V)
    p, q = (torch.softmax(torch.tensor(logits / temperature), -1)[None] for logits in (target, draft))
    return p, q


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Median time of a call on its thread in milliseconds, after one to warm up; waiting for a core is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return 1e3 * float(np.median(times))


def measure(coupling: Coupling, p: Tensor, q: Tensor, n: int, repeats: int) -> str:
    """One table row: preparing a position, resolving it, how often a draft is emitted."""
    u = torch.rand(POSITIONS, n + 2, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    alive = torch.ones(1, n, dtype=torch.bool)
    plan = coupling.prepare(p, q, n)
    drafts = [coupling.drafting.draw(q, u[i : i + 1, :n]) for i in range(POSITIONS)]
    prepare = median_ms(lambda: coupling.prepare(p, q, n), repeats)
    resolve = median_ms(lambda: plan.resolve(drafts[0], alive, u[:1, n:]), repeats)
    if plan.expected is not None:
        accepted, how = float(plan.expected[0]), " "
    else:
        drafted = [torch.zeros_like(p).scatter(-1, x, 1.0) for x in drafts]
        chance = [plan.conditional_law(x, alive) * on for x, on in zip(drafts, drafted, strict=True)]
        accepted, how = float(torch.cat(chance).sum(-1).mean()), "~"
    gap = f"gap {float(plan.gap[0]):8.1e}" if isinstance(plan, GlobalResolutionPlan) else ""
    times = f"prepare {prepare:7.1f} ms  resolve {resolve:6.1f} ms"
    return f"  {coupling.name:30s} {times}  accepts {how}{accepted:.4f}  {gap}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chains", type=int, nargs="+", default=[4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for V in SIZES:
        for noise, temperature in LAWS:
            p, q = laws(V, noise, temperature, seed=1)
            for n in options.chains:
                best = float(optimal_acceptance(p, q, n))
                print(f"V = {V}, noise {noise}, temperature {temperature}, n = {n}: best of i.i.d. drafts {best:.4f}")
                for coupling in COUPLINGS:
                    print(measure(coupling, p, q, n, options.repeats))


if __name__ == "__main__":
    main()
