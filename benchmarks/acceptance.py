"""How often n drafts hold the target's token, by coupling: along the target's own texts, position by position.

    python benchmarks/acceptance.py --target FOLDER --draft FOLDER --data gsm8k_test.jsonl [--json out.json]

The target answers questions; at every few positions of its answers both laws are taken, n tokens are drafted, and each
coupling says with which probability one of them is the token that is emitted, so that its chain goes on. All couplings
see the same positions, so differences are paired; ± is one standard error over answers. ``best`` is the most that
independent drafts allow any coupling (a linear program's value, arXiv 2502.18779), ``ms`` the time to prepare one
position and to work out the token's law, on one thread.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import without_eos
from torch import Tensor

import smcdecode as smc
from smcdecode.engine.prompts import read_prompt
from smcdecode.infer.coupling.catalogue import COUPLINGS
from smcdecode.infer.coupling.optimum import optimal_acceptance
from smcdecode.planner.divergence import laws_along

BASE = "recursive"


def main() -> None:
    """Write the texts, take the laws, print a line for each (temperature, n, coupling)."""
    options = read_options()
    torch.set_num_threads(options.threads)
    p, q = (without_eos(smc.load(folder, dtype=torch.bfloat16)) for folder in (options.target, options.draft))
    rows: list[dict[str, Any]] = []
    for temperature in options.temperatures:
        laws = list(answers(p.at(temperature=temperature), q, options))
        for n in options.chains:
            rows += [{"temperature": temperature, "n": n, **row} for row in contest(laws, n, options.draws)]
            show(rows[-len(COUPLINGS) - 1 :])
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--data", required=True, help="lines of {question}")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--every", type=int, default=4, help="positions from one that is looked at to the next")
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--draws", type=int, default=4, help="of n drafts, where a coupling has no closed form")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    return parser.parse_args()


def answers(target: Any, q: Any, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Laws p and q, (positions, V) float64 each, along one answer to each question."""
    lines = Path(options.data).read_text(encoding="utf-8").splitlines()[: options.questions]
    prompts = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    texts = smc.sample(target, prompts, method=smc.Autoregressive(), max_tokens=options.tokens, seed=0, progress=False)
    draft = smc.Draft(q, 1)
    for prompt, text in zip(prompts, texts, strict=True):
        log_r, _, log_q = laws_along(target.as_target(), draft, read_prompt(prompt, target.model), text.tokens[0])
        yield tuple(law[:: options.every].double().softmax(-1) for law in (log_r, log_q))  # type: ignore[misc]


def contest(laws: list[tuple[Tensor, Tensor]], n: int, draws: int) -> Iterator[dict[str, Any]]:
    """Every coupling's acceptance over all positions, and the bound."""
    best = np.array([float(optimal_acceptance(p, q, n).mean()) for p, q in laws])
    kept = {name: [chosen(coupling, *law, n, draws) for law in laws] for name, coupling in COUPLINGS.items()}
    base = np.array([acceptance for acceptance, _ in kept[BASE]])
    for name, found in kept.items():
        own = np.array([acceptance for acceptance, _ in found])
        yield {
            "coupling": name, **about("acceptance", own), **about("gain", own - base),
            "ms": 1e3 * sum(seconds for _, seconds in found) / sum(len(p) for p, _ in laws),
        }  # fmt: skip
    yield {"coupling": "best", **about("acceptance", best), **about("gain", best - base), "ms": 0.0}


def about(name: str, values: Any) -> dict[str, float]:
    """Mean over answers, with its standard error."""
    return {name: float(values.mean()), f"{name}_error": float(values.std(ddof=1) / len(values) ** 0.5)}


def chosen(coupling: Any, p: Tensor, q: Tensor, n: int, draws: int) -> tuple[float, float]:
    """Mean probability over an answer's positions that a draft is the token, and seconds."""
    generator = torch.Generator().manual_seed(n)
    start, found = time.thread_time(), []
    for i in range(len(p)):
        here = p[i : i + 1], q[i : i + 1]
        plan = coupling.prepare(*here, n)
        if plan.expected is not None:
            found.append(float(plan.expected))
            continue
        for _ in range(draws):
            drafts = coupling.drafting.draw(here[1], torch.rand(1, n, dtype=torch.float64, generator=generator))
            law = plan.conditional_law(drafts, torch.ones_like(drafts, dtype=torch.bool))
            found.append(float(law[0, drafts.unique()].sum()))
    return float(np.mean(found)), time.thread_time() - start


def show(rows: list[dict[str, Any]]) -> None:
    """One line a coupling."""
    for row in rows:
        print(
            f"T={row['temperature']:g} n={row['n']} {row['coupling']:30} acceptance {row['acceptance']:.3f} "
            f"± {row['acceptance_error']:.3f}, over {BASE} {row['gain']:+.3f} ± {row['gain_error']:.3f}, "
            f"{row['ms']:5.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
