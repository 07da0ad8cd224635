"""How many requests so many machines serve, how long these wait, and what it costs. Knows times; no model, no clock.

A machine runs its requests cycle by cycle: those that wait are let in between two cycles while it has lanes, their
prompts are read in the cycle that follows, and a request leaves when it has been through as many cycles as its answer
takes. What a cycle takes depends on how many requests run in it. That is all the simulation knows; where it is a
queue whose delay is known exactly (one lane, one cycle a request: M/G/1, and M/M/c for one line before c machines) the
tests hold it against the formula.
"""

import bisect
import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from smcdecode.errors import InvalidOption
from smcdecode.infer.forecast import Forecast, PassTimes

__all__ = ["Delays", "Kind", "Line", "Machine", "simulate"]

Line = Literal["two", "random", "one"]
"""Where a request goes: the emptier of two machines drawn at random, one drawn at random, or one line for all."""

_WARM = 0.2  # share of the requests, the first ones, that do not count


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of request: tokens of its prompt that are to be read, tokens of its answer, and how often it comes."""

    prompt: int
    tokens: int
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Machine:
    """How one machine works.

    Attributes:
        cycles: seconds of cycles, by the number of requests that run in them, as they were recorded.
        reading: seconds a prompt token.
        tokens_per_cycle: that a cycle adds to an answer.
        lanes: requests that run at once.
    """

    cycles: Mapping[int, Sequence[float]]
    reading: float
    tokens_per_cycle: float
    lanes: int

    def __post_init__(self) -> None:
        if not self.cycles or not all(self.cycles.values()):
            raise InvalidOption("a machine needs seconds of at least one cycle for each number of requests")
        if self.lanes < 1 or self.tokens_per_cycle <= 0 or self.reading < 0:
            raise InvalidOption(
                "a machine has lanes ≥ 1, tokens_per_cycle > 0 and reading ≥ 0; "
                f"got {self.lanes}, {self.tokens_per_cycle} and {self.reading}"
            )
        object.__setattr__(self, "cycles", {width: sorted(self.cycles[width]) for width in sorted(self.cycles)})

    @classmethod
    def planned(cls, times: PassTimes, chosen: Forecast, *, lanes: int, prompt: int) -> "Machine":
        """What a plan foresees: ``Machine.planned(plan.times, plan.choices["balanced"], …)``.

        Args:
            times: of the plan.
            chosen: one of its forecasts.
            lanes: requests that run at once.
            prompt: tokens of the first of the prompts that the plan was made with.
        """
        cycles = {g: [cycle_seconds(times, chosen, g)] for g in range(1, lanes + 1)}
        return cls(cycles, times.prefill / prompt, chosen.tokens_per_cycle, lanes)

    def seconds(self, running: int, u: float = 0.5) -> float:
        """The u-quantile of a cycle's seconds with so many requests, linear between the numbers recorded."""
        widths = list(self.cycles)
        place = bisect.bisect_left(widths, running)
        if place == len(widths) or (place == 0 and running != widths[0]):
            return _quantile(self.cycles[widths[min(place, len(widths) - 1)]], u)
        high = _quantile(self.cycles[widths[place]], u)
        if widths[place] == running:
            return high
        low, a, b = _quantile(self.cycles[widths[place - 1]], u), widths[place - 1], widths[place]
        return low + (high - low) * (running - a) / (b - a)

    def answers_per_second(self, mix: Sequence[Kind]) -> float:
        """Requests of a mix that a machine with all lanes taken serves a second: the load above which queues grow."""
        full = float(np.mean([self.seconds(self.lanes, (i + 0.5) / 64) for i in range(64)]))
        weights = _weights(mix)
        each = [self.reading * kind.prompt + self._count(kind) * full / self.lanes for kind in mix]
        return 1 / float(weights @ np.array(each))

    def tokens_per_second(self, mix: Sequence[Kind]) -> float:
        """Tokens of answers to a mix that it writes a second, with all lanes taken."""
        return self.answers_per_second(mix) * float(_weights(mix) @ np.array([float(kind.tokens) for kind in mix]))

    def cost(self, mix: Sequence[Kind], price: float, load: float = 1.0) -> float:
        """What a million tokens of answers cost.

        Args:
            mix: of requests.
            price: of one machine for an hour, in any currency; the answer is in the same.
            load: share of what the machines could serve that is asked of them.
        """
        return price / 3600 / (load * self.tokens_per_second(mix)) * 1e6

    def _count(self, kind: Kind) -> int:
        return math.ceil(kind.tokens / self.tokens_per_cycle)


@dataclasses.dataclass(frozen=True)
class Delays:
    """What requests went through, in the order of their arrival, those of the beginning left out; (n,) seconds.

    Attributes:
        waits: from arrival to the cycle that it began with.
        totals: from arrival to the end of its last cycle.
    """

    waits: NDArray[np.float64]
    totals: NDArray[np.float64]


def simulate(
    machine: Machine, mix: Sequence[Kind], *, machines: int, rate: float, requests: int = 10_000, line: Line = "two",
    seed: int = 0,
) -> Delays:  # fmt: skip
    """Requests that come at random (a Poisson stream) to so many alike machines.

    Args:
        machine: how each works.
        mix: kinds of requests.
        machines: how many.
        rate: requests a second, all together.
        requests: how many come.
        line: where each goes.
        seed: the same seed, the same delays.

    Raises:
        InvalidOption: a number means nothing.
    """
    if machines < 1 or not rate > 0 or requests < 1:
        raise InvalidOption(f"machines and requests are ≥ 1 and the rate is > 0; got {machines}, {requests} and {rate}")
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests))
    kinds = rng.choice(len(mix), requests, p=_weights(mix))
    run = _Run(machine, mix, kinds.tolist(), arrivals.tolist(), machines, line, rng)
    began, ended = run.all()
    first = int(_WARM * requests)
    return Delays((began - arrivals)[first:], (ended - arrivals)[first:])


class _Run:
    """The events of one simulation: arrivals, and ends of cycles."""

    def __init__(
        self, machine: Machine, mix: Sequence[Kind], kinds: Sequence[int], arrivals: Sequence[float], machines: int,
        line: Line, rng: np.random.Generator,
    ) -> None:  # fmt: skip
        self.machine, self.mix, self.kinds, self.arrivals, self.rng = machine, mix, kinds, arrivals, rng
        shared: deque[int] = deque()
        self.waiting = [shared if line == "one" else deque[int]() for _ in range(machines)]
        self.left: list[dict[int, int]] = [{} for _ in range(machines)]  # request → cycles to go
        self.line = line
        self.idle = set(range(machines))
        self.began, self.ended = np.zeros((2, len(kinds)))
        self.ends: list[tuple[float, int]] = []  # of cycles: when, of which machine

    def all(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """When each request began and ended."""
        for request, now in enumerate(self.arrivals):
            self._until(now)
            place = self._place()
            self.waiting[place].append(request)
            if place in self.idle:
                self._cycle(place, now)
        self._until(math.inf)
        return self.began, self.ended

    def _place(self) -> int:
        machines = len(self.left)
        if self.line == "one":
            return min(self.idle, default=0)
        if self.line == "random" or machines == 1:
            return int(self.rng.integers(machines))
        a, b = self.rng.choice(machines, 2, replace=False).tolist()
        return int(min((a, b), key=lambda m: len(self.left[m]) + len(self.waiting[m])))

    def _until(self, now: float) -> None:
        """Ends of cycles up to now."""
        while self.ends and self.ends[0][0] <= now:
            time, place = heapq.heappop(self.ends)
            running = self.left[place]
            for request in list(running):
                running[request] -= 1
                if not running[request]:
                    del running[request]
                    self.ended[request] = time
            self._cycle(place, time)

    def _cycle(self, place: int, now: float) -> None:
        """Let in what waits, and begin a cycle if there is anything to do."""
        running, seconds = self.left[place], 0.0
        for request in self._let_in(place):
            kind = self.mix[self.kinds[request]]
            running[request] = self.machine._count(kind)
            seconds += self.machine.reading * kind.prompt
            self.began[request] = now
        self.idle.discard(place)
        if not running:
            self.idle.add(place)
            return
        heapq.heappush(self.ends, (now + seconds + self.machine.seconds(len(running), self.rng.random()), place))

    def _let_in(self, place: int) -> Iterator[int]:
        while self.waiting[place] and len(self.left[place]) < self.machine.lanes:
            yield self.waiting[place].popleft()


def cycle_seconds(times: PassTimes, chosen: Forecast, requests: int) -> float:
    """Seconds of a cycle of a plan's setting with so many requests in one batch, no block of them cut short."""
    N, K = requests * chosen.particles, chosen.block
    wide = N * (K + 1)
    judging = times.judging if chosen.block and chosen.strictness > 0 else times.carrying
    seconds = times.target(wide) + judging(wide) + times.cycle(N)
    for k in range(K):
        seconds = seconds + times.draft(2 * N if k == 0 else N) + times.drawing(N)
    return float(seconds)


def _quantile(ordered: Sequence[float], u: float) -> float:
    return ordered[min(int(u * len(ordered)), len(ordered) - 1)]


def _weights(mix: Sequence[Kind]) -> NDArray[np.float64]:
    weights = np.array([kind.weight for kind in mix], dtype=np.float64)
    if not len(weights) or (weights < 0).any() or not weights.sum() > 0:
        raise InvalidOption("a mix is one kind of request or more, of weights ≥ 0 that are not all 0")
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares
