"""How long the next block is and how many particles come next, from a request's own past. Knows counts and weights.

Both are functions of what is behind the cycle they are used in, so every weight stays proper and E[Ẑ] = Z holds
(sections 3 and 4 of the mathematics). Neither reads a clock: one seed gives one answer.
"""

import dataclasses
import math

import torch
from torch import Tensor

__all__ = ["AUTO", "FIRST", "LONGEST", "BlockLengths", "Population", "best_block"]

FIRST, LONGEST = 4, 16  # K of an adaptive block: at first, and at most
_MEMORY = 0.9  # what a cycle's evidence is worth one cycle later
_JUDGED, _REFUSED = 4.0, 0.8  # evidence assumed before there is any: one drafted token in five is refused
_SHARE = 0.5  # effective share of the particles that one block's weights must leave


@dataclasses.dataclass(frozen=True)
class Population:
    """As many particles as leave ``wanted`` effective ones, decided where a lane is resampled.

    Weights of a lane that leave a share ESS/N of its particles effective ask for ``wanted``/share particles. It is
    resampled when the ESS falls below threshold·N, as ever, and also where fewer than half as many would do.

    Attributes:
        first: particles at the beginning.
        least, most: bounds.
        wanted: effective particles.
    """

    first: int
    least: int
    most: int
    wanted: float

    def following(self, ess: Tensor, count: Tensor) -> Tensor:
        """Particles after a resampling at this ESS: (G,) float64, (G,) int64 → (G,) int64."""
        asked = (self.wanted * count.double() / ess.clamp_min(torch.finfo(torch.float64).tiny)).ceil()
        return asked.clamp(self.least, self.most).long()


AUTO = Population(first=8, least=4, most=32, wanted=4.0)


@dataclasses.dataclass
class BlockLengths:
    """What each lane's past says of its draft, and the block length K that follows from it.

    Attributes:
        cost: what one more drafted token adds to a cycle, over the time of a cycle with none: T_q/T_p where reading
            weights is the bound, (7).
        judged, refused: (G,) float64, drafted tokens that were judged, and refused; older ones count less.
        loss, places: (G,) float64, log(N/ESS) of each cycle's incremental weights, and the tokens it was over.
    """

    cost: float
    judged: Tensor
    refused: Tensor
    loss: Tensor
    places: Tensor

    @classmethod
    def start(cls, lanes: int, cost: float) -> "BlockLengths":
        """Nothing is known of any lane."""
        return cls(cost, *(torch.zeros(lanes, dtype=torch.float64) for _ in range(4)))

    def forget(self, lanes: Tensor) -> None:
        """Lanes (n,) begin another request."""
        for past in (self.judged, self.refused, self.loss, self.places):
            past[lanes] = 0.0

    def learn(self, lanes: Tensor, judged: Tensor, refused: Tensor, efficiency: Tensor, places: Tensor) -> Tensor:
        """Take in one cycle of some lanes, all (n,), and say how long their next block is, (n,) int64.

        Args:
            lanes: int64, different ones.
            judged: drafted tokens judged, over all particles.
            refused: those of them that were refused.
            efficiency: ESS over N of the cycle's incremental weights.
            places: tokens the cycle added to a particle, on average.
        """
        fresh = (judged, refused, -efficiency.clamp_min(1e-300).log(), places)
        for past, new in zip((self.judged, self.refused, self.loss, self.places), fresh, strict=True):
            past[lanes] = _MEMORY * past[lanes] + new
        refusal = (self.refused[lanes] + _REFUSED) / (self.judged[lanes] + _JUDGED)
        return best_block(1 - refusal, self.cost, self.loss[lanes] / self.places[lanes].clamp_min(1.0))


def best_block(acceptance: Tensor, cost: float, loss: Tensor) -> Tensor:
    """The K of most tokens a second, among those whose weights leave half the particles effective: (n,) int64.

    A cycle adds 1 + β + … + β^K tokens in time 1 + cost·K, and its weights are worth exp(−loss·(K+1)) of the particles.

    Args:
        acceptance: (n,) float64, β: the chance that a drafted token is kept.
        cost: of one more drafted token, over the time of a cycle with none.
        loss: (n,) float64, of log(N/ESS), a token.
    """
    K = torch.arange(1, LONGEST + 1, dtype=torch.float64)
    tokens = 1 + (acceptance[:, None] ** K).cumsum(-1)  # β < 1 by the assumed evidence
    worth = tokens / (1 + cost * K)
    rough = loss[:, None] * (K + 1) > -math.log(_SHARE)
    rough[:, 0] = False
    return worth.masked_fill(rough, 0.0).argmax(-1) + 1
