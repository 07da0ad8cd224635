"""Global Resolution by a slot softmax: the optimal coupling of i.i.d. drafts at any vocabulary size, and exact.

The set H* of least ψ(H) = p(H) − q(H)^n splits the optimal plan in two (Thomas & Pal 2025, theorem 5.1): drafts with a
token outside H* emit one of those, all others emit one of theirs or refuse. Within each part a slot is chosen by a
softmax of weights, one for each group of tokens of almost equal p/q. Two departures from the paper make this scale and
stay exact:

- the softmax runs over slots, not over the set of distinct drafts, so that the mass m_i it puts on every token is an
  integral in one variable (see slot_solver) and no tuple or set of drafts is listed;
- the weights need not be solved exactly, nor for all tokens: a chosen token i is kept with probability
  a_i = min(1, p_i/m_i), and otherwise the token is drawn from the residual p − a m. Its law is then
  a_i m_i + (1 − Σ a m) (p_i − a_i m_i) / Σ (p − a m) = p_i for any weights and any H*.

What approximate weights cost is acceptance, and the plan knows how much: α* − Σ a m.
"""

import dataclasses

import torch
from torch import Tensor

from smcdecode.infer.coupling.drafting import INDEPENDENT, Drafting
from smcdecode.infer.coupling.optimum import smallest_prefix
from smcdecode.infer.coupling.protocol import Branches, Plan, counts_of
from smcdecode.infer.coupling.ratio_groups import Groups, by_ratio, by_token, interpolate, merge
from smcdecode.infer.coupling.slot_solver import System, chosen, scale, solve

__all__ = ["GlobalResolution", "GlobalResolutionPlan"]

_FULL_TOLERANCE = 1e-9
_ITERATIONS = 100
_QUICK_STEP = 0.7


@dataclasses.dataclass(frozen=True)
class GlobalResolution:
    """Optimal coupling of i.i.d. drafts; exact whatever the numbers below, which trade acceptance for time.

    Args:
        coarse: groups on each side of H* on which the weights are solved.
        fine: groups on each side to which they are interpolated, and on which the masses are computed.
        refinements: multiplicative corrections on the fine groups.
        tolerance: mass by which the coarse solution may be off.
        full: up to so many tokens each is its own group, solved to 1e-9.
    """

    coarse: int = 48
    fine: int = 512
    refinements: int = 1
    tolerance: float = 3e-4
    full: int = 64
    name: str = "global resolution"
    drafting: Drafting = INDEPENDENT

    def prepare(self, p: Tensor, q: Tensor, n: int | Tensor) -> "GlobalResolutionPlan":
        """See :class:`~smcdecode.infer.coupling.protocol.Coupling`. The plan also knows its gap to the optimum."""
        counts = counts_of(n, p)
        groups = by_token(p, q) if p.shape[-1] <= self.full else by_ratio(p, q)
        h, psi = smallest_prefix(groups.P, groups.Q, counts)
        inner = (torch.arange(groups.P.shape[-1], device=p.device) < h[:, None]) | (groups.P == 0)
        system = _two_sides(groups, inner, counts)
        b, m = self._fit(system, p.shape[-1])
        return GlobalResolutionPlan(p, q, groups.of_token, inner, _join(b.exp(), inner), _join(m, inner), 1.0 + psi)

    def _fit(self, system: System, V: int) -> tuple[Tensor, Tensor]:
        """Log-weights and masses for each unit of draft mass, (R, F) float64 each; -inf and 0 without a weight."""
        if self.full >= V:
            fine, joined = system, torch.arange(V, device=system.P.device).expand_as(system.P)
            b = solve(system, _FULL_TOLERANCE, _ITERATIONS)
        else:
            fine, joined = merge(system, self.fine)
            quick = dataclasses.replace(fine, step=_QUICK_STEP)  # weights may be off, masses may not
            coarse, _ = merge(quick, self.coarse)
            b = interpolate(coarse, solve(coarse, self.tolerance, _ITERATIONS), fine)
            for _ in range(self.refinements):
                b = scale(fine, b, chosen(quick, b))
        rate = torch.where(fine.active, chosen(fine, b) / fine.Q, 0.0)
        b = b.gather(-1, joined).masked_fill(~system.active, -torch.inf)
        return b, rate.gather(-1, joined).where(system.active, 0.0)


class GlobalResolutionPlan(Plan):
    """A fitted coupling. ``expected`` is the mass on chosen drafts, ``optimum`` an upper bound on what is possible."""

    def __init__(
        self, p: Tensor, q: Tensor, group: Tensor, inner: Tensor, weight: Tensor, rate: Tensor, optimum: Tensor
    ) -> None:
        """Laws and groups of tokens (B, V); for each group (B, F): in H*, weight, chosen mass a unit of draft mass."""
        self.p, self.group, self.inner, self.weight = p, group, inner, weight
        self.m = q * rate.gather(-1, group)  # (B, V) float64
        self.expected: Tensor = torch.minimum(self.m, p).sum(-1)
        self.optimum = optimum  # (B,) float64: 1 + ψ of the best prefix of groups, never below α*

    @property
    def gap(self) -> Tensor:
        """(B,) float64: acceptance lost to groups and unfinished solving, at most; known without a linear program."""
        return self.optimum - self.expected

    def branches(self, drafts: Tensor, alive: Tensor) -> Branches:
        """See :class:`~smcdecode.infer.coupling.protocol.Plan`."""
        group = self.group.gather(-1, drafts)
        outside = alive & ~self.inner.gather(-1, group)
        served = torch.where(outside.any(-1, keepdim=True), outside, alive)
        weight = self.weight.gather(-1, group).where(served, 0.0)
        slack = (~outside.any(-1, keepdim=True)).double()
        slot = weight / (slack + weight.sum(-1, keepdim=True))
        p, m = self.p.gather(-1, drafts), self.m.gather(-1, drafts)
        keep = torch.where(m > p, p / m, 1.0)
        return Branches(slot * keep, lambda rows: (self.p[rows] - self.m[rows]).clamp_(min=0.0))


def _two_sides(groups: Groups, inner: Tensor, n: Tensor) -> System:
    """The outer systems of all positions, then the inner ones, as one batch of 2B."""
    P, Q, unit = groups.P, groups.Q, torch.ones_like(n)
    weightless = inner & (P == 0)
    return System(
        P=torch.cat([P * ~inner, P * inner]),
        Q=torch.cat([Q * ~inner, Q * inner]),
        rest=torch.cat([(Q * inner).sum(-1), (Q * weightless).sum(-1)]),
        n=n.repeat(2),
        slack=torch.cat([0 * unit, unit]),
    )


def _join(sides: Tensor, inner: Tensor) -> Tensor:
    """What holds for each group, from the side it is on: (2B, F) -> (B, F)."""
    outer, inside = sides.chunk(2)
    return torch.where(inner, inside, outer)
