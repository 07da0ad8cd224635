"""K-SEQ of SpecTr: i.i.d. drafts tried in turn, all at the same lowered odds.

With β(γ) = Σ min(p/γ, q), a draft is kept with probability min(1, p/(γ q)); all n are refused with probability
(1 − β)^n, and the token is then drawn from

    p − min(p/γ, q) (1 − (1 − β)^n) / β,

which is nowhere negative from the smallest γ in [1, n] with 1 − (1 − β)^n ≤ γ β on (Sun et al. 2023, algorithm 2).
"""

import dataclasses

import torch
from torch import Tensor

from smcdecode.infer.coupling.drafting import INDEPENDENT, Drafting
from smcdecode.infer.coupling.protocol import Branches, Plan, counts_of, in_turn

__all__ = ["KSeq"]

_HALVINGS = 24  # γ within n 2^-24 of the smallest


@dataclasses.dataclass(frozen=True)
class KSeq:
    """K-SEQ of i.i.d. drafts; exact, and within a factor 1 − 1/e of the best acceptance there is."""

    name: str = "k-seq"
    drafting: Drafting = INDEPENDENT

    def prepare(self, p: Tensor, q: Tensor, n: int | Tensor) -> Plan:
        """See :class:`~smcdecode.infer.coupling.protocol.Coupling`. Some twenty-five passes over the two laws."""
        return _KSeq(p, q, counts_of(n, p))


class _KSeq(Plan):
    def __init__(self, p: Tensor, q: Tensor, n: Tensor) -> None:
        self.p, self.q, self.n = p, q, n
        self.gamma = self._smallest()
        once = self._once(self.gamma)
        self.expected = -torch.expm1(n * torch.log1p(-once.clamp(max=1.0)))
        self.repeats = torch.where(once > 0, self.expected / once, 0.0)

    def _once(self, gamma: Tensor) -> Tensor:
        """β(γ), the probability that one draft is kept."""
        return torch.minimum(self.p / gamma[:, None], self.q).sum(-1)

    def _smallest(self) -> Tensor:
        """The smallest admissible γ from above, by bisection: every γ returned is admissible."""
        low, high = torch.ones_like(self.n), self.n.clone()
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            once = self._once(middle)
            admissible = 1.0 - (1.0 - once).clamp(min=0.0) ** self.n <= middle * once
            low, high = torch.where(admissible, low, middle), torch.where(admissible, middle, high)
        return high

    def branches(self, drafts: Tensor, alive: Tensor) -> Branches:
        ratio = self.p.gather(-1, drafts) / (self.gamma[:, None] * self.q.gather(-1, drafts))
        return Branches(in_turn(ratio.clamp(max=1.0).nan_to_num(nan=0.0), alive), self._residual)

    def _residual(self, rows: Tensor) -> Tensor:
        served = torch.minimum(self.p[rows] / self.gamma[rows, None], self.q[rows])
        return (self.p[rows] - served * self.repeats[rows, None]).clamp_(min=0.0)
