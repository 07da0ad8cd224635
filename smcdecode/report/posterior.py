"""The weighted particles of one prompt. Knows texts and weights; no models, no pages."""

import dataclasses

from torch import Tensor

from smcdecode.engine.scheduler import Cycle, Outcome
from smcdecode.engine.stats import Stats

__all__ = ["Posterior"]


@dataclasses.dataclass(frozen=True)
class Posterior:
    outcome: Outcome
    stats: Stats
    seed: int

    @property
    def log_z(self) -> float:
        return self.outcome.log_z

    @property
    def tokens(self) -> list[list[int]]:
        return self.outcome.tokens

    @property
    def weights(self) -> Tensor:
        from smcdecode.infer.weights import normalise

        return normalise(self.outcome.log_w)

    @property
    def steps(self) -> list[Cycle]:
        return self.outcome.cycles
