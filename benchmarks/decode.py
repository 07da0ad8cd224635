"""Tokens a second, ESS and log Ẑ of SMC decoding against what you would use instead, in one run, interleaved.

    python benchmarks/decode.py --target FOLDER --draft FOLDER [--tokens 96] [--rounds 3] [--json out.json]

Same prompts, lengths (EOS disabled), dtype and threads for all. Contestants: transformers' generate (batch 1 and 8),
our autoregressive engine (batch 1 and 8), transformers' assisted generation, and SMC at several (N, K, s). Predicted
speed is equation (7) with pass times measured in the same run. For a plain target the truth is log Z = 0.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from common import PROMPTS, PassTimes, Run, interleave, without_eos
from transformers import AutoModelForCausalLM, AutoTokenizer

import smcdecode as smc
from smcdecode.infer.roofline import speedup

GRID = [(4, 4, 0.0), (4, 8, 0.0), (8, 4, 0.0), (8, 8, 0.0), (4, 4, 0.2), (8, 4, 0.2), (4, 4, 1.0), (1, 4, 1.0)]


def main() -> None:
    """Run the contest and print its table."""
    options = read_options()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    hf_target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).eval()
    hf_draft = AutoModelForCausalLM.from_pretrained(options.draft, dtype=dtype).eval()
    p = without_eos(smc.load(options.target, dtype=dtype))
    q = without_eos(smc.load(options.draft, dtype=dtype))
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    contestants = make_contestants(options, hf_target, hf_draft, p, q, prompts)
    print(
        f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, {options.threads} threads, {dtype}"
    )
    rows = interleave(contestants, options.rounds)
    base = next(row["tokens_per_second"] for row in rows if row["name"] == "smcdecode autoregressive, batch 1")
    passes = PassTimes(p, q, len(prompts[0]) + options.tokens // 2)
    for row in rows:
        row["ratio"] = row["tokens_per_second"] / base
        if row.get("particles"):
            add_prediction(row, passes)
    show(rows)
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "rows": rows}, indent=1))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or name of the target checkpoint")
    parser.add_argument("--draft", required=True, help="folder or name of the draft checkpoint")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds; medians are printed")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--only", default="", help="run contestants whose name contains this (the baseline always runs)"
    )
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


def make_contestants(
    options: argparse.Namespace, hf_target: Any, hf_draft: Any, p: Any, q: Any, prompts: list[list[int]]
) -> dict[str, Run]:
    """Everything that is timed, by name: round number → figures."""
    target = p.at(temperature=options.temperature)

    def ours(method: Any, batch: int) -> Run:
        def run(round_: int) -> dict[str, Any]:
            chosen = [prompts[(round_ + i) % len(prompts)] for i in range(batch)]
            out = smc.sample(target, chosen, method=method, max_tokens=options.tokens, seed=round_, progress=False)
            return figures(out, method, batch * options.tokens)

        return run

    def transformers(batch: int, assistant: Any = None) -> Run:
        def run(round_: int) -> dict[str, Any]:
            chosen = [prompts[(round_ + i) % len(prompts)] for i in range(batch)]
            width = max(map(len, chosen))
            ids = torch.tensor([[0] * (width - len(c)) + c for c in chosen])
            mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in chosen])
            torch.manual_seed(round_)
            hf_target.generate(
                ids, attention_mask=mask, do_sample=True, temperature=options.temperature, top_k=0, top_p=1.0,
                min_new_tokens=options.tokens, max_new_tokens=options.tokens, pad_token_id=0, assistant_model=assistant,
            )  # fmt: skip
            return {"tokens": batch * options.tokens}

        return run

    contestants = {
        "smcdecode autoregressive, batch 1": ours(smc.Autoregressive(), 1),
        "transformers generate, batch 1": transformers(1),
        "smcdecode autoregressive, batch 8": ours(smc.Autoregressive(), 8),
        "transformers generate, batch 8": transformers(8),
        "transformers assisted, batch 1": transformers(1, hf_draft),
    }
    for N, K, s in GRID:
        method = smc.SMC(smc.Draft(q, block=K, strictness=s), particles=N)
        contestants[f"smcdecode SMC N={N} K={K} s={s:g}"] = ours(method, 1)
    keep = "smcdecode autoregressive, batch 1"
    return {name: run for name, run in contestants.items() if options.only in name or name == keep}


def figures(out: list[Any], method: Any, tokens: int) -> dict[str, Any]:
    """What a run of ours says besides its time."""
    stats = out[0].stats
    row: dict[str, Any] = {"tokens": tokens, "log_z": out[0].log_z, "ess": statistics.mean(c.ess for c in out[0].steps)}
    if isinstance(method, smc.SMC):
        row |= {
            "particles": method.particles, "block": method.proposal.block, "strictness": method.proposal.strictness,
            "tokens_per_cycle": stats.particle_tokens / method.particles / stats.cycles,
            "resampling_share": stats.seconds.get("resampling", 0.0) / stats.seconds["total"],
            "model_share": sum(stats.seconds[k] for k in ("draft", "score", "prefill")) / stats.seconds["total"],
            "bytes_moved": stats.bytes_moved,
        }  # fmt: skip
    return row


def add_prediction(row: dict[str, Any], passes: PassTimes) -> None:
    """Predicted speed-up over our autoregressive engine, (7), and achieved over predicted."""
    N, K = int(row["particles"]), int(row["block"])
    predicted = speedup(
        row["tokens_per_cycle"], K, target_one=passes("p", 1, 1), draft=passes("q", N, 1), target=passes("p", N, K + 1)
    )
    row["predicted_ratio"] = predicted
    row["achieved"] = row["ratio"] / predicted


def show(rows: list[dict[str, Any]]) -> None:
    """Print one line a contestant."""
    columns = [("tok/s", 7), ("ratio", 6), ("pred.", 6), ("ach.", 5), ("tok/cyc", 7), ("ESS", 5), ("log Ẑ", 7),
               ("resamp.", 7), ("moved", 6)]  # fmt: skip
    print(f"{'contestant':38}", *(f"{name:>{width}}" for name, width in columns))
    for row in rows:
        cells = [f"{row['name']:38}", f"{row['tokens_per_second']:7.2f}", f"{row['ratio']:6.2f}"]
        for key, form in (
            ("predicted_ratio", "6.2f"), ("achieved", "5.2f"), ("tokens_per_cycle", "7.2f"), ("ess", "5.2f"),
            ("log_z", "7.2f"), ("resampling_share", "7.2%"), ("bytes_moved", "6.0f"),
        ):  # fmt: skip
            width = int(form.split(".")[0])
            cells.append(f"{row[key]:{form}}" if key in row else " " * width)
        print(" ".join(cells))


if __name__ == "__main__":
    main()
