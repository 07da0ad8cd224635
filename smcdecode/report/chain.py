"""An exact answer from repeated runs, and how far it may still be from exact. Knows posteriors; no models."""

import dataclasses
from collections.abc import Sequence

import torch

from smcdecode.engine.drafting import Stream
from smcdecode.errors import NoSurvivors
from smcdecode.infer.pimh import Chain
from smcdecode.report import diagnostics
from smcdecode.report.posterior import Posterior
from smcdecode_kernels import reference

__all__ = ["ExactAnswer", "chain_of"]


@dataclasses.dataclass(frozen=True)
class ExactAnswer:
    """Particle independent Metropolis–Hastings over the runs of one prompt (Andrieu, Doucet & Holenstein 2010).

    Attributes:
        runs: the SMC runs, the first one included: each proposed one drawn answer.
        held: which run the chain held after each run; the last is the answer's.
        acceptance: share of proposed runs the chain moved to.
        remaining_bias: estimated bound on the total variation between the answer's law and the target.
    """

    runs: tuple[Posterior, ...]
    held: tuple[int, ...]
    acceptance: float
    remaining_bias: float

    @property
    def posterior(self) -> Posterior:
        """The run the chain ended in."""
        return self.runs[self.held[-1]]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The answer's ids."""
        return self.posterior.sample(on="tokens")

    @property
    def text(self) -> str:
        """The answer: the text the chain ended in.

        Raises:
            NoSurvivors: every particle of every run died.
            PromptError: the model has no tokenizer.
        """
        return self.posterior.text

    def summary(self) -> str:
        """A short, honest account, a fact a line."""
        return (
            f"{len(self.runs)} runs, {self.acceptance:.0%} of the proposed ones accepted\n"
            f"remaining bias at most about {self.remaining_bias:.2g} in total variation (an estimate from these runs)"
        )


def chain_of(runs: Sequence[Posterior]) -> ExactAnswer:
    """Run the chain over independent runs of one prompt, in order.

    Raises:
        NoSurvivors: every particle of every run died.
    """
    first = runs[0]
    chain: Chain[int] = Chain.start(first.log_z, 0)
    held = [0]
    for i, run in enumerate(runs[1:], 1):
        chain = chain.step(run.log_z, i, _uniform(first.asked.request_seed, i))
        held.append(chain.state)
    if not runs[chain.state].alive:
        raise NoSurvivors(f"no run of {len(runs)} had a survivor. In the first, {diagnostics.epitaph(first)}")
    return ExactAnswer(tuple(runs), tuple(held), chain.acceptance, chain.remaining_bias)


def _uniform(seed: int, i: int) -> float:
    key, count, zero = (torch.tensor(x) for x in (seed, i, 0))
    return float(reference.uniform(key, count, zero, zero, Stream.CHAIN))
