"""Lossless decoders side by side: acceptance and tokens a second for n chains, temperatures and couplings, in one run.

    python benchmarks/exact.py --target FOLDER --draft FOLDER [--tokens 64] [--rounds 2] [--json out.json]

All write text of law p exactly. Contestants: our autoregressive engine, transformers' assisted generation, Speculative,
and MultiDraft with n in {2, 4, 8} and every coupling, at temperatures 0.6 and 1. Coupling milliseconds are a cycle's.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from common import PROMPTS, Run, interleave, without_eos
from transformers import AutoModelForCausalLM, AutoTokenizer

import smcdecode as smc


def main() -> None:
    """Run the contest and print its table."""
    options = read_options()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    p, q = (without_eos(smc.load(folder, dtype=torch.bfloat16)) for folder in (options.target, options.draft))
    contestants: dict[str, Run] = {}
    for temperature in options.temperatures:
        target = p.at(temperature=temperature)
        for name, method in methods(q, options).items():
            contestants[f"T={temperature:g} {name}"] = ours(target, method, prompts, options.tokens)
        if options.peer:
            contestants[f"T={temperature:g} transformers assisted"] = assisted(options, prompts, temperature)
    print(f"load average {os.getloadavg()[0]:.2f}, {options.threads} threads")
    rows = interleave(contestants, options.rounds)
    show(rows)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--chains", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--couplings", nargs="+", default=["auto", "global resolution", "greedy", "k-seq", "recursive"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave transformers out")
    parser.add_argument("--json")
    return parser.parse_args()


def methods(q: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Our lossless decoders by name."""
    found: dict[str, Any] = {
        "autoregressive": smc.Autoregressive(),
        "speculative": smc.Speculative(q, block=options.block),
    }
    for n in options.chains:
        for coupling in options.couplings:
            found[f"n={n} {coupling}"] = smc.MultiDraft(q, block=options.block, chains=n, coupling=coupling)
    return found


def ours(target: Any, method: Any, prompts: list[list[int]], tokens: int) -> Run:
    """One of our decoders on one prompt a round."""

    def run(round_: int) -> dict[str, Any]:
        prompt = prompts[round_ % len(prompts)]
        out = smc.sample(target, prompt, method=method, max_tokens=tokens, seed=round_, progress=False)
        stats = out.stats
        return {
            "tokens": tokens,
            "acceptance": stats.acceptance,
            "tokens_per_cycle": tokens / stats.cycles,
            "coupling_ms": 1e3 * stats.seconds.get("coupling", 0.0) / stats.cycles,
        }

    return run


def assisted(options: argparse.Namespace, prompts: list[list[int]], temperature: float) -> Run:
    """Transformers' assisted generation with the same pair."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        for folder in (options.target, options.draft)
    )

    def run(round_: int) -> dict[str, Any]:
        ids = torch.tensor([prompts[round_ % len(prompts)]])
        torch.manual_seed(round_)
        target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
            min_new_tokens=options.tokens, max_new_tokens=options.tokens, pad_token_id=0, assistant_model=draft,
        )  # fmt: skip
        return {"tokens": options.tokens}

    return run


def show(rows: list[dict[str, Any]]) -> None:
    """Print one line a contestant, with its speed over the autoregressive engine at its temperature."""
    base = {row["name"].split()[0]: row["tokens_per_second"] for row in rows if row["name"].endswith("autoregressive")}
    print(f"{'contestant':34} {'tok/s':>7} {'ratio':>6} {'accept.':>8} {'tok/cyc':>8} {'coupling ms':>12}")
    for row in rows:
        ratio = row["tokens_per_second"] / base[row["name"].split()[0]]
        rest = (
            f"{row['acceptance']:8.3f} {row['tokens_per_cycle']:8.2f} {row['coupling_ms']:12.1f}"
            if "acceptance" in row
            else ""
        )
        print(f"{row['name']:34} {row['tokens_per_second']:7.2f} {ratio:6.2f} {rest}")


if __name__ == "__main__":
    main()
