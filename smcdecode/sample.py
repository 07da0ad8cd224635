"""The one way in: declare → infer → run → report."""

import dataclasses
import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, overload

from tqdm.auto import tqdm

from smcdecode.declare.method import SMC, Autoregressive
from smcdecode.declare.proposal import Draft
from smcdecode.declare.target import Algebra, Target
from smcdecode.declare.verification import Method
from smcdecode.engine.memory import least_bytes
from smcdecode.engine.prompts import PromptLike, is_one, read_prompt
from smcdecode.engine.ranks import together
from smcdecode.engine.request import Request, seeds
from smcdecode.engine.scheduler import Outcome, Scheduler
from smcdecode.engine.stats import Stats
from smcdecode.errors import InvalidOption, PromptError
from smcdecode.potentials.potential import Prompt
from smcdecode.potentials.stops import Stops
from smcdecode.report.posterior import Posterior
from smcdecode.report.record import describe

__all__ = ["Call", "requests_of", "sample"]


@overload
def sample(  # type: ignore[overload-overlap]  # a string is one prompt, though a sequence of strings too
    target: Algebra,
    prompts: PromptLike,
    *,
    method: Method | None = None,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    memory: float = 0.5,
    page_size: int = 1,
    progress: bool | None = None,
) -> Posterior: ...
@overload
def sample(
    target: Algebra,
    prompts: Sequence[PromptLike],
    *,
    method: Method | None = None,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    memory: float = 0.5,
    page_size: int = 1,
    progress: bool | None = None,
) -> list[Posterior]: ...
def sample(
    target: Algebra,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    method: Method | None = None,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    memory: float = 0.5,
    page_size: int = 1,
    progress: bool | None = None,
) -> Posterior | list[Posterior]:
    """Sample continuations of one prompt or many from a target.

    Args:
        target: a model from :func:`smcdecode.load`, or the algebra on it: ``p ** 4 * psi``.
        prompts: a string, a list of chat messages, or a list of token ids; or a list of those.
        method: how to sample; ``Autoregressive()`` by default for a plain target, ``SMC()`` for any other.
        max_tokens: the cap: the target is p over sequences cut at this many tokens.
        stop: strings that end a text like an EOS: the target is p over sequences cut behind the first token that
            completes one, wherever in tokens it begins and ends. A posterior's ``tokens``, and what potentials read,
            have it; its texts end before it.
        seed: the same seed gives the same answer, whatever else is in the batch; None draws one (``asked.seed`` of it).
        memory: for keys, values and logits: a fraction of the free memory where the target lies, or bytes if above 1.
        page_size: tokens a page of keys and values. 1 never copies anything on resampling.
        progress: show a progress bar; None shows it on a terminal when a run takes longer than two seconds.

    Returns:
        A :class:`Posterior`, or a list of them in the order of the prompts.

    Raises:
        InvalidOption, PromptError, SupportError, UnsupportedTarget, VocabularyMismatch, OutOfPages: before anything
            runs, when the request cannot be served; each names the remedy.
        InvalidWeight, PotentialError: when a model or a potential breaks its contract during the run.
    """
    one = is_one(prompts)
    asked: list[PromptLike] = [prompts] if one else list(prompts)  # type: ignore[list-item, arg-type]
    options: dict[str, Any] = {
        "max_tokens": max_tokens, "stop": stop, "seed": seed, "memory": memory, "page_size": page_size,
    }  # fmt: skip

    def run() -> list[Posterior]:
        call = Call.of(target, asked, method=method, **options)
        with closing(call.scheduler), _bar(call.requests, progress) as bar:
            outcomes = {outcome.request.index: outcome for outcome in _watched(call.scheduler, bar)}
        return [call.posterior(outcomes[i]) for i in range(len(call.requests))]

    posteriors = together(target, run, method=describe(method), prompts=asked, **options)
    return posteriors[0] if one else posteriors


@dataclasses.dataclass(frozen=True)
class Call:
    """What was asked, checked and ready to run: nothing has run yet, and what cannot be served was refused."""

    goal: Target
    method: Method
    requests: list[Request]
    scheduler: Scheduler
    stats: Stats
    seed: int

    @classmethod
    def of(
        cls, target: Algebra, prompts: Sequence[PromptLike], *, method: Method | None, max_tokens: int,
        stop: str | Sequence[str], seed: int | None, memory: float, page_size: int,
    ) -> "Call":  # fmt: skip
        """Check the arguments of :func:`sample`, prompts as a list, and set up their run."""
        goal = _goal(target)
        method = _method(method, goal)
        _check_numbers(max_tokens, page_size, seed)
        seed = secrets.randbits(63) if seed is None else seed
        requests = requests_of(goal, prompts, method=method, max_tokens=max_tokens, stop=stop, seed=seed)
        stats = Stats()
        scheduler = Scheduler.of(requests, memory=least_bytes(goal, memory), page_size=page_size, stats=stats)
        return cls(goal, method, requests, scheduler, stats, seed)

    def posterior(self, outcome: Outcome) -> Posterior:
        """What a request that is done left behind."""
        return Posterior.of(outcome, self.goal, self.method, self.stats, self.seed)


def requests_of(
    target: Target, prompts: Sequence[PromptLike], *, method: Method, max_tokens: int, stop: str | Sequence[str],
    seed: int,
) -> list[Request]:  # fmt: skip
    """What :func:`sample` runs for these arguments, one request a prompt, after all checks that need no memory.

    Raises:
        PromptError, SupportError, UnsupportedTarget, VocabularyMismatch, InvalidOption: see :func:`sample`.
    """
    method.check(target)
    read = [read_prompt(prompt, target.model) for prompt in prompts]  # type: ignore[arg-type]
    for prompt in read:
        _check_context(prompt, target, method if isinstance(method, SMC) else method.as_smc(), max_tokens)
    stops = Stops.of(stop, target.model.vocabulary)
    return [
        Request(i, prompt, target, method, key, max_tokens, stops)
        for i, (prompt, key) in enumerate(zip(read, seeds(seed, read), strict=True))
    ]


def _bar(requests: Sequence[Request], progress: bool | None) -> "tqdm[Any]":
    """A bar in tokens, one particle a request; on demand, or on a terminal once a run has taken two seconds."""
    total = sum(request.max_tokens for request in requests)
    hidden = None if progress is None else not progress
    return tqdm(total=total, unit="tok", delay=2.0 if progress is None else 0.0, disable=hidden, leave=False)


def _watched(scheduler: Scheduler, bar: "tqdm[Any]") -> Iterator[Outcome]:
    """Outcomes as requests finish, while the bar shows the tokens of longest particles and the lowest ESS."""
    written, total = 0, bar.total or 0
    for outcomes in scheduler.run():
        yield from outcomes
        if bar.disable:
            continue
        for outcome in outcomes:
            longest = max(map(len, outcome.tokens))
            written += longest
            total -= outcome.request.max_tokens - longest
        bar.total, running = total, scheduler.latest()
        if running:
            bar.set_postfix({"ESS": f"{min(cycle.ess for cycle in running):.1f}"}, refresh=False)
        bar.update(written + sum(cycle.tokens for cycle in running) - bar.n)


def _goal(target: Any) -> Target:
    if not isinstance(target, Algebra):
        raise InvalidOption(f"the target must be p = smc.load(…) or made of it, like p ** 4 * psi; got {target!r}")
    return target.as_target()


def _method(method: Any, goal: Target) -> Method:
    if method is None:
        return Autoregressive() if goal.plain else SMC()
    if not isinstance(method, Method):
        raise InvalidOption(
            f"method must be smc.SMC(…), smc.Autoregressive(…), smc.Speculative(…), smc.MultiDraft(…) or "
            f"smc.Saguaro(…); got {method!r}"
        )
    return method


def _check_numbers(max_tokens: int, page_size: int, seed: int | None) -> None:
    for name, value in (("max_tokens", max_tokens), ("page_size", page_size)):
        if not isinstance(value, int) or value < 1:
            raise InvalidOption(f"{name} must be an integer ≥ 1; got {value!r}")
    if seed is not None and not isinstance(seed, int):
        raise InvalidOption(f"seed must be an integer or None; got {seed!r}")


def _check_context(prompt: Prompt, target: Target, method: SMC, max_tokens: int) -> None:
    draft = method.proposal.network if isinstance(method.proposal, Draft) else None
    for model in (target.model, draft) if draft else (target.model,):
        total = len(prompt.tokens) + max_tokens
        if model.context is not None and total > model.context:
            raise PromptError(
                f"{len(prompt.tokens)} prompt tokens and max_tokens={max_tokens} make {total}, more than the "
                f"{model.context} positions of {model.name}: shorten the prompt or lower max_tokens"
            )
