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
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_checks import ROOT, attention, equality, kernels, master
from gpu_speed import speeds


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


if __name__ == "__main__":
    main()
