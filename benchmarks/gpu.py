"""One command for a machine with one GPU and no network: is it right there, and how fast is it.

    python benchmarks/gpu.py --json gpu.json            # at most 8 minutes
    python benchmarks/gpu.py --small --device cpu       # the same steps on tiny models, to see that they run

(1) kernels and attention against their definitions, on the device; (2) the engine's tokens against the CPU's, from the
same seeds in float32; (3) E[Ẑ] = Z against enumeration; (4) tokens a second with random weights in the shapes of Llama
3.1 8B and 3.2 1B in bfloat16, none of which is downloaded. Autoregressive decoding and SMC at strictness 0 run as
recorded cycles; predicted speed is equation (7), from passes recorded alike. What does not fit into ``--seconds`` is
listed as not run. ``--compile`` does some of (2) and (4) with compiled passes too, which takes minutes to compile.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import smcdecode as smc
from smcdecode.engine.attention import Frame
from smcdecode.engine.cache import KVStore, LayerShape, Layout
from smcdecode.engine.fixed_view import FixedView
from smcdecode.engine.request import Request, seeds
from smcdecode.engine.scheduler import Scheduler, most_pages, page_bytes
from smcdecode.engine.stats import Stats
from smcdecode.infer.roofline import speedup
from smcdecode.potentials.potential import Prompt

ROOT = Path(__file__).parents[1]
SHAPES = {  # of Llama 3.1 8B and 3.2 1B
    "p": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
          "num_key_value_heads": 8, "head_dim": 128},
    "q": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
          "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
}  # fmt: skip
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
COMPILED = 2  # settings, from the first, that ``--compile`` measures with compiled passes too
CYCLES, FIRST = 12, 4  # of one measurement; those before FIRST compile, plan and record
OURS = {
    "resampling": ("_weigh", "_select", "_grow", "_clear"),
    "laws": ("_sums", "_draw", "_score", "_judge", "_overlap"),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table of speeds; no draft where K = 0."""

    streams: int
    prompt: int
    particles: int
    block: int

    @property
    def name(self) -> str:
        """As the table calls it."""
        method = f"SMC N={self.particles} K={self.block}" if self.block else "autoregressive"
        return f"{method}, {self.streams} × {self.prompt}"


def main() -> None:
    """Run all sections, print them, write them."""
    options = read_options()
    begun = time.perf_counter()
    sys.path.insert(0, str(ROOT / "tests"))
    results: dict[str, Any] = {"machine": machine(options.device), "options": vars(options)}
    print(results["machine"], flush=True)
    for name, section in (("kernels", kernels), ("attention", attention), ("equality", equality), ("master", master)):
        start = time.perf_counter()
        results[name] = section(options)
        print(f"{name}: {results[name]} ({time.perf_counter() - start:.0f} s)", flush=True)
    results["speed"] = speeds(options, begun)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    wrong = [name for name in ("kernels", "attention", "equality", "master") if results[name].get("wrong")]
    sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and few settings")
    parser.add_argument("--attention", choices=["flashinfer", "torch"], help="of the speeds; by default the device's")
    parser.add_argument("--compile", action="store_true", help="some of it with compiled passes as well")
    parser.add_argument("--seconds", type=float, default=450.0, help="begin no new setting after this long")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


def machine(device: str) -> dict[str, Any]:
    """What this ran on."""
    gpu = torch.cuda.get_device_properties(0) if device == "cuda" else None
    return {
        "device": gpu.name if gpu else device, "memory": gpu.total_memory if gpu else None, "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }  # fmt: skip


# ---- (1) kernels, attention


def kernels(options: argparse.Namespace) -> dict[str, Any]:
    """Every Triton kernel against its definition: on a GPU as compiled, else by Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {} if options.device == "cuda" else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "interpreted")], env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    return {"wrong": done.returncode != 0, "said": (done.stdout + done.stderr).strip()[-2000:]}


def attention(options: argparse.Namespace) -> dict[str, Any]:
    """FlashInfer's passes of fixed shape against plain torch: the largest difference over the largest value."""
    if options.device != "cuda":
        return {"skipped": "FlashInfer wants a GPU"}
    from smcdecode.engine.load import attention_of

    found = {}
    for page_size, width, window in itertools.product((1, 16), (1, 2, 9), (None, 24)):
        dtype, device = torch.bfloat16, torch.device("cuda")
        store = KVStore(Layout((LayerShape(2, 64, 64),), dtype, device), 6 * 128 // page_size + 1, page_size)
        store._rows[0].normal_()
        pages = 1 + torch.randperm(6 * 128 // page_size, device=device).view(6, -1).int()
        length = torch.tensor([128, 9, 17, 64, 100, 33], device=device)
        frame = Frame(pages, length, torch.ones(6, width, dtype=torch.bool, device=device), page_size)
        query, key, value = (torch.randn(6 * width, heads, 64, dtype=dtype, device=device) for heads in (8, 2, 2))
        ways = attention_of("flashinfer", device, dtype, "attention").fixed(frame, store), FixedView(frame, store)
        out, plain = (w.attend(0, query, key, value, scaling=0.125, window=window).float() for w in ways)
        found[f"pages of {page_size}, {width} queries, window {window}"] = float(
            (out - plain).abs().max() / plain.abs().max()
        )
    return {"wrong": max(found.values()) > 0.02, "largest": max(found.values()), "differences": found}


# ---- (2) equality, (3) master test


def equality(options: argparse.Namespace) -> dict[str, Any]:
    """Whether the device writes the CPU's tokens: recorded, step by step, and one prompt with compiled passes."""
    from models import tiny

    def run(device: str, graphs: bool, compile: bool = False) -> list[Any]:
        modules = [tiny(family, vocab=97, seed=seed, spread=0.15) for seed, family in enumerate(("llama", "qwen2"))]
        p, q = (
            smc.load(m.to(device), name=n, attention="torch", graphs=graphs, compile=compile)
            for m, n in zip(modules, "pq", strict=True)
        )
        asked = [
            (p.at(temperature=0.8), smc.Autoregressive()),
            (p**2, smc.SMC(smc.Draft(q, block=4, strictness=0.0), particles=4)),
            (p**2, smc.SMC(smc.Draft(q, block=4, strictness=0.3), particles=4)),
            (p, smc.Speculative(q)),
        ]
        prompts = [[3 + i, 40, 2 * i + 5] for i in range(1 if compile else 4)]
        return [
            out
            for target, method in (asked[1:2] if compile else asked)
            for out in smc.sample(target, prompts, method=method, max_tokens=24, seed=5)
        ]

    here = run("cpu", False)
    found = {"recorded": (run(options.device, True), here), "step by step": (run(options.device, False), here)}
    if options.compile:
        found["compiled"] = run(options.device, True, True), here[4:5]
    rows = {}
    for name, (there, here) in found.items():
        rows[name] = {
            "answers": len(there), "equal": sum(a.tokens == b.tokens for a, b in zip(there, here, strict=True)),
            "log_z": max(abs(a.log_z - b.log_z) for a, b in zip(there, here, strict=True)),
        }  # fmt: skip
    return {"wrong": any(row["equal"] < row["answers"] for row in rows.values()), **rows}


def master(options: argparse.Namespace) -> dict[str, Any]:
    """Mean Ẑ over Z in standard errors, by enumeration, for p² and few particles."""
    from engines import exact_answer
    from models import tiny

    modules = [tiny(family, vocab=5, seed=seed, spread=0.15) for seed, family in enumerate(("llama", "qwen2"))]
    exact = exact_answer(modules[0], [2, 3], lambda _: 0.0, vocab=5, max_tokens=5, alpha=2.0)
    p, q = (
        smc.load(m.to(options.device), name=n, attention="torch", graphs=True)
        for m, n in zip(modules, "pq", strict=True)
    )
    runs = 200 if options.small else 1000
    rows = {}
    for N, s in ((1, 0.3), (2, 0.3), (4, 0.0)):
        method = smc.SMC(smc.Draft(q, block=2, strictness=s), particles=N)
        outs = smc.sample(p**2, [[2, 3]] * runs, method=method, max_tokens=5, seed=1, progress=False)
        ratio = np.exp([out.log_z - exact.log_z for out in outs])
        rows[f"N={N} s={s:g}"] = float((ratio.mean() - 1) / (ratio.std(ddof=1) / runs**0.5))
    return {"wrong": any(abs(z) > 5 for z in rows.values()), "standard errors": rows}


# ---- (4) speed


def speeds(options: argparse.Namespace, begun: float) -> list[dict[str, Any]]:
    """The table, row by row; autoregressive decoding of each number of streams and length first.

    Ratios and predictions of compiled passes are against compiled passes.
    """
    pairs = models(options)
    rows: list[dict[str, Any]] = []
    base: dict[tuple[str, int, int], float] = {}
    passes = Passes(options.small)
    columns = (
        ("tok/s", 8),
        ("ratio", 6),
        ("pred.", 6),
        ("ach.", 5),
        ("draft", 6),
        ("score", 6),
        ("rest", 6),
        ("moved", 6),
    )
    print(f"{'setting':40}", *(f"{name:>{width}}" for name, width in columns))
    todo = [
        (setting, how) for i, setting in enumerate(settings(options.small)) for how in pairs if not how or i < COMPILED
    ]
    for setting, how in todo:
        if time.perf_counter() - begun > options.seconds:
            rows.append({"name": setting.name + how, "skipped": "out of time"})
            continue
        p, q = pairs[how]
        row = {"name": setting.name + how, **dataclasses.asdict(setting), **measure(p, q, setting)}
        if not setting.block:
            base[how, setting.streams, setting.prompt] = row["tokens_per_second"]
        row |= compare(row, setting, base[how, setting.streams, setting.prompt], passes, p, q)
        rows.append(row)
        show(row)
    if options.device == "cuda" and time.perf_counter() - begun < options.seconds:
        rows.append({"name": "profile", **profile(*pairs[""])})
        print(rows[-1])
    print("not run:", [row["name"] for row in rows if "skipped" in row] or "nothing")
    return rows


def settings(small: bool) -> Iterator[Setting]:
    """What is measured, the telling ones first."""
    lengths, numbers, blocks, streams = (
        ((16,), (2,), (2,), (1, 2)) if small else ((1024, 256, 4096), (8, 4, 12), (8, 4, 16), (1, 8))
    )
    for length, some in itertools.product(lengths, streams):
        yield Setting(some, length, 1, 0)
        for N, K in itertools.product(numbers, blocks):
            yield Setting(some, length, N, K)


def models(options: argparse.Namespace) -> dict[str, list[Any]]:
    """Target and draft with random weights, no tokenizer and no token that ends a text; by what names say of them."""
    made: dict[str, list[Any]] = {"": [], ", compiled": []} if options.compile else {"": []}
    for name, shape in SHAPES.items():
        config = LlamaConfig(
            **(SMALL if options.small else shape), vocab_size=97 if options.small else 128256, rope_theta=500000.0,
            max_position_embeddings=8192, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        with torch.device(options.device):
            module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for how, pair in made.items():
            pair.append(smc.load(module, name=name + how, attention=options.attention, graphs=True, compile=bool(how)))
    return made


def measure(p: Any, q: Any, setting: Setting, page_size: int = 1) -> dict[str, Any]:
    """Seconds of one recorded cycle of all streams, and what that makes a second."""
    stats, walls = Stats(), []
    scheduler = scheduler_of(p, q, setting, stats, page_size)
    cycles = scheduler.run()
    before = time.perf_counter()
    for _ in cycles:
        now = time.perf_counter()
        walls.append(now - before)
        before = now
        if len(walls) == CYCLES - 1:  # while all are running
            break
    cycles.close()
    assert stats.recorded == stats.cycles, "the cycle was not recorded"
    seconds = statistics.median(walls[FIRST:])
    written = setting.streams * (setting.block + 1)
    return {"cycle": seconds, "tokens_per_second": written / seconds, "bytes_moved": stats.bytes_moved}


def scheduler_of(p: Any, q: Any, setting: Setting, stats: Stats, page_size: int) -> Scheduler:
    """Streams of random prompts under one method, ready to run."""
    method = (
        smc.SMC(smc.Draft(q, block=setting.block, strictness=0.0), setting.particles)
        if setting.block
        else smc.Autoregressive()
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(p.vocabulary.size, (setting.streams, setting.prompt), generator=generator)
    prompts = [Prompt(tuple(row)) for row in ids.tolist()]
    tokens = (setting.block + 1) * (CYCLES + 2)
    requests = [
        Request(i, prompt, p.as_target(), method, seed, tokens)
        for i, (prompt, seed) in enumerate(zip(prompts, seeds(0, prompts), strict=True))
    ]
    drafts = [q] if setting.block else []
    pages = sum(most_pages(request, page_size) for request in requests)
    rows = setting.streams * setting.particles * (5 * setting.block + 3)
    memory = pages * page_bytes([p, *drafts], page_size) + 4 * rows * p.vocabulary.size
    scheduler = Scheduler.of(requests, memory=memory, page_size=page_size, stats=stats)
    assert scheduler.budget.lanes == setting.streams, "not all streams run at once"
    return scheduler


def compare(row: dict[str, Any], setting: Setting, base: float, passes: "Passes", p: Any, q: Any) -> dict[str, Any]:
    """Against autoregressive decoding, and against what its passes alone would take, (7)."""
    N, K = setting.streams * setting.particles, setting.block
    context = setting.prompt + (K + 1) * CYCLES // 2
    score = passes(p, N, K + 1, context)
    draft = passes(q, N, 1, context) if K else 0.0
    result = {
        "ratio": row["tokens_per_second"] / base,
        "draft": K * draft / row["cycle"],
        "score": score / row["cycle"],
    }
    result["rest"] = 1 - result["draft"] - result["score"]
    one = passes(p, setting.streams, 1, context)
    result["predicted"] = speedup(K + 1, K, target_one=one, draft=draft, target=score)
    return result | {"achieved": result["ratio"] / result["predicted"]}


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    cells = f"{row['tokens_per_second']:8.1f} {row['ratio']:6.2f} {row['predicted']:6.2f} {row['achieved']:5.2f}"
    shares = " ".join(f"{row[name]:6.1%}" for name in ("draft", "score", "rest"))
    print(f"{row['name']:40} {cells} {shares} {row['bytes_moved']:6.0f}", flush=True)


class Passes:
    """Seconds of one pass of fixed shape, recorded as the cycle's are; each measured once."""

    def __init__(self, small: bool) -> None:
        self._known: dict[tuple[str, int, int, int], float] = {}
        self._repeats = 3 if small else 10

    def __call__(self, model: Any, rows: int, width: int, context: int) -> float:
        """``rows`` texts of ``context`` tokens, ``width`` of them new, with the logits of all these."""
        key = (model.name, rows, width, context)
        if key not in self._known:
            self._known[key] = self._measure(model, rows, width, context)
        return self._known[key]

    @torch.inference_mode()
    def _measure(self, model: Any, rows: int, width: int, context: int) -> float:
        device = model.device
        store = model.store(context + rows * width + 1, 1)
        shared = torch.arange(1, context - width + 1, device=device).expand(rows, -1)
        own = context + 1 - width + torch.arange(rows * width, device=device).view(rows, -1)
        live = torch.ones(rows, width, dtype=torch.bool, device=device)
        frame = Frame(torch.cat([shared, own], 1).int(), torch.full((rows,), context, device=device), live, 1)
        tokens, wanted = (
            torch.zeros(rows * width, dtype=torch.int64, device=device),
            torch.arange(rows * width, device=device),
        )

        def run() -> None:
            model.fixed(tokens, frame, store, wanted)

        return timed(recorded(run, device), device, self._repeats)


def recorded(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same work as a CUDA graph; itself on a CPU."""
    run()
    if device.type != "cuda":
        return run
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(run: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def profile(p: Any, q: Any) -> dict[str, Any]:
    """Where the GPU's time goes in a few replayed cycles: idle, our kernels by kind, all others."""
    setting = Setting(1, 1024, 8, 8)
    cycles = scheduler_of(p, q, setting, Stats(), 16).run()
    for _ in range(FIRST):
        next(cycles)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        start = time.perf_counter()
        for _ in range(4):
            next(cycles)
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    cycles.close()
    events = [(e.key, e.self_device_time_total / 1e6) for e in seen.key_averages()]
    busy = sum(seconds for _, seconds in events)
    shares = {kind: sum(t for name, t in events if name.startswith(names)) / wall for kind, names in OURS.items()}
    moved = measure(p, q, setting, page_size=16)["bytes_moved"]
    return {
        "setting": setting.name,
        "idle": 1 - busy / wall,
        **shares,
        "models": busy / wall - sum(shares.values()),
        "moved": moved,
    }


if __name__ == "__main__":
    main()
