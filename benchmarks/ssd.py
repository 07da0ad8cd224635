"""A draft that writes while the target verifies: predicted and measured speed, in one run, interleaved.

    python benchmarks/ssd.py --simulate [--target-ms 20] [--draft-ms 2] [--batches 1 4 8]
    python benchmarks/ssd.py --target FOLDER --draft FOLDER [--tokens 64] [--batches 1]

With ``--simulate`` both models are tables whose passes take the given times, whatever their size, as where reading
weights is the bound: for a 70B target on four GPUs and a 1B draft on another, say ``--target-ms 18 --draft-ms 2.5``.
A pass holds the thread that asked for it until its time is up, so nothing of the engine's work is hidden behind it, in
either process. The draft is by default as good as a 1B one for a 70B target is in the publication's measurements: there
drafting 6 tokens and waiting made 161.8/54.7 = 2.96 of the autoregressive speed, which at these device times takes
2.96 · (1 + 6 · 0.1) = 4.7 tokens a cycle, and so does ``--noise 0.42``. With two checkpoints both run here, one process
each.

The prediction is Corollary 16 of arXiv 2603.03251 (E/(1 + T_q) for the decoder that waits), with the hit rate and the
tokens a cycle measured in the same run, read in three ways:

- device: a pass takes what its device takes, as given. Speed is over one token a target pass of the device, and
  whatever the engine itself takes, in either process, counts as lost.
- shrinking: the same for the batch as it was. The formula is about b sequences that all run; in a run of equally long
  texts those that need fewer cycles end first, and the last ones run almost alone. So many sequences as ran in each
  cycle are put into the formula, cycle by cycle. Speed is over the autoregressive decoder, as it is for a user.
- engine: a pass takes what a cycle of autoregressive decoding was measured to take, and a draft step what a waiting
  cycle was measured to take more, over its steps: device and engine together. Speed is over the autoregressive decoder.
  (That of Speculative is then predicted from itself; it says nothing, and is left out.)
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import PROMPTS, Run, interleave, without_eos
from timed import Timed

import smcdecode as smc
from smcdecode.infer.speculation import batch_speedup, crossover, speculative_speedup


def simulated(options: argparse.Namespace) -> tuple[Any, Any, list[list[int]]]:
    """Target, draft and prompts of ``--simulate``."""
    rng = np.random.default_rng(0)
    V = 64
    logits = 2.5 * rng.standard_normal((V, V))
    noisy = logits + options.noise * rng.standard_normal((V, V))
    p, q = Timed("p", logits, options.target_ms / 1e3), Timed("q", noisy, options.draft_ms / 1e3)
    return p, q, [[i % V] for i in range(max(options.batches))]


def loaded(options: argparse.Namespace) -> tuple[Any, Any, list[list[int]]]:
    """Target, draft and prompts of two checkpoints."""
    dtype = getattr(torch, options.dtype)
    p, q = (without_eos(smc.load(folder, dtype=dtype)) for folder in (options.target, options.draft))
    return p, q, [p.tokenizer(text)["input_ids"] for text in PROMPTS]


def main() -> None:
    """Run the contest and print its table."""
    options = read_options()
    torch.set_num_threads(options.threads)
    p, q, prompts = simulated(options) if options.simulate else loaded(options)
    with smc.remote(q if options.simulate else options.draft, threads=options.threads, **where(options)) as beside:
        beside.vocabulary = q.vocabulary  # without EOS, as the target
        print(
            f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, {options.threads} threads each"
        )
        table = []
        for batch in options.batches:
            chosen = (prompts * batch)[:batch]
            rows = interleave(contestants(options, p, q, beside, chosen), options.rounds)
            compare(rows, batch, options)
            table += rows
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "rows": table}, indent=1))


def where(options: argparse.Namespace) -> dict[str, Any]:
    """How the other process loads a checkpoint."""
    return {} if options.simulate else {"dtype": getattr(torch, options.dtype)}


def contestants(options: argparse.Namespace, p: Any, q: Any, beside: Any, prompts: list[list[int]]) -> dict[str, Run]:
    """Everything that is timed, by name."""
    target = p.at(temperature=options.temperature)

    def run(method: Any) -> Run:
        def once(round_: int) -> dict[str, Any]:
            outs = smc.sample(target, prompts, method=method, max_tokens=options.tokens, seed=round_, progress=False)
            return figures(outs, method)

        return once

    found = {"autoregressive": run(smc.Autoregressive())}
    for K in options.blocks:
        found[f"Speculative K={K}"] = run(smc.Speculative(q, K))
        for backup in options.backups:
            method = smc.Saguaro(beside, K, budget=options.budget, backup=backup, share=options.share)
            found[f"Saguaro K={K} {backup}"] = run(method)
    if options.particles:
        for name, model, overlap in (("SMC", q, False), ("SMC overlap", beside, True)):
            draft = smc.Draft(model, options.blocks[0], strictness=0.0)
            found[f"{name} N={options.particles} K={options.blocks[0]}"] = run(
                smc.SMC(draft, options.particles, overlap=overlap)
            )
    return found


def figures(outs: list[Any], method: Any) -> dict[str, Any]:
    """What a run says besides its time. A request's first cycle reads its prompt and writes one token."""
    stats, batch = outs[0].stats, len(outs)
    cycles = [len(out.steps) - 1 for out in outs]
    hit = stats.hit_rate if stats.hits + stats.misses else 0.0
    running = (sum(n > t for n in cycles) for t in range(max(cycles)))
    return {
        "tokens": stats.tokens, "block": getattr(method, "block", 0), "batch": batch,
        "hit": hit, "late": sum(1 - hit**b for b in running),
        "accepted": stats.acceptance if stats.drafted else 0.0,
        "cycles": stats.cycles, "tokens_per_cycle": (stats.tokens - batch) / max(1, sum(cycles)),
        "score": stats.seconds.get("score", 0.0) / max(1, stats.cycles),
    }  # fmt: skip


def compare(rows: list[dict[str, Any]], batch: int, options: argparse.Namespace) -> None:
    """Add speeds and predictions, and print them."""
    base = rows[0]["tokens_per_second"]
    device = options.target_ms / 1e3 if options.simulate else None
    cycle = {row["name"]: row["seconds"] / row["cycles"] for row in rows}
    synchronous = max(row["tokens_per_second"] for row in rows if row["name"].startswith("Speculative"))
    print(
        f"\nbatch {batch}: autoregressive {base / batch:.1f} tokens/s a sequence, "
        f"{cycle['autoregressive'] * 1e3:.1f} ms a cycle, of which {rows[0]['score'] * 1e3:.1f} ms score"
    )
    print(f"{'':26} {'over AR':>7} {'/best SD':>8} {'tok/cyc':>7} {'hit':>5}", end="")
    print(
        " | device: speed, predicted, share | shrinking: predicted, share | engine: predicted, share" if device else ""
    )
    for row in rows:
        row["speedup"] = row["tokens_per_second"] / base
        row["over_synchronous"] = row["tokens_per_second"] / synchronous
        print(
            f"{row['name']:26} {row['speedup']:7.2f} {row['over_synchronous']:8.2f} {row['tokens_per_cycle']:7.2f} "
            f"{row['hit']:5.2f}",
            end="",
        )
        if device:
            K = int(row["block"])
            row["device_speed"] = row["tokens_per_second"] / batch * device
            row["predicted_device"] = predicted(row, options.draft_ms / 1e3 / device)
            waiting = cycle.get(f"Speculative K={K}", 0.0) - cycle["autoregressive"]
            row["predicted_engine"] = predicted(row, waiting / max(1, K) / cycle["autoregressive"])
            row["predicted_shrinking"] = shrinking(row, options.draft_ms / 1e3 / device)
            print(reading(row["device_speed"], row["predicted_device"], 7), end="")
            print(reading(None, row["predicted_shrinking"], 0, row["speedup"]), end="")
            if row["name"].startswith("Saguaro"):
                print(reading(None, row["predicted_engine"], 0, row["speedup"]), end="")
        print()
    plan(rows, options)


def predicted(row: dict[str, Any], step: float) -> float | None:
    """The formula's speed of a contestant for draft steps of so many target passes; None for one it is not about."""
    K, E, name = int(row["block"]), row["tokens_per_cycle"], row["name"]
    if name.startswith("Speculative"):
        return speculative_speedup(E, K * step)
    if name.startswith("Saguaro"):
        backup = K * step if name.endswith("redraft") else 0.0
        return batch_speedup(row["hit"], E, E, prepare=(K + 1) * step, backup=backup, batch=row["batch"])
    return None


def shrinking(row: dict[str, Any], step: float) -> float | None:
    """As :func:`predicted`, for the sequences that ran in each cycle; a request's first cycle reads its prompt."""
    K, cycles, late = int(row["block"]), row["cycles"] - 1, row["late"]
    if not K:
        return None
    if row["name"].startswith("Speculative"):
        passes = cycles * (1 + K * step)
    else:
        backup = K * step if row["name"].endswith("redraft") else 0.0
        passes = (cycles - late) * max(1.0, (K + 1) * step) + late * (1 + backup)
    return float(row["tokens"] / row["batch"] / (1 + passes))


def reading(speed: float | None, prediction: float | None, width: int, against: float | None = None) -> str:
    """Speed, prediction and their ratio, as columns."""
    shown = "" if speed is None else f"{speed:{width}.2f}"
    if prediction is None:
        return f" | {shown}"
    reached = (speed if against is None else against) / prediction  # type: ignore[operator]
    return f" | {shown} {prediction:9.2f} {reached:6.2f}"


def plan(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The batch size from which misses are better served by a lookup than by drafting again, were it this good."""
    drafted = [row for row in rows if row["name"].endswith("redraft")]
    looked_up = [row for row in rows if row["name"].endswith("lookup")]
    for good, poor in zip(drafted, looked_up, strict=False):
        slow = (good["tokens_per_cycle"], good["block"] * options.draft_ms / options.target_ms)
        at = crossover(good["hit"], slow, (poor["tokens_per_cycle"], 0.0))
        print(f"K={good['block']:.0f}: a lookup is the better backup from batch {at:.1f} on")


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="tables whose passes take given times")
    parser.add_argument("--target-ms", type=float, default=20.0)
    parser.add_argument("--draft-ms", type=float, default=2.0)
    parser.add_argument("--noise", type=float, default=0.42, help="how far the simulated draft is from the target")
    parser.add_argument("--target", help="folder or name of the target checkpoint")
    parser.add_argument("--draft", help="folder or name of the draft checkpoint")
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 6, 7])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--backups", nargs="+", default=["redraft"], help="redraft, lookup, uniform, auto")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--particles", type=int, default=0, help="time SMC with so many, with overlap and without")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds; medians are printed")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    if not options.simulate and not (options.target and options.draft):
        parser.error("give --simulate, or --target and --draft")
    return options


if __name__ == "__main__":
    main()
