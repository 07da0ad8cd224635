"""Exact answers for any target: SMC runs as proposals of a Metropolis–Hastings chain. Ties sample() to the chain."""

from collections.abc import Sequence

from smcdecode.declare.method import SMC
from smcdecode.declare.target import Algebra
from smcdecode.declare.verification import Method
from smcdecode.engine.prompts import PromptLike, is_one
from smcdecode.errors import InvalidOption, PromptError
from smcdecode.report.chain import ExactAnswer, chain_of
from smcdecode.sample import sample

__all__ = ["exact"]


def exact(
    target: Algebra,
    prompt: PromptLike,
    *,
    method: Method | None = None,
    sweeps: int = 16,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    memory: float = 0.5,
    progress: bool | None = None,
) -> ExactAnswer:
    """Sample one prompt from a target, exactly in the limit of many sweeps, whatever its potentials.

    ``sweeps`` independent SMC runs follow a first one; the chain moves to a run with probability min(1, Ẑ'/Ẑ), so that
    its stationary law is the target for every N, proposal and resampling. Only Ẑ is needed: power, reward and grammar
    targets are covered, which no rejection verifier can express.

    Args:
        target: as for :func:`smcdecode.sample`.
        prompt: one prompt.
        method: the SMC method whose runs are proposed; more particles make the chain move more often.
        sweeps: runs after the first.
        max_tokens: as for :func:`smcdecode.sample`.
        stop: as for :func:`smcdecode.sample`.
        seed: as for :func:`smcdecode.sample`.
        memory: as for :func:`smcdecode.sample`.
        progress: as for :func:`smcdecode.sample`.

    Raises:
        NoSurvivors: every particle of every run died.
        InvalidOption, PromptError: and what :func:`smcdecode.sample` raises.
    """
    if not isinstance(sweeps, int) or sweeps < 1:
        raise InvalidOption(f"sweeps must be an integer ≥ 1; got {sweeps!r}")
    if not is_one(prompt):
        raise PromptError("exact() takes one prompt: call it once for each")
    method = SMC() if method is None else method
    runs = sample(
        target,
        [prompt] * (sweeps + 1),
        method=method,
        max_tokens=max_tokens,
        stop=stop,
        seed=seed,
        memory=memory,
        progress=progress,
    )
    return chain_of(runs)
