"""plan(): measure a pair on your prompts and on this machine, and say which method to take. Ties the room together."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm.auto import tqdm

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft, PromptLookup
from smcdecode.declare.target import Algebra, Model, Target
from smcdecode.engine.memory import least_bytes
from smcdecode.engine.prompts import PromptLike, is_one, read_prompt
from smcdecode.engine.ranks import together
from smcdecode.errors import InvalidOption, SupportError, UnsupportedTarget
from smcdecode.infer.forecast import PassTimes, Positions
from smcdecode.planner.divergence import SAMPLES, measure_divergence, reference_method, split, texts_of, twist_of
from smcdecode.planner.plan import BLOCKS, STRICTNESS, Plan
from smcdecode.planner.timing import PROBES, measure_times
from smcdecode.report.record import describe
from smcdecode.sample import sample

__all__ = ["plan"]

_WIDTHS = (1, 4, 16)  # particles of the timed probes
_TEXT = 64  # tokens of the texts that laws are compared along


def plan(
    target: Algebra,
    draft: Model | Draft,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    max_tokens: int = 128,
    seed: int = 0,
    memory: float = 0.5,
    progress: bool | None = None,
) -> Plan:
    """Measure how fast and how good a target and a draft are together, and recommend settings.

    The target writes four texts a prompt, along which the laws of both models are compared; cycles of the real engine
    are timed at a few widths behind the first prompt. From these every (N, K, s) is predicted: speed by (7) with
    measured times, error by the χ² of a cycle's weights.

    Args:
        target: as for :func:`smcdecode.sample`. Potentials that tell allowed next tokens are taken as they act; others
            (rewards, functions of the text) as one weight at the end of the text, which no proposal can help.
        draft: the draft model, or ``Draft(model, temperature=…, top_k=…, top_p=…)``, whose block and strictness are
            what is planned.
        prompts: some of yours; four to eight are enough.
        max_tokens: length of the texts you will ask for.
        seed: of the texts.
        memory: as for :func:`smcdecode.sample`.
        progress: show a progress bar; None shows it on a terminal when it takes longer than two seconds.

    Raises:
        InvalidOption, PromptError, VocabularyMismatch, OutOfPages: before anything runs.
        UnsupportedTarget: for a greedy target, or one whose potentials no text of the target satisfies.
    """
    spec = draft if isinstance(draft, Draft) else Draft(draft)
    if isinstance(spec.model, PromptLookup):
        raise InvalidOption(
            "plan() compares the laws of two models; prompt lookup has one only where something recurs, and costs no "
            "pass: run it beside the plan's methods on your prompts"
        )
    if spec.network is None:
        raise InvalidOption(
            f"plan() foresees drafts that are language models, whose passes it can time; got {spec.model!r}"
        )
    goal = _goal(target)
    strictness = tuple(_servable(goal, spec))
    listed: list[PromptLike] = [prompts] if is_one(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
    if not isinstance(max_tokens, int) or max_tokens < 2:
        raise InvalidOption(f"max_tokens must be an integer ≥ 2; got {max_tokens!r}")
    asked: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "memory": memory}
    times, divergence, twist = together(
        goal,
        lambda: _measured(goal, spec, strictness, listed, progress=progress, **asked),
        draft=describe(spec),
        prompts=listed,
        **asked,
    )
    return Plan(str(goal), goal.plain, spec, times, divergence, twist, max_tokens)


def _measured(
    goal: Target, spec: Draft, strictness: Sequence[float], prompts: Sequence[PromptLike], *, max_tokens: int,
    seed: int, memory: float, progress: bool | None,
) -> tuple[PassTimes, dict[float, Positions], float]:  # fmt: skip
    """What is known of the pair after trying it: times, laws along texts, χ² of what no proposal sees."""
    read = [read_prompt(prompt, goal.model) for prompt in prompts]  # type: ignore[arg-type]
    base, others = split(goal)
    steps = PROBES * (len(_WIDTHS) + 1) + 2 + SAMPLES * len(read)
    with _bar(steps, progress) as tick:
        method = reference_method(base, bool(others.potentials))
        cap = max_tokens if base.potentials else _TEXT  # a constraint must be met within the cap
        written = sample(base, prompts, method=method, max_tokens=cap, seed=seed, memory=memory, progress=False)
        assert isinstance(written, list)
        tick()
        twist = twist_of(others, read, written)
        divergence = measure_divergence(base, spec, texts_of(read, written), strictness, tick)
        budget = least_bytes(goal, memory)
        times = measure_times(goal, spec, read[0], widths=_WIDTHS, longest=max(BLOCKS), memory=budget, tick=tick)
    return times, divergence, twist


def _goal(target: Any) -> Target:
    if not isinstance(target, Algebra):
        raise InvalidOption(f"the target must be p = smc.load(…) or made of it, like p ** 4 * psi; got {target!r}")
    goal = target.as_target()
    if goal.temperature == 0:
        raise UnsupportedTarget(
            "a greedy target (temperature 0) has one text, and there is nothing to plan: "
            "smc.Speculative(draft) writes it"
        )
    return goal


def _servable(target: Target, draft: Draft) -> Iterator[float]:
    """The strictnesses at which this draft serves this target."""
    for s in STRICTNESS:
        method = SMC(dataclasses.replace(draft, strictness=s))
        if s > 0:
            method.check(target)
            yield s
            continue
        with contextlib.suppress(SupportError):
            method.check(target)
            yield s


@contextlib.contextmanager
def _bar(steps: int, progress: bool | None) -> Iterator[Callable[[], object]]:
    """A bar of so many steps; what it gives makes one."""
    hidden = None if progress is None else not progress
    with tqdm(total=steps, unit="step", delay=2.0 if progress is None else 0.0, disable=hidden, leave=False) as bar:
        yield bar.update
