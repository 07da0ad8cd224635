"""Whether a device is right: sections (1) to (3) of gpu.py. Knows definitions and other devices; no clock."""

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import smcdecode as smc
from smcdecode.engine.attention import Frame
from smcdecode.engine.cache import KVStore, LayerShape, Layout
from smcdecode.engine.fixed_view import FixedView

ROOT = Path(__file__).parents[1]


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
