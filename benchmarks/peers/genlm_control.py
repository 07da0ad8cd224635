"""A worker of benchmarks/constraints.py: genlm-control's samplers, in a Python environment of their own.

    python -m venv PEER && PEER/bin/pip install genlm-control torch==2.13.0
    python benchmarks/constraints.py --peer-python PEER/bin/python

Reads one JSON object a line (task, method, particles, seed), answers with one. The peer gets its best settings: its
pass starts as soon as all particles have asked, the prompt's keys and values are cached by one pass of their own,
inside the clock as ours is, and its caches are emptied between runs only, because a second run of the same prompt would
find its answers there.
"""

import asyncio
import functools
import json
import random
import sys
import time
from typing import Any, TextIO

import numpy as np
import torch
from genlm.control import AWRS, BoolCFG, BoolFSA, JsonSchema, PromptedLLM, eager_token_sampler


class Counter:
    """Counts the positions of every pass, padding included, because it is computed too."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.positions = 0
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _: Any, args: Any, kwargs: Any) -> None:
        tokens = args[0] if args else kwargs["input_ids"]
        self.positions += tokens.numel()


class Worker:
    """One model, and samplers by task and method."""

    def __init__(self, folder: str, dtype: str, particles: int) -> None:
        options = {"torch_dtype": getattr(torch, dtype), "device_map": None}
        self.llm = PromptedLLM.from_name(folder, backend="hf", hf_opts=options, batch_size=particles, timeout=0.001)
        self.counter = Counter(self.llm.model.model)

    @functools.cache  # noqa: B019  one worker a process
    def sampler(self, kind: str, text: str, method: str, seed: int) -> Any:
        """A sampler; AWRS has its own seed, so there is one for each."""
        item = self.item(kind, text)
        if method == "masked":
            return eager_token_sampler(self.llm, item)
        return AWRS(self.llm, item.coerce(self.llm, f=b"".join), seed=seed)

    @functools.cache  # noqa: B019
    def item(self, kind: str, text: str) -> Any:
        """The constraint, byte by byte."""
        if kind == "regex":
            return BoolFSA.from_regex(text)
        return JsonSchema(json.loads(text)) if kind == "schema" else BoolCFG.from_lark(text)

    def run(self, ask: dict[str, Any]) -> dict[str, Any]:
        """One run of SMC."""
        task, seed = ask["task"], ask["seed"]
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  the peer draws from it
        torch.manual_seed(seed)
        sampler = self.sampler(task["kind"], task["text"], ask["method"], seed if ask["method"] == "awrs" else 0)
        self.llm.prompt_ids = self.llm.model.tokenizer.encode(task["prompt"])
        self.llm.model.clear_cache()
        self.counter.positions = 0
        start, cpu = time.perf_counter(), time.process_time()
        self.llm.model.cache_kv(self.llm.prompt_ids)
        out = asyncio.run(
            sampler.smc(
                n_particles=ask["particles"], ess_threshold=0.5, max_tokens=task["max_tokens"],
                resampling_method="systematic",
            )
        )  # fmt: skip
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu,
            "tokens": sum(len(context) for context in out.contexts),
            "positions": self.counter.positions,
            "log_z": float(out.log_ml),
            "weights": [float(w) for w in np.nan_to_num(out.normalized_weights)],
            "sequences": [repr(tuple(context)) for context in out.contexts],
            "texts": [b"".join(context[:-1]).decode(errors="replace") for context in out.contexts],
        }


def serve(replies: TextIO) -> None:
    """Answer line by line until there are no more."""
    folder, dtype, threads, particles = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(threads)
    worker = Worker(folder, dtype, particles)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed must not mix with the answers
    serve(answers)
