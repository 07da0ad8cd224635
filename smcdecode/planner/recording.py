"""How one machine works, recorded: the real scheduler with few and many requests. Knows clocks; no queue."""

import time
from collections import defaultdict
from collections.abc import Sequence

from smcdecode.declare.target import Algebra
from smcdecode.declare.verification import Method
from smcdecode.engine.memory import least_bytes
from smcdecode.engine.prompts import PromptLike
from smcdecode.engine.scheduler import Scheduler
from smcdecode.engine.stats import Stats
from smcdecode.errors import InvalidOption
from smcdecode.planner.capacity import Machine
from smcdecode.sample import requests_of

__all__ = ["record"]


def record(
    target: Algebra, method: Method, prompts: Sequence[PromptLike], *, lanes: int, max_tokens: int = 64,
    memory: float = 0.5, seed: int = 0,
) -> Machine:  # fmt: skip
    """Run 1, 2, 4, … and ``lanes`` requests at once, and note what their cycles take on this machine.

    Args:
        target: as of :func:`smcdecode.sample`.
        method: as there.
        prompts: some of yours, over and over.
        lanes: requests that are to run at once.
        max_tokens: as there.
        memory: as there.
        seed: of the texts.

    Raises:
        InvalidOption: there is no prompt or no lane; and what else :func:`smcdecode.sample` raises before it runs.
    """
    if not prompts or lanes < 1:
        raise InvalidOption(f"recording needs a prompt and lanes ≥ 1; got {len(prompts)} prompts and lanes={lanes}")
    goal = target.as_target()
    widths = sorted({lanes, *(1 << i for i in range(lanes.bit_length()))})
    seconds: dict[int, list[float]] = defaultdict(list)
    stats, tokens, cycles = Stats(), 0, 0
    for width in widths:
        asked = [prompts[i % len(prompts)] for i in range(width)]
        requests = requests_of(goal, asked, method=method, max_tokens=max_tokens, stop=(), seed=seed + width)
        scheduler = Scheduler.of(requests, memory=least_bytes(goal, memory), page_size=1, stats=stats)
        start, read = time.perf_counter(), stats.seconds.get("prefill", 0.0)
        for outcomes in scheduler.run():
            now, so_far = time.perf_counter(), stats.seconds.get("prefill", 0.0)
            running = scheduler.running + len(outcomes)
            seconds[running].append(now - start - (so_far - read))
            tokens += sum(max(map(len, outcome.tokens)) for outcome in outcomes)
            cycles += sum(len(outcome.cycles) for outcome in outcomes)
            start, read = time.perf_counter(), so_far
        scheduler.close()
    reading = stats.seconds.get("prefill", 0.0)  # none where prompts are read along with blocks, as part of a cycle
    return Machine(seconds, reading / stats.prompt_tokens_read, tokens / cycles, lanes)
