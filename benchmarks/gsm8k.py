"""What strictness buys on real questions: accuracy, log Ẑ, ESS and speed for several (s, N), paired with the target's.

    python benchmarks/gsm8k.py --target FOLDER --draft FOLDER --data gsm8k_test.jsonl [--questions 100]

Every decoder answers the same questions with one drawn text each; the target's own answers are those of ordinary
sampling. For a plain target the truth is log Z = 0, and log Ẑ below it says how far reweighting is from the target.
Decoders whose figures are in the ``--json`` file already are not run again.
"""

import argparse
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import smcdecode as smc

ASK = (
    "Solve the problem in a few short sentences, step by step. Then give the answer alone on the last line as "
    "'#### number'.\n\n"
)
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def main() -> None:
    """Answer all questions with every decoder and print a line for each."""
    options = read_options()
    torch.set_num_threads(options.threads)
    folders = (options.target, options.draft)
    p, q = (smc.load(folder, dtype=torch.bfloat16, batch_invariant=False) for folder in folders)
    lines = Path(options.data).read_text(encoding="utf-8").splitlines()[: options.questions]
    questions = [json.loads(line) for line in lines]
    target = p.at(temperature=options.temperature)
    rows = known(options)
    for name, method in decoders(q, options).items():
        if name not in rows:
            rows[name] = answer(target, method, questions, options)
        show(name, rows[name], rows["autoregressive"])
        if options.json:
            Path(options.json).write_text(json.dumps({"asked": asked(options), "rows": rows}, indent=1))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--data", required=True, help="lines of {question, answer}; the answer ends in '#### number'")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--particles", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--strictness", type=float, nargs="+", default=[0.0, 0.05, 0.2, 0.5, 1.0])
    parser.add_argument("--memory", type=float, default=0.5, help="fraction of what is available, or bytes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json")
    return parser.parse_args()


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """What all rows of a file have in common."""
    return {name: vars(options)[name] for name in ("target", "draft", "questions", "tokens", "temperature", "block")}


def known(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The rows of an earlier run that asked the same."""
    file = Path(options.json) if options.json else None
    if file is None or not file.exists():
        return {}
    held = json.loads(file.read_text())
    if held["asked"] != asked(options):
        raise SystemExit(f"{file} holds answers to other questions, {held['asked']}: name another file")
    rows: dict[str, dict[str, Any]] = held["rows"]
    return rows


def decoders(q: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The target's own sampling first, then every (N, s)."""
    found: dict[str, Any] = {"autoregressive": smc.Autoregressive()}
    for N in options.particles:
        for s in options.strictness:
            found[f"N={N} s={s:g}"] = smc.SMC(smc.Draft(q, block=options.block, strictness=s), particles=N)
    return found


def answer(target: Any, method: Any, questions: list[dict[str, str]], options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one decoder over all questions."""
    prompts = [[{"role": "user", "content": ASK + entry["question"]}] for entry in questions]
    started = time.process_time()
    runs = smc.sample(target, prompts, method=method, max_tokens=options.tokens, seed=0, memory=options.memory)
    seconds = time.process_time() - started
    stats = runs[0].stats
    right = [number(run.text) == number(entry["answer"]) for run, entry in zip(runs, questions, strict=True)]
    return {
        "right": right,
        "tokens_per_second": stats.tokens_per_second,
        "tokens_per_cpu_second": stats.tokens / seconds,
        "log_z": [run.log_z for run in runs],
        "ess": statistics.mean(step.ess for run in runs for step in run.steps),
        "acceptance": stats.acceptance,
    }


def number(text: str) -> float | None:
    """The last number of a text."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def show(name: str, row: dict[str, Any], own: dict[str, Any]) -> None:
    """Print one decoder's line; gained and lost are against the target's own answers, question by question."""
    pairs = list(zip(row["right"], own["right"], strict=True))
    gained, lost = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    spread = statistics.quantiles(row["log_z"], n=4) if len(row["log_z"]) > 1 else row["log_z"] * 3
    print(
        f"{name:16} accuracy {statistics.mean(row['right']):6.1%} (+{gained} −{lost})  "
        f"{row['tokens_per_second']:6.2f} tok/s ({row['tokens_per_cpu_second']:.2f} a CPU second)  "
        f"ESS {row['ess']:5.2f}  "
        f"log Ẑ quartiles {spread[0]:.2f} {spread[1]:.2f} {spread[2]:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
