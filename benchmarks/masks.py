"""What masks cost: against bare llguidance on the same states, and as a part of a cycle of drafting.

    python benchmarks/masks.py [--particles 32] [--block 4] [--threads 1] [--json out.json]

States are the distinct beginnings of texts that the model wrote under each constraint. Bare is what llguidance needs to
fill packed words, ours is ``psi.mask``. In a cycle masks are computed on a thread while the model
runs, so three shares of a cycle's time are given: the work on that thread, what the engine waits for it, and applying
masks to the laws of a block. All are wall-clock seconds but the first table, which is CPU time of the fastest round.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from constraints import TASKS

import smcdecode as smc
from smcdecode.engine.foresight import Foresight
from smcdecode.potentials.lexicon import Lexicon, lexicon_of
from smcdecode.potentials.llg import Constraint
from smcdecode.potentials.text import Prompt
from smcdecode_kernels import reference

DECLARE: dict[str, Callable[[str], Constraint]] = {
    "regex": smc.Regex,
    "schema": lambda text: smc.JsonSchema(json.loads(text)),
    "grammar": smc.Grammar,
}
Steps = list[list[tuple[int, ...]]]  # per length, the distinct beginnings


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, default=32)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    p = smc.load("demo", dtype=getattr(torch, options.dtype))
    report = {"states": [against_bare(p, task, options) for task in TASKS], "cycle": in_a_cycle(p, options)}
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))


# ---- against bare llguidance


def against_bare(p: Any, task: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of CPU a mask: llguidance alone, and ours."""
    psi = DECLARE[task["kind"]](task["text"])
    method = smc.SMC(smc.Local(), options.particles, threshold=0.0)  # no resampling: texts stay different
    out = smc.sample(p * psi, task["prompt"], method=method, max_tokens=task["max_tokens"], seed=0, progress=False)
    steps = beginnings([[t for t in tokens if t not in p.vocabulary.eos] for tokens in out.tokens])
    lexicon = lexicon_of(p.vocabulary)
    rounds = [(bare(psi, lexicon, steps), ours(psi, p.vocabulary, steps)) for _ in range(options.rounds)]
    alone, own = (min(column) * 1e6 / sum(map(len, steps)) for column in zip(*rounds, strict=True))
    print(
        f"{task['name']:13} {sum(map(len, steps)):5} states: bare {alone:6.1f} µs, ours {own:6.1f} µs; "
        f"over bare {own / alone - 1:+.0%}"
    )
    return {"task": task["name"], "states": sum(map(len, steps)), "bare": alone, "ours": own}


def beginnings(texts: list[list[int]]) -> Steps:
    """The distinct beginnings of some texts, by length."""
    longest = max(map(len, texts))
    return [sorted({tuple(text[:n]) for text in texts if len(text) >= n}) for n in range(longest + 1)]


def bare(psi: Constraint, lexicon: Lexicon, steps: Steps) -> float:
    """CPU seconds of filling packed words at all states."""
    seconds = 0.0
    for texts in steps:
        matchers = [lexicon.matcher(psi.grammar) for _ in texts]
        for matcher, text in zip(matchers, texts, strict=True):
            matcher.try_consume_tokens(list(text))
        words = np.zeros((len(texts), lexicon.words), dtype=np.int32)
        start = time.process_time()
        for i, matcher in enumerate(matchers):
            matcher.unsafe_compute_mask_ptr(words[i].ctypes.data, words[i].nbytes)
        seconds += time.process_time() - start
    return seconds


def ours(psi: Constraint, vocabulary: Any, steps: Steps) -> float:
    """CPU seconds of ``psi.mask`` at all states, nothing remembered from before."""
    root = psi.start(vocabulary, Prompt((0,)))
    known: dict[tuple[int, ...], Any] = {(): root}
    seconds = 0.0
    for texts in steps:
        states = [known.get(text) or psi.advance(known[text[:-1]], text[-1:]) for text in texts]
        known.update(zip(texts, states, strict=True))
        start = time.process_time()
        psi.mask(states)
        seconds += time.process_time() - start
    return seconds


# ---- in a cycle


class Watch:
    """Seconds of mask work on its thread, and seconds that the engine waited for it."""

    def __init__(self) -> None:
        self.work = self.wait = 0.0

    def watched(self, verb: Callable[..., Future[torch.Tensor]]) -> Callable[..., Any]:
        """A verb of Foresight that gives futures which say how long they were waited for."""

        def call(foresight: Foresight, *arguments: Any) -> Any:
            return Waited(verb(foresight, *arguments), self)

        return call

    def timed(self, work: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Something that runs on the thread."""

        def call(*arguments: Any) -> torch.Tensor:
            start = time.perf_counter()
            try:
                return work(*arguments)
            finally:
                self.work += time.perf_counter() - start

        return call


class Waited:
    """A future with a clock."""

    def __init__(self, future: Future[torch.Tensor], watch: Watch) -> None:
        self.future, self.watch = future, watch

    def result(self) -> torch.Tensor:
        """What it promised."""
        start = time.perf_counter()
        mask = self.future.result()
        self.watch.wait += time.perf_counter() - start
        return mask


def in_a_cycle(p: Any, options: argparse.Namespace) -> dict[str, float]:
    """Shares of a cycle that go to masks, for the JSON task."""
    task = next(task for task in TASKS if task["kind"] == "schema")
    target = p * DECLARE["schema"](task["text"])
    method = smc.SMC(smc.Draft(p, options.block, temperature=1.1), options.particles)
    rows = [shares(target, task, method, seed, options) for seed in range(options.rounds)]
    best = sorted(rows, key=lambda row: row["work"])[len(rows) // 2]
    print(
        f"JSON, N = {options.particles}, K = {options.block}: a cycle takes {best['cycle'] * 1e3:.0f} ms; of it mask "
        f"work {best['work']:.1%} on its thread, waited for {best['wait']:.1%}, applying {best['apply']:.1%} (median)"
    )
    return best


def shares(target: Any, task: dict[str, Any], method: smc.SMC, seed: int, options: argparse.Namespace) -> Any:
    """One run with clocks on the masks."""
    watch, plain = Watch(), (Foresight.look, Foresight.step, Foresight._step)

    def look(foresight: Foresight) -> Future[torch.Tensor]:
        return foresight.worker.submit(watch.timed(foresight.twist.masks), foresight.states, foresight.texts)

    Foresight.look, Foresight.step = watch.watched(look), watch.watched(plain[1])  # type: ignore[method-assign]
    Foresight._step = watch.timed(plain[2])  # type: ignore[method-assign]
    try:
        out = smc.sample(
            target, task["prompt"], method=method, max_tokens=task["max_tokens"], seed=seed, progress=False
        )
    finally:
        Foresight.look, Foresight.step, Foresight._step = plain  # type: ignore[method-assign]
    cycle = out.stats.seconds["total"] / out.stats.cycles
    n, V = options.particles, target.as_target().model.vocabulary.size
    applying = options.block * apply(n, V) + apply(n * (options.block + 1), V)
    total = out.stats.seconds["total"]
    return {"cycle": cycle, "work": watch.work / total, "wait": watch.wait / total, "apply": applying / cycle}


def apply(rows: int, V: int, repeats: int = 5) -> float:
    """Seconds to mask some rows of logits."""
    law, words = torch.randn(rows, V), reference.pack_bits(torch.rand(rows, V) < 0.1)
    seconds: Sequence[float] = [_timed(lambda: reference.apply_bitmask(law, words)) for _ in range(repeats)]
    return sorted(seconds)[repeats // 2]


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
