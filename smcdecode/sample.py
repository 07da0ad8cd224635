"""The one way in: declare → infer → run → report."""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, overload

from tqdm.auto import tqdm

from smcdecode.declare.method import SMC, Autoregressive, Method
from smcdecode.declare.target import Algebra, Target
from smcdecode.engine.memory import bytes_of
from smcdecode.engine.prompts import PromptLike, is_one, read_prompt
from smcdecode.engine.request import Request, seeds
from smcdecode.engine.scheduler import Outcome, Scheduler
from smcdecode.engine.stats import Stats
from smcdecode.errors import InvalidOption, PromptError
from smcdecode.potentials.potential import Prompt
from smcdecode.report.posterior import Posterior

__all__ = ["sample"]


def sample(
    target: Algebra,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    method: Method | None = None,
    max_tokens: int = 256,
    seed: int | None = None,
    memory: float = 0.5,
    page_size: int = 1,
    progress: bool | None = None,
) -> Any:
    """Sample continuations of one prompt or many from a target.

    Args:
        target: a model from :func:`smcdecode.load`, or the algebra on it: ``p ** 4 * psi``.
        prompts: a string, a list of chat messages, or a list of token ids; or a list of those.
        method: how to sample; ``Autoregressive()`` by default for a plain target, ``SMC()`` for any other.
        max_tokens: the cap: the target is p over sequences cut at this many tokens.
        seed: the same seed gives the same answer, whatever else is in the batch; None draws one (``posterior.seed``).
        memory: for keys, values and logits: a fraction of the available memory, or bytes if above 1.
        page_size: tokens a page of keys and values. 1 never copies anything on resampling.
        progress: show a progress bar; None shows it on a terminal when a run takes longer than two seconds.

    Returns:
        A :class:`Posterior`, or a list of them in the order of the prompts.

    Raises:
        InvalidOption, PromptError, SupportError, UnsupportedTarget, VocabularyMismatch, OutOfPages: before anything
            runs, when the request cannot be served; each names the remedy.
        InvalidWeight, PotentialError: when a model or a potential breaks its contract during the run.
    """
    goal = target.as_target()
    method = method or (Autoregressive() if goal.plain else SMC())
    _check_numbers(max_tokens, page_size, seed)
    method.check(goal)
    one = is_one(prompts)
    read = [read_prompt(prompt, goal.model) for prompt in ([prompts] if one else prompts)]  # type: ignore[arg-type, list-item]
    smc = method if isinstance(method, SMC) else method.as_smc()
    for prompt in read:
        _check_context(prompt, goal, smc, max_tokens)
    seed = secrets.randbits(63) if seed is None else seed
    requests = [Request(i, p, s, max_tokens) for i, (p, s) in enumerate(zip(read, seeds(seed, read), strict=True))]
    stats = Stats()
    scheduler = Scheduler(goal, smc, requests, memory=bytes_of(memory), page_size=page_size, stats=stats)
    outcomes = {outcome.request.index: outcome for outcome in scheduler.run()}
    posteriors = [Posterior(outcomes[i], stats, seed) for i in range(len(requests))]
    return posteriors[0] if one else posteriors


def _check_numbers(max_tokens: int, page_size: int, seed: int | None) -> None:
    for name, value in (("max_tokens", max_tokens), ("page_size", page_size)):
        if not isinstance(value, int) or value < 1:
            raise InvalidOption(f"{name} must be an integer ≥ 1; got {value!r}")
    if seed is not None and not isinstance(seed, int):
        raise InvalidOption(f"seed must be an integer or None; got {seed!r}")


def _check_context(prompt: Prompt, target: Target, method: SMC, max_tokens: int) -> None:
    models = [target.model, *([method.proposal.model] if hasattr(method.proposal, "model") else [])]
    for model in models:
        total = len(prompt.tokens) + max_tokens
        if model.context is not None and total > model.context:
            raise PromptError(
                f"{len(prompt.tokens)} prompt tokens and max_tokens={max_tokens} make {total}, more than the "
                f"{model.context} positions of {model.name}: shorten the prompt or lower max_tokens"
            )
