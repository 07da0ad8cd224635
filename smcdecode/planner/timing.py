"""How long the parts of a cycle take on this machine: the real engine, run at a few widths. Knows clocks."""

import contextlib
import copy
import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft, Local
from smcdecode.declare.target import Target
from smcdecode.engine.request import Request, seeds
from smcdecode.engine.scheduler import Scheduler
from smcdecode.engine.stats import Stats
from smcdecode.errors import InvalidOption
from smcdecode.infer.forecast import Curve, PassTimes
from smcdecode.potentials.potential import Prompt

__all__ = ["PROBES", "measure_times"]

_BLOCK = 3  # K of most probes: a target pass is then four times as wide as a draft pass
_CYCLES = 5  # timed, behind two that are not
_LEAST_SECONDS = 0.4  # short cycles are repeated for at least so long
_MOST_CYCLES = 40

PROBES = 2  # strictnesses that are timed: none, and some


def measure_times(
    target: Target, draft: Draft, prompt: Prompt, *, widths: Sequence[int], longest: int, memory: int,
    tick: Callable[[], object],
) -> PassTimes:  # fmt: skip
    """Run a few cycles of the real engine at each of some numbers of particles, and take medians.

    Args:
        target: with its potentials, whose masks take their time too.
        draft: whose model, temperature and truncation are used.
        prompt: what the cycles continue.
        widths: numbers of particles, ascending.
        longest: the longest block that will be asked about.
        memory: bytes for keys, values and logits.
        tick: called after each probe, ``PROBES · (len(widths) + 1) + 1`` times.

    Raises:
        InvalidOption: the target's texts end before anything can be timed.
    """
    endless = target if target.potentials else dataclasses.replace(target, model=without_eos(target.model))
    log = _Log(endless, prompt, memory)
    log.probe(SMC(Local(), 1), 2 * _CYCLES)
    tick()
    for strictness in (0.0, 0.5):
        strict = dataclasses.replace(draft, strictness=max(strictness, 0.5 if draft.truncated else 0.0))
        for N in widths:
            log.probe(SMC(dataclasses.replace(strict, block=_BLOCK), N), _CYCLES)
            tick()
        log.probe(SMC(dataclasses.replace(strict, block=longest), widths[-1]), 2)  # the widest target pass
        tick()
    return log.times()


def without_eos(model: Any) -> Any:
    """The same model with no token that ends a text, so that every probe has all its particles."""
    endless = copy.copy(model)
    endless.vocabulary = dataclasses.replace(model.vocabulary, eos=frozenset())
    return endless


class _Log:
    """Seconds by part and width, from all probes."""

    def __init__(self, target: Target, prompt: Prompt, memory: int) -> None:
        self.target, self.prompt, self.memory = target, prompt, memory
        self.seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    def probe(self, method: SMC, cycles: int) -> None:
        """Time the cycles of one run, but for its first two."""
        K = method.proposal.longest if isinstance(method.proposal, Draft) else 0
        room = self.target.model.context
        most = min(_MOST_CYCLES, (4096 if room is None else room - len(self.prompt.tokens)) // (K + 1) - 2)
        [seed] = seeds(0, [self.prompt])
        request = Request(0, self.prompt, self.target, method, seed, 2 + (K + 1) * max(2, most))
        stats = Stats()
        scheduler = Scheduler.of([request], memory=self.memory, page_size=1, stats=stats)
        scheduler.recorded = False  # a recorded cycle has no parts to be timed
        watch = _Watch(stats)
        strict = isinstance(method.proposal, Draft) and method.proposal.strict
        begun = time.perf_counter()
        with contextlib.closing(scheduler), contextlib.closing(watch.cycles(scheduler)) as timed:
            for done, parts in enumerate(timed):
                if done == 0:
                    self.seconds["prefill"][0].append(parts.prefill)
                    begun = time.perf_counter()
                elif done > 1 or K == 0:
                    self._enter(parts, "judging" if strict else "carrying")
                if done - 1 >= cycles and (time.perf_counter() - begun > _LEAST_SECONDS or done >= most):
                    break

    def _enter(self, parts: "_Parts", judging: str) -> None:
        for model, passes in (("target", parts.target), ("draft", parts.draft)):
            for width, seconds in passes:
                self.seconds[model][width].append(seconds)
        n, positions = parts.particles, parts.target[-1][0] if parts.target else 0
        if parts.draft:
            self.seconds["drawing"][n].append(parts.drawing / len(parts.draft))
        if positions:
            self.seconds[judging][positions].append(parts.judging)
        self.seconds["cycle"][n].append(parts.rest)

    def times(self) -> PassTimes:
        """Medians, as curves."""
        if not self.seconds["judging"] or not self.seconds["carrying"]:
            raise InvalidOption(
                f"texts of {self.target} end within a block or two behind the first prompt, so there is nothing to "
                "time: give plan() prompts with longer answers"
            )
        curves = {name: curve(self.seconds[name]) for name in ("target", "draft", "drawing", "carrying", "judging")}
        prefill = statistics.median(self.seconds["prefill"][0])
        return PassTimes(**curves, cycle=curve(self.seconds["cycle"]), prefill=prefill)


def curve(samples: Mapping[int, Sequence[float]]) -> Curve:
    """Medians by width; widths seen once or twice only are left out where others were seen more often."""
    often = {width: values for width, values in samples.items() if len(values) > 2} or samples
    widths = sorted(often)
    return Curve(tuple(map(float, widths)), tuple(statistics.median(often[width]) for width in widths))


@dataclasses.dataclass
class _Parts:
    """One cycle taken apart; seconds."""

    target: list[tuple[int, float]]  # passes: positions, seconds
    draft: list[tuple[int, float]]
    particles: int  # that wrote
    prefill: float
    drawing: float  # of drafting, besides passes
    judging: float  # of scoring, besides the pass
    rest: float


class _Watch:
    """Times the passes of an engine behind its first cycle; what is left of each phase is overhead."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        self.made: dict[str, list[tuple[int, float]]] = {"target": [], "draft": []}

    def _attach(self, passes: Any) -> None:
        for name in self.made:
            setattr(passes, name, self._timed(name, getattr(passes, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(tokens: Any, *rest: Any) -> Any:
            start = time.perf_counter()
            result = call(tokens, *rest)
            if result.is_cuda:
                torch.cuda.synchronize(result.device)
            self.made[name].append((len(tokens), time.perf_counter() - start))
            return result

        return timed

    def cycles(self, scheduler: Scheduler) -> Generator[_Parts, None, None]:
        """Run it, a cycle at a time."""
        before, start = dict(self.stats.seconds), time.perf_counter()
        for done, _ in enumerate(scheduler.run()):
            now = time.perf_counter()
            after = dict(self.stats.seconds)
            spent = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in ("prefill", "draft", "score")}
            made = {name: passes.copy() for name, passes in self.made.items()}
            yield _parts(spent, made, now - start)
            if done == 0 and scheduler.groups:
                self._attach(scheduler.groups[0].passes)
            for passes in self.made.values():
                passes.clear()
            before, start = dict(self.stats.seconds), time.perf_counter()


def _parts(spent: Mapping[str, float], made: Mapping[str, list[tuple[int, float]]], total: float) -> _Parts:
    target, draft = made["target"], made["draft"]
    if spent["prefill"]:  # its passes are not a block's
        target, draft = [], []
    drawing = spent["draft"] - sum(seconds for _, seconds in draft) if draft else 0.0
    rest = total - spent["prefill"] - spent["score"] - (spent["draft"] if draft else 0.0)
    judging = spent["score"] - sum(seconds for _, seconds in target)
    particles = draft[-1][0] if draft else target[-1][0] if target else 0
    return _Parts(target, draft, particles, spent["prefill"], drawing, judging, rest)
