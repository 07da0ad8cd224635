"""How fast a device is: section (4) of gpu.py. Knows shapes, cycles and clocks."""

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import smcdecode as smc
from smcdecode.engine.attention import Frame
from smcdecode.engine.request import Request, seeds
from smcdecode.engine.scheduler import Scheduler, most_pages, page_bytes
from smcdecode.engine.stats import Stats
from smcdecode.infer.roofline import speedup
from smcdecode.potentials.potential import Prompt

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
