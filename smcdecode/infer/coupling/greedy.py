"""Greedy drafts, the n − 1 likeliest tokens and one more, and their optimal verifier (Hu et al. 2025).

With A the sure drafts and q~ the law q without A, the last draft x ~ q~ is kept with probability min(1, p/q~), else the
token is drawn from p − min(p, q~), which puts p(A) on the sure drafts. The acceptance

    Σ_A p + Σ_not A min(p, q~)

is the most these drafts allow. For n = 2 the drafts have the law of SpecHub (Sun et al. 2024) up to order.
"""

import dataclasses

from torch import Tensor

from smcdecode.infer.coupling.drafting import TOP_PLUS_ONE, Drafting, marked, without
from smcdecode.infer.coupling.protocol import Branches, Plan, counts_of

__all__ = ["Greedy"]


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The optimal verifier of greedy drafts; exact. Best on peaked laws, poor on flat ones.

    Which drafts were sure is read off the drafts: all alive but the last.
    """

    name: str = "greedy"
    drafting: Drafting = TOP_PLUS_ONE

    def prepare(self, p: Tensor, q: Tensor, n: int | Tensor) -> Plan:
        """See :class:`~smcdecode.infer.coupling.protocol.Coupling`."""
        counts_of(n, p)
        return _Greedy(p, q)


class _Greedy(Plan):
    def __init__(self, p: Tensor, q: Tensor) -> None:
        self.p, self.q = p, q

    def branches(self, drafts: Tensor, alive: Tensor) -> Branches:
        last = alive & (alive.flip(-1).cumsum(-1).flip(-1) == 1)  # (B, N): one slot of each row
        q = without(self.q, marked(self.q, drafts, alive & ~last))
        accept = (self.p.gather(-1, drafts) / q.gather(-1, drafts)).clamp(max=1.0).nan_to_num(nan=0.0)
        return Branches(accept.masked_fill(~last, 0.0), lambda rows: (self.p[rows] - q[rows]).clamp_(min=0.0))
