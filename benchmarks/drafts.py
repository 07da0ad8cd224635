"""Drafts for a target that has no small sibling: a grown one, its own first layers, lookups, and no draft at all.

    python benchmarks/drafts.py --target demo [--draft FOLDER] [--layers 10 20] [--prompts FILE] [--json out.json]

For each draft, in one run, interleaved: acceptance and tokens a second of lossless decoding (one chain), against plain
sampling; then SMC on p^α, tokens a second, ESS, χ² of a cycle and log Ẑ, against ``Local``. EOS is disabled, so that
all write equally long texts. ``--prompts`` is a text file, one prompt a line; what a draft was trained on does not
belong there.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from common import PROMPTS, Run, interleave, without_eos

import smcdecode as smc

COPY = "Repeat the following list word for word.\nList: {0}\nRepeated list: {0}\nRepeated list:"
LIST = "apples, 12 pears, the red book, Natalia's clips, seven candles, a blue robe, two bolts of fiber, the hare"


def main() -> None:
    """Run the contest and print its table."""
    options = read_options()
    torch.set_num_threads(options.threads)
    p = without_eos(smc.load(options.target))
    texts = Path(options.prompts).read_text(encoding="utf-8").splitlines() if options.prompts else PROMPTS
    print(f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, {options.threads} threads")
    rows = []
    for task, prompts in (("open", texts), ("copy", [COPY.format(LIST)])):
        rows += [{"task": task, **row} for row in interleave(contestants(options, p, prompts), options.rounds)]
    compare(rows)
    show(rows)
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "rows": rows}, indent=1))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", help="folder of a grown draft")
    parser.add_argument("--layers", type=int, nargs="*", default=[10, 20], help="layers kept by LayerSkip")
    parser.add_argument("--ngram", type=int, nargs="*", default=[2, 3], help="tokens that must recur for PromptLookup")
    parser.add_argument("--prompts", help="text file, one prompt a line")
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--particles", type=int, default=8)
    parser.add_argument("--strictness", type=float, default=0.2)
    parser.add_argument("--alpha", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


def contestants(options: argparse.Namespace, p: Any, prompts: list[str]) -> dict[str, Run]:
    """Every draft under both decoders, and what goes without, by name: round number → figures."""

    def contest(target: Any, method: Any) -> Run:
        def run(round_: int) -> dict[str, Any]:
            prompt = prompts[round_ % len(prompts)]
            out = smc.sample(target, prompt, method=method, max_tokens=options.tokens, seed=round_, progress=False)
            stats = out.stats
            chi2 = statistics.median(step.chi2 for step in out.steps)
            row = {"tokens": stats.tokens, "log_z": out.log_z, "ess": min(step.ess for step in out.steps), "chi2": chi2}
            return row | {"cycles": stats.cycles, "acceptance": stats.acceptance}

        return run

    def smc_of(proposal: Any) -> smc.SMC:
        return smc.SMC(proposal, options.particles)

    found = {"plain": contest(p, smc.Autoregressive()), "SMC, Local": contest(p**options.alpha, smc_of(smc.Local()))}
    for name, q in drafts(options, p).items():
        found[f"lossless, {name}"] = contest(p, smc.Speculative(q, options.block))
        proposal = smc.Draft(q, options.block, strictness=options.strictness)
        found[f"SMC, {name}"] = contest(p**options.alpha, smc_of(proposal))
    return found


def drafts(options: argparse.Namespace, p: Any) -> dict[str, Any]:
    """The drafts, by name."""
    grown = {"grown": without_eos(smc.load(options.draft))} if options.draft else {}
    skips = {f"first {n} layers": smc.LayerSkip(p, layers=n) for n in options.layers}
    return {**grown, **skips, **{f"lookup of {n}": smc.PromptLookup(n) for n in options.ngram}}


def compare(rows: list[dict[str, Any]]) -> None:
    """Add each row's speed over that of the decoder that needs no draft, on its task."""
    for row in rows:
        base = "plain" if row["name"].startswith(("plain", "lossless")) else "SMC, Local"
        without = next(r for r in rows if r["task"] == row["task"] and r["name"] == base)
        row["ratio"] = row["tokens_per_second"] / without["tokens_per_second"]


def show(rows: list[dict[str, Any]]) -> None:
    """Print one line a contestant."""
    columns = (
        ("tokens_per_second", "tok/s", ".2f"), ("ratio", "ratio", ".2f"), ("acceptance", "accept.", ".3f"),
        ("cycles", "cycles", ".0f"), ("chi2", "1 + χ²", ".3g"), ("ess", "ESS", ".2f"), ("log_z", "log Ẑ", ".2f"),
    )  # fmt: skip
    print(f"{'task':6}{'contestant':28}", *(f"{title:>8}" for _, title, _ in columns))
    for row in rows:
        print(f"{row['task']:6}{row['name']:28}", *(f"{format(row[key], form):>8}" for key, _, form in columns))


if __name__ == "__main__":
    main()
