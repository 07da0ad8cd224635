"""Constrained decoding against genlm-control, and what masks cost; one run, same machine, model, tasks and particles.

    python benchmarks/constraints.py --peer-python PEER/bin/python [--seeds 20] [--threads 1 2] [--json out.json]

Contestants run in processes of their own, in turn, seed after seed; benchmarks/peers/ says how to install the peer and
how it is treated. A run is N particles of one prompt, resampled below N/2. Tokens are those of all particles, EOS
included. ESS merges equal sequences, by the same rule for all, because copies made by a late resampling are not
samples. ``sd log Ẑ`` is the spread over seeds; ``dead`` counts runs without a survivor. Tokens a second are given by
the wall clock and by CPU time; on a machine that does other work, read the second. ``good`` is the share of texts of
positive weight that ``re``, ``jsonschema`` or Lark accept. Masks against bare llguidance: benchmarks/masks.py, whose
table comes last.
"""

import argparse
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import lark

from smcdecode.engine.demo import demo_folder

HERE = Path(__file__).parent

PHONE = r" \([0-9]{3}\) [0-9]{3}-[0-9]{4}"
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "author": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1400, "maximum": 2030},
        "language": {"enum": ["English", "French", "German", "Spanish", "other"]},
    },
    "required": ["title", "author", "year", "language"],
    "additionalProperties": False,
}
SQL = r"""
start: "SELECT " columns " FROM " TABLE where? order? ";"
columns: "*" | COLUMN (", " COLUMN)*
where: " WHERE " condition (" AND " condition)*
condition: COLUMN COMPARISON NUMBER
order: " ORDER BY " COLUMN
TABLE: "users" | "orders"
COLUMN: "id" | "name" | "age" | "price"
COMPARISON: " = " | " > " | " < "
NUMBER: /[0-9]{1,4}/
"""
TASKS = [
    {
        "name": "phone number", "kind": "regex", "text": PHONE, "max_tokens": 24,
        "prompt": "Phone numbers of the team.\nAnn: (212) 555-0143\nBen: (415) 555-0178\nCleo:",
    },
    {
        "name": "JSON schema", "kind": "schema", "text": json.dumps(SCHEMA), "max_tokens": 80,
        "prompt": "Books as JSON, one a line.\n"
        '{"title": "Pride and Prejudice", "author": "Jane Austen", "year": 1813, "language": "English"}\n'
        '{"title": "Les Misérables", "author": "Victor Hugo", "year": 1862, "language": "French"}\n',
    },
    {
        "name": "SQL grammar", "kind": "grammar", "text": SQL, "max_tokens": 48,
        "prompt": "Tables: users(id, name, age), orders(id, price)\n"
        "Orders below 50, cheapest first:\nSELECT id, price FROM orders WHERE price < 50 ORDER BY price;\n"
        "Names and ages of users above 30 and below 60:\n",
    },
]  # fmt: skip
PEERS = ("masked", "awrs")


def main() -> None:
    """Run the contest and print its tables."""
    options = read_options()
    report: dict[str, Any] = {"options": {**vars(options), "json": None}, "contest": {}}
    print(f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores; {options.dtype}")
    for threads in options.threads:
        rows = contest(options, threads)
        report["contest"][threads] = rows
        show(rows, threads)
    if options.masks:
        subprocess.run([sys.executable, HERE / "masks.py", "--dtype", options.dtype], check=True)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1, default=str))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, help="Python of the peer's environment; without it, ours alone")
    parser.add_argument("--model", type=Path, help="folder of the checkpoint; the demo model by default")
    parser.add_argument("--particles", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tasks", nargs="+", default=[task["name"] for task in TASKS])
    parser.add_argument("--ours", nargs="+", default=["ahead", "masked"], help="methods of peers/smcdecode_here.py")
    parser.add_argument("--masks", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


# ---- the contest

Ask = Callable[[dict[str, Any]], dict[str, Any]]


@contextlib.contextmanager
def worker(python: Path | str, script: str, arguments: list[str], threads: int) -> Iterator[Ask]:
    """A contestant's process: a function that sends it a question and waits for the answer."""
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
    process = subprocess.Popen(
        [python, HERE / "peers" / script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env={**os.environ, **limits},
    )  # fmt: skip
    assert process.stdin and process.stdout
    stdin, stdout = process.stdin, process.stdout

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        return read()

    def read() -> dict[str, Any]:
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"{script} ended with status {process.wait()}: run it by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    try:
        read()  # that it is ready
        yield ask
    finally:
        stdin.close()
        process.wait()


def contest(options: argparse.Namespace, threads: int) -> list[dict[str, Any]]:
    """Figures of every task and contestant at a number of threads."""
    folder = str(options.model or demo_folder())
    common = [folder, options.dtype, str(threads)]
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(worker(sys.executable, "smcdecode_here.py", common, threads))
        contestants = [("smcdecode", method, ours) for method in options.ours]
        if options.peer_python:
            arguments = [*common, str(options.particles)]
            peer = stack.enter_context(worker(options.peer_python, "genlm_control.py", arguments, threads))
            contestants += [("genlm-control", method, peer) for method in PEERS]
        tasks = [task for task in TASKS if task["name"] in options.tasks]
        return [row for task in tasks for row in interleave(task, contestants, options)]


def interleave(
    task: dict[str, Any], contestants: list[tuple[str, str, Ask]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All contestants in turn, seed after seed; the first round warms up and is not counted."""
    answers: dict[tuple[str, str], list[dict[str, Any]]] = {(who, method): [] for who, method, _ in contestants}
    for seed in range(-1, options.seeds):
        for who, method, ask in contestants:
            question = {"task": task, "method": method, "particles": options.particles, "seed": max(seed, 0)}
            answer = ask(question)
            if seed >= 0:
                answers[who, method].append(answer)
        print(f"{task['name']}: round {seed + 1} of {options.seeds} done", file=sys.stderr, flush=True)
    return [{"task": task["name"], "who": f"{who} {how}", **figures(task, a)} for (who, how), a in answers.items()]


def figures(task: dict[str, Any], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What a contestant's runs of a task come to."""
    total = {key: sum(a[key] for a in answers) for key in ("tokens", "seconds", "cpu_seconds", "positions")}
    alive = [a["log_z"] for a in answers if a["log_z"] > -math.inf]
    texts = [text for a in answers for text, weight in zip(a["texts"], a["weights"], strict=True) if weight > 0]
    return {
        "tokens_per_second": statistics.median(a["tokens"] / a["seconds"] for a in answers),
        "tokens_per_cpu_second": statistics.median(a["tokens"] / a["cpu_seconds"] for a in answers),
        "positions_per_token": total["positions"] / total["tokens"],
        "ess": statistics.mean(map(distinct_ess, answers)),
        "ess_per_second": sum(map(distinct_ess, answers)) / total["seconds"],
        "log_z": statistics.mean(alive) if alive else -math.inf,
        "log_mean_z": log_mean_exp([a["log_z"] for a in answers]),
        "log_z_sd": statistics.stdev(alive) if len(alive) > 1 else math.nan,
        "dead": len(answers) - len(alive),
        "good": statistics.mean(oracle(task, text) for text in texts) if texts else math.nan,
        "all_log_z": [a["log_z"] for a in answers],
    }


def distinct_ess(answer: dict[str, Any]) -> float:
    """Effective sample size of the answer with equal sequences merged; 0 without survivors."""
    mass: Counter[str] = Counter()
    for sequence, weight in zip(answer["sequences"], answer["weights"], strict=True):
        mass[sequence] += weight
    squares = sum(weight * weight for weight in mass.values())
    return 1 / squares if squares else 0.0


def log_mean_exp(log_z: list[float]) -> float:
    """Log of the mean of Ẑ, runs without survivors included: the unbiased estimate of log Z."""
    top = max(log_z)
    return top + math.log(statistics.mean(math.exp(x - top) for x in log_z)) if top > -math.inf else top


def oracle(task: dict[str, Any], text: str) -> bool:
    """Whether a text satisfies its task, by Python's own means."""
    if task["kind"] == "regex":
        return re.fullmatch(task["text"], text) is not None
    try:
        if task["kind"] == "grammar":
            lark.Lark(task["text"], parser="earley").parse(text)
        else:
            jsonschema.validate(json.loads(text), json.loads(task["text"]))
    except (ValueError, jsonschema.ValidationError, lark.exceptions.LarkError):
        return False
    return True


def show(rows: list[dict[str, Any]], threads: int) -> None:
    """One line a task and contestant; ratios are ours over the peer's."""
    columns = (("tokens_per_second", "tok/s", "8.1f"), ("tokens_per_cpu_second", "tok/CPU s", "9.1f"),
               ("positions_per_token", "pos/tok", "7.2f"), ("ess", "ESS", "5.2f"), ("ess_per_second", "ESS/s", "6.2f"),
               ("log_mean_z", "log mean Ẑ", "10.2f"), ("log_z_sd", "sd log Ẑ", "8.2f"), ("dead", "dead", "4d"),
               ("good", "good", "6.1%"))  # fmt: skip
    print(f"\n{threads} thread{'s' if threads > 1 else ''}")
    heads = [f"{name:>{int(form.split('.')[0].rstrip('d'))}}" for _, name, form in columns]
    print(f"{'task':13} {'contestant':22}", *heads, "  ours/theirs: tok/s, tok/CPU s, sd")
    best = {row["task"]: row for row in reversed(rows) if row["who"].startswith("smcdecode")}
    for row in rows:
        cells = [f"{row[key]:{form}}" for key, _, form in columns]
        own = best[row["task"]]
        ratios = [own[key] / row[key] for key in ("tokens_per_second", "tokens_per_cpu_second", "log_z_sd")]
        print(f"{row['task']:13} {row['who']:22}", *cells, "  ", *(f"{ratio:6.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
