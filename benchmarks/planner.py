"""What plan() predicts against what is measured, and whether its recommendation is the one to take.

    python benchmarks/planner.py --target FOLDER --draft FOLDER [--tokens 24] [--prompts 4] [--json out.json]
    python benchmarks/planner.py --demo-layers 24        # the demo model, its first layers as the draft

Every (N, K, s) of a grid is run on the same prompts, one at a time, EOS disabled, each between two runs of the target
alone: a machine's speed drifts, so speed-ups over the target alone are compared. A setting competes at a level if the
plan says that it is near enough to the target; the recommendation is compared with the fastest that competes.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import PROMPTS, without_eos

import smcdecode as smc
from smcdecode.planner.plan import LEVELS

GRID = list(itertools.product((4, 8, 16), (2, 4, 8), (0.0, 0.2, 1.0)))


def main() -> None:
    """Plan, measure, compare."""
    options = read_options()
    torch.set_num_threads(options.threads)
    p, q = (without_eos(model) for model in models(options))
    target = p.at(temperature=options.temperature)
    prompts = PROMPTS[: options.prompts]
    start = time.perf_counter()
    plan = smc.plan(target, q, prompts, max_tokens=options.tokens, progress=False)
    print(f"planned in {time.perf_counter() - start:.0f} s\n{plan}\n", flush=True)
    warm(target, q, prompts[0])
    rows = [compare(plan, target, q, prompts, *setting, options.tokens) for setting in GRID]
    off = sorted(abs(row["ratio"] - 1) for row in rows)
    print(f"\npredicted within 15%: {sum(x <= 0.15 for x in off)} of {len(off)}; median {off[len(off) // 2]:.1%} off")
    levels = [judge(level, plan, target, prompts, rows, options.tokens) for level in LEVELS]
    adaptive = [run_auto(name, method, target, prompts, options.tokens) for name, method in autos(plan, q)]
    if options.json:
        held = {"options": vars(options), "rows": rows, "levels": levels, "adaptive": adaptive, "plan": str(plan)}
        Path(options.json).write_text(json.dumps(held, indent=1))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--demo-layers", type=int, help="in place of both: the demo model and its first layers")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.demo_layers is None and not (options.target and options.draft):
        parser.error("give --target and --draft, or --demo-layers")
    return options


def models(options: argparse.Namespace) -> tuple[Any, Any]:
    """Target and draft."""
    if options.demo_layers is None:
        p, q = (smc.load(folder, dtype=torch.bfloat16) for folder in (options.target, options.draft))
        return p, q
    p = smc.load("demo")
    return p, smc.LayerSkip(p, layers=options.demo_layers)


def warm(target: Any, q: Any, prompt: str) -> None:
    """Once, untimed: whatever is made on first use."""
    smc.sample(target, prompt, method=smc.SMC(smc.Draft(q, 8), 16), max_tokens=12, seed=0, progress=False)


def measure(target: Any, method: Any, prompts: list[str], tokens: int) -> dict[str, Any]:
    """One run a prompt, one after the other, and the target alone before and behind them."""
    run = lambda i, method: smc.sample(  # noqa: E731
        target, prompts[i], method=method, max_tokens=tokens, seed=i, progress=False
    )
    before = run(0, smc.Autoregressive())
    outs = [run(i, method) for i in range(len(prompts))]
    alone = [before.stats.tokens_per_second, run(0, smc.Autoregressive()).stats.tokens_per_second]
    speed = sum(out.stats.tokens for out in outs) / sum(out.stats.seconds["total"] for out in outs)
    return {
        "tokens_per_second": speed,
        "speedup": speed / statistics.mean(alone),
        "alone": alone,
        "log_z": [out.log_z for out in outs],
        "particles": statistics.mean(step.particles for out in outs for step in out.steps),
        "cycles": sum(out.stats.cycles for out in outs),
    }


def compare(
    plan: Any, target: Any, q: Any, prompts: list[str], N: int, K: int, s: float, tokens: int
) -> dict[str, Any]:
    """Predicted and measured speed of one setting."""
    found = measure(target, smc.SMC(smc.Draft(q, K, strictness=s), N), prompts, tokens)
    expected = plan.forecast(N, K, s)
    ratio = expected.speedup / found["speedup"]
    print(
        f"N={N:<3} K={K} s={s:<4g} speed-up measured {found['speedup']:5.2f}, predicted {expected.speedup:5.2f}, ratio "
        f"{ratio:.2f}; tok/s {found['tokens_per_second']:5.2f}, predicted {expected.tokens_per_second:5.2f}; log Ẑ "
        f"{statistics.mean(found['log_z']):7.2f}, ± {expected.error:.2f} predicted",
        flush=True,
    )
    return {
        "measured": found, "predicted": dataclasses.asdict(expected), "ratio": ratio, "distance": expected.distance
    }  # fmt: skip


def judge(
    level: str, plan: Any, target: Any, prompts: list[str], rows: list[dict[str, Any]], tokens: int
) -> dict[str, Any]:
    """The recommendation of a level against the fastest fixed setting that the level admits."""
    method = getattr(plan, level)
    own = measure(target, method, prompts, tokens)
    admitted = [row["measured"]["speedup"] for row in rows if row["distance"] <= LEVELS[level]]
    best = max(admitted, default=float("nan"))
    speed = own["speedup"]
    print(
        f"{level:9} {smc_name(method)}: speed-up {speed:.2f}, {plan.choices[level].speedup:.2f} predicted; best of "
        f"{len(admitted)} fixed settings {best:.2f}: {speed / best:.2f} of it; log Ẑ "
        f"{statistics.mean(own['log_z']):.2f}",
        flush=True,
    )
    return {"level": level, "method": smc_name(method), "own": own, "best": best}


def autos(plan: Any, q: Any) -> list[tuple[str, Any]]:
    """Adaptive settings, with fixed ones beside them."""
    return [
        ("K=4, N=8, s=0.2", smc.SMC(smc.Draft(q, 4), 8)),
        ("K=auto, N=8, s=0.2", smc.SMC(smc.Draft(q, "auto", cost=plan.cost), 8)),
        ("K=4, N=auto, s=0.2", smc.SMC(smc.Draft(q, 4), "auto")),
        ("K=auto, N=1, s=1", smc.SMC(smc.Draft(q, "auto", strictness=1.0, cost=plan.cost), 1)),
    ]


def run_auto(name: str, method: Any, target: Any, prompts: list[str], tokens: int) -> dict[str, Any]:
    """One line."""
    found = measure(target, method, prompts, tokens)
    print(
        f"{name:20} speed-up {found['speedup']:5.2f}, {found['particles']:.1f} particles, "
        f"log Ẑ {' '.join(f'{x:.2f}' for x in found['log_z'])}",
        flush=True,
    )
    return {"name": name} | found


def smc_name(method: Any) -> str:
    """A method in short."""
    draft = getattr(method, "proposal", method)
    parts = [f"N={getattr(method, 'particles', 1)}", f"K={getattr(draft, 'block', 0)}"]
    return f"{type(method).__name__}({', '.join(parts)}, s={getattr(draft, 'strictness', 1.0)})"


if __name__ == "__main__":
    main()
