"""Weights of the slot softmax: knows groups of tokens and their masses, not tokens and not drafts.

A system has groups j of draft mass Q_j, target mass P_j and weight w_j = e^{b_j}; n drafts fall on groups
independently, mass q_0 of them on tokens of weight 0, and slot s is chosen with probability
w_{x_s} / (σ + Σ_r w_{x_r}). Then, with 1/X = ∫ e^{−tX} dt and g(t) = q_0 + Σ_j Q_j e^{−t w_j}, group j is chosen
with probability

    m_j = n Q_j ∫ w_j e^{−t(σ + w_j)} g(t)^{n−1} dt,

the gradient of a convex function F of b; where F − P·b is least in a box, m_j = P_j, or m_j ≤ P_j and b_j is at its
upper bound. σ = 0 is the outer system (some draft outside H*), σ = 1 the inner one (all in H*; the slack is refusal).
Integrals are trapezoid sums in ln t, exact to rounding at small steps: the integrands are analytic and vanish at both
ends. No tuple of drafts is ever listed, so n costs nothing and groups cost linearly.

The minimum is found by Newton steps on the groups off their bounds, damped (Levenberg 1944) where a step fails to
descend, all systems of a batch side by side. Any weights whatever give an exact coupling; good ones accept more.
"""

import dataclasses

import torch
from torch import Tensor

__all__ = ["System", "bounds", "chosen", "scale", "solve"]

_SPAN = 56.35  # of ln t, to 22 outside and 4.4 inside: past the last weight of the box
_OUTER = (-34.0, -18.0, 0.0)  # first ln t, lowest b, highest b
_INNER = (-52.0, -80.0, 18.0)
_SCALINGS = 4
_TINY = 1e-300


@dataclasses.dataclass(frozen=True)
class System:
    """R systems of F groups; a group without mass on both sides has weight 0."""

    P: Tensor  # (R, F) float64, target mass
    Q: Tensor  # (R, F) float64, draft mass
    rest: Tensor  # (R,) float64, q_0: draft mass of tokens of weight 0
    n: Tensor  # (R,) float64, drafts
    slack: Tensor  # (R,) float64, σ: 0 outer, 1 inner
    step: float = 0.35  # of ln t; at 0.35 masses are right to 1e-12, at 0.7 to 1e-5

    @property
    def active(self) -> Tensor:
        """(R, F) bool: groups that have a weight."""
        return (self.P > 0) & (self.Q > 0)


@dataclasses.dataclass(frozen=True)
class _Point:
    """A system at weights b: everything a Newton step wants to know."""

    value: Tensor  # (R,), F − P·b
    m: Tensor  # (R, F), its gradient is m − P
    curvature: Tensor  # (R, F); the Hessian is diag(curvature) − factorᵀ factor
    factor: Tensor  # (R, T, F)

    def where(self, mask: Tensor, other: "_Point") -> "_Point":
        """This point in the systems marked (R,) bool, the other elsewhere."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))
        return _Point(*(torch.where(mask.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs))


@dataclasses.dataclass(frozen=True)
class _Quadrature:
    """The integrals at weights b, before any of them is summed up."""

    t: Tensor  # (R, T)
    w: Tensor  # (R, F)
    decay: Tensor  # (R, T, F), e^{−t w}
    g: Tensor  # (R, T)
    fade: Tensor  # (R, T), e^{−σ t}

    @classmethod
    def at(cls, system: System, b: Tensor) -> "_Quadrature":
        steps = torch.arange(int(_SPAN / system.step) + 1, device=b.device, dtype=torch.float64)
        t = (_setting(system.slack, 0) + system.step * steps).exp()
        w = b.exp().where(system.active, 0.0)
        decay = torch.exp(-t[:, :, None] * w[:, None, :])
        g = system.rest[:, None] + (decay @ _live(system)[:, :, None])[:, :, 0]
        return cls(t, w, decay, g, (-system.slack[:, None] * t).exp())

    def kernel(self, system: System) -> Tensor:
        """Weights (R, T) of the nodes in m_j / (Q_j w_j) = Σ kernel · decay_j."""
        n = system.n[:, None]
        return system.step * self.t * n * self.fade * self.g ** (n - 1)


def chosen(system: System, b: Tensor) -> Tensor:
    """Mass m on each group at log-weights b: (R, F) float64 -> (R, F) float64."""
    at = _Quadrature.at(system, b)
    return _live(system) * at.w * (at.kernel(system)[:, None] @ at.decay)[:, 0]


def bounds(system: System) -> tuple[Tensor, Tensor]:
    """Lowest and highest log-weight of each system, (R, 1) float64 each; the quadrature resolves all between."""
    return _setting(system.slack, 1), _setting(system.slack, 2)


def scale(system: System, b: Tensor, m: Tensor) -> Tensor:
    """One multiplicative correction of log-weights b that give masses m: each group by what it lacks."""
    lacks = system.P.clamp_min(_TINY) / m.clamp_min(_TINY)
    return (b + lacks.log()).clamp(*bounds(system)).where(system.active, 0.0)


def solve(system: System, tolerance: float, iterations: int) -> Tensor:
    """Fit log-weights until the masses that can be met are off by ``tolerance`` in all, or steps run out.

    Returns:
        b (R, F) float64; 0 for groups without a weight.
    """
    b = _start(system)
    point, damping = _evaluate(system, b), torch.full_like(system.n, 1e-6)
    for _ in range(iterations):
        slope, held = _slope(system, b, point)
        unsolved = slope.abs().sum(-1) > tolerance
        if not unsolved.any():
            break
        step = _newton(point, slope, held, damping) * unsolved[:, None]
        trial = (b - step).clamp(*bounds(system))
        there = _evaluate(system, trial)
        better = there.value <= point.value + 1e-15
        b, point = torch.where(better[:, None], trial, b), there.where(better, point)
        damping = torch.where(better, (damping / 10).clamp_min(1e-12), damping * 10)
    return b


def _start(system: System) -> Tensor:
    """All weights 1 outside, odds of p and q inside, then a few multiplicative corrections."""
    odds = (system.P.clamp_min(_TINY) / system.Q.clamp_min(_TINY)).log() - 1.0
    b = torch.where(system.slack[:, None] > 0, odds, 0.0).clamp(*bounds(system))
    for _ in range(_SCALINGS):
        b = scale(system, b, chosen(system, b))
    return b


def _evaluate(system: System, b: Tensor) -> _Point:
    at, n, Q = _Quadrature.at(system, b), system.n[:, None], _live(system)
    first = at.kernel(system)
    sums = torch.stack([first, first * at.t], 1) @ at.decay  # (R, 2, F)
    m = Q * at.w * sums[:, 0]
    pairs = system.step * n * (n - 1) * at.fade * at.g.clamp_min(_TINY) ** (n - 2)
    factor = (pairs.sqrt() * at.t)[:, :, None] * (Q * at.w)[:, None, :] * at.decay
    value = _potential(system, at) - (system.P * b).where(system.active, 0.0).sum(-1)
    return _Point(value, m, m - Q * at.w.square() * sums[:, 1], factor)


def _potential(system: System, at: _Quadrature) -> Tensor:
    """F: the mean over drafts of the log of the softmax's denominator, (R,)."""
    n = system.n[:, None]
    rest, total = system.rest[:, None] ** n, (system.rest[:, None] + _live(system).sum(-1, keepdim=True)) ** n
    outer = (total - rest) * (-at.t).exp() + rest - at.g**n
    inner = at.fade * (total - at.g**n)
    return system.step * torch.where(system.slack[:, None] > 0, inner, outer).sum(-1)


def _slope(system: System, b: Tensor, point: _Point) -> tuple[Tensor, Tensor]:
    """The gradient (R, F), and the groups held still (R, F) bool: at a bound it pushes against, or without weight."""
    low, high = bounds(system)
    slope = point.m - system.P
    held = ~system.active | ((b >= high) & (slope < 0)) | ((b <= low) & (slope > 0))
    return slope.masked_fill(held, 0.0), held


def _newton(point: _Point, slope: Tensor, held: Tensor, damping: Tensor) -> Tensor:
    """Damped Newton step of the groups not held, (R, F)."""
    hessian = (-point.factor.mT @ point.factor).masked_fill(held[:, :, None] | held[:, None, :], 0.0)
    diagonal = (point.curvature + damping[:, None] * point.m + _TINY).masked_fill(held, 1.0)
    step: Tensor = torch.linalg.solve(hessian + torch.diag_embed(diagonal), slope)
    return step


def _live(system: System) -> Tensor:
    return system.Q.where(system.active, 0.0)


def _setting(slack: Tensor, k: int) -> Tensor:
    """Number k of the outer or the inner settings for each system, (R, 1) float64."""
    return torch.where(slack > 0, _INNER[k], _OUTER[k])[:, None].double()
