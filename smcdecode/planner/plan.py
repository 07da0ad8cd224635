"""What is expected of every setting of a pair, and which to take: a value to print, to plot, to decode with."""

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from smcdecode.declare.method import SMC, Autoregressive
from smcdecode.declare.proposal import Draft, Local
from smcdecode.declare.verification import Method, Speculative
from smcdecode.errors import InvalidOption
from smcdecode.infer.forecast import Forecast, PassTimes, Positions, forecast, marginal_cost, recommend
from smcdecode.planner import show

__all__ = ["BLOCKS", "LEVELS", "NUMBERS", "STRICTNESS", "Plan"]

NUMBERS = (1, 2, 4, 8, 16, 32)  # N
BLOCKS = (1, 2, 3, 4, 5, 6, 8)  # K
STRICTNESS = (0.0, 0.1, 0.2, 0.5, 1.0)  # s
LEVELS = {"fast": 0.8, "balanced": 0.4, "careful": 0.1}
"""How far from the target one drawn text may be, in total variation, at each level."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Measured times and divergences of a target and a draft, and the settings they speak for.

    ``fast``, ``balanced`` and ``careful`` are methods, ready for ``smc.sample(target, prompt, method=plan.balanced)``:
    the fastest whose drawn text has a law within 0.8, 0.4 or 0.1 of the target in total variation, as predicted by
    section 6 of the mathematics. Predictions are for one prompt at a time, on this machine, idle as it was.

    Attributes:
        target: as mathematics.
        plain: whether the target is p itself, so that lossless decoders serve it.
        draft: with its temperature and truncation.
        times: what the parts of a cycle take.
        divergence: draft against target by strictness.
        twist: χ² of the potentials without masks.
        max_tokens: length of the texts that are planned for.
    """

    target: str
    plain: bool
    draft: Draft
    times: PassTimes
    divergence: dict[float, Positions]
    twist: float
    max_tokens: int

    def forecast(self, particles: int, block: int, strictness: float = 1.0) -> Forecast:
        """What one setting is expected to do; block 0 is the target without a draft.

        Args:
            particles: N, any.
            block: K, any below the length of the texts that were measured on.
            strictness: s, one of those that were measured.

        Raises:
            InvalidOption: the texts that were measured on are shorter than the block.
        """
        if block >= self.longest:
            raise InvalidOption(
                f"blocks of {block} cannot be foreseen from texts of at most {self.longest} tokens: plan with prompts "
                "that have longer answers"
            )
        return forecast(
            self.times, self.divergence[strictness], particles=particles, block=block, strictness=strictness,
            tokens=self.max_tokens, twist=self.twist,
        )  # fmt: skip

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest text that was measured on."""
        return next(iter(self.divergence.values())).longest

    @cached_property
    def forecasts(self) -> tuple[Forecast, ...]:
        """Every setting worth a thought: (N, K, s) over a grid, and the target without a draft."""
        return tuple(
            self.forecast(N, K, s)
            for K in (0, *BLOCKS)
            for s in (self.divergence if K else (1.0,))
            for N in NUMBERS
            if self.longest > K and (N == 1 or not self.plain or (K > 0 and s < 1))  # alike particles are no gain
        )

    @cached_property
    def choices(self) -> dict[str, Forecast]:
        """The forecast behind each recommended method, by level."""
        return {level: recommend(list(self.forecasts), distance) for level, distance in LEVELS.items()}

    @property
    def alone(self) -> Forecast:
        """One particle of the target without a draft."""
        return next(f for f in self.forecasts if f.block == 0)

    def method(self, chosen: Forecast) -> Method:
        """A forecast's setting as a method."""
        if chosen.block == 0:
            return Autoregressive() if self.plain else SMC(Local(), chosen.particles)
        draft = dataclasses.replace(self.draft, block=chosen.block, strictness=chosen.strictness, cost=None)
        if self.plain and chosen.particles == 1 and chosen.strictness == 1:
            return Speculative(
                draft.model, chosen.block, temperature=draft.temperature, top_k=draft.top_k, top_p=draft.top_p
            )
        return SMC(draft, chosen.particles)

    @property
    def fast(self) -> Method:
        """The fastest method within 0.8 of the target."""
        return self.method(self.choices["fast"])

    @property
    def balanced(self) -> Method:
        """The fastest method within 0.4 of the target."""
        return self.method(self.choices["balanced"])

    @property
    def careful(self) -> Method:
        """The fastest method within 0.1 of the target."""
        return self.method(self.choices["careful"])

    @property
    def cost(self) -> float:
        """What one more drafted token adds to a cycle of 8 particles, over a cycle with none: ``Draft(cost=…)``."""
        return marginal_cost(self.times, 8)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """Where one lossless chain, or no draft at all, is the better buy; and what cannot be had."""
        return tuple(self._verdicts())

    def _verdicts(self) -> Iterator[str]:
        for level, chosen in self.choices.items():
            if chosen.distance > LEVELS[level]:
                yield (
                    f"{level}: no setting comes within {LEVELS[level]:g} of the target; this one comes nearest, "
                    f"{chosen.distance:.2f}. More particles than {max(NUMBERS)}, or a nearer draft, would come nearer."
                )
        where = [level for level, chosen in self.choices.items() if chosen.block == 0]
        if where:
            yield f"{', '.join(where)}: no draft is the better buy; drafting is no faster at this quality."
        where = [level for level, f in self.choices.items() if f.block and f.particles == 1 and f.exact]
        if where:
            yield f"{', '.join(where)}: one lossless chain is the better buy; more particles cost more than they give."

    def summary(self) -> str:
        """The recommendations as a table, and what is to be said about them."""
        return show.table(self)

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return show.page(self)

    def plot(self) -> Any:
        """The frontier of speed and distance, as a matplotlib figure; needs the extra ``plot``."""
        return show.figure(self)
