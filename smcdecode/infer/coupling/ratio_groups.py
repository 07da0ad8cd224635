"""Tokens in groups of almost equal p/q: knows two laws, not what is solved on the groups.

The best weight of a token depends on p/q alone and rises with it, so groups by ratio lose little; whatever groups are
made, the coupling built on them is exact. A group's number is read off the bits of the ratio as a float32, whose
exponent and leading digits rise with it: two passes over the vocabulary, no sort.
"""

import dataclasses

import torch
from torch import Tensor

from smcdecode.infer.coupling.optimum import ratio_order
from smcdecode.infer.coupling.slot_solver import System

__all__ = ["Groups", "by_ratio", "by_token", "interpolate", "merge"]

_OCTAVES = 20  # ratios from 2^-20 to 2^20; those beyond join the outermost groups
_DIGITS = 7  # binary digits of the ratio, so groups 0.8% wide
_MANTISSA = 23
_BIAS = 127


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of tokens in the order of rising p/q."""

    P: Tensor  # (B, F) float64, target mass
    Q: Tensor  # (B, F) float64, draft mass
    of_token: Tensor  # (B, V) int64


def by_token(p: Tensor, q: Tensor) -> Groups:
    """Every token its own group: p and q (B, V) float64. One sort."""
    order = ratio_order(p, q)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=p.device).expand_as(order))
    return Groups(p.gather(-1, order), q.gather(-1, order), rank)


def by_ratio(p: Tensor, q: Tensor) -> Groups:
    """Some five thousand groups: first the tokens of p = 0, then by ratio; p and q (B, V) float64.

    Tokens of q = 0 are in the last group, whose ratio is so high that it never lies in H*.
    """
    ratio = torch.where(q > 0, p / q, torch.inf).float().clamp_(2.0**-_OCTAVES, 2.0**_OCTAVES)
    first, size = (_BIAS - _OCTAVES) << _DIGITS, (2 * _OCTAVES << _DIGITS) + 2
    group = (ratio.view(torch.int32) >> (_MANTISSA - _DIGITS)) - (first - 1)
    group = group.masked_fill_(p == 0, 0).long()
    P, Q = (law.new_zeros(len(law), size).scatter_add_(-1, group, law) for law in (p, q))
    return Groups(P, Q, group)


def merge(system: System, size: int) -> tuple[System, Tensor]:
    """Fewer, wider groups, neighbours joined; narrower where the mass is.

    Returns:
        The system of ``size`` groups and, for each group given, the one it went to, (R, F) int64.
    """
    density = torch.minimum(system.P, system.Q).sqrt()
    edge = density.cumsum(-1)
    joined = (edge / edge[:, -1:].clamp_min(1e-300) * size).ceil().long().clamp(1, size) - 1
    P, Q = (
        mass.new_zeros(len(mass), size).scatter_add_(-1, joined, mass.where(system.active, 0.0))
        for mass in (system.P, system.Q)
    )
    return dataclasses.replace(system, P=P, Q=Q), joined


def interpolate(coarse: System, b: Tensor, fine: System) -> Tensor:
    """Log-weights of fine groups from those of coarse ones, straight lines in ln P/Q: (R, K) -> (R, F) float64."""
    order = (~coarse.active).long().argsort(dim=-1, stable=True)  # groups with a weight first, ratios rising
    count = coarse.active.sum(-1, keepdim=True).clamp(min=1)
    x = _log_ratio(coarse).gather(-1, order)
    x = torch.where(torch.arange(x.shape[-1], device=x.device) < count, x, torch.inf)
    y = b.gather(-1, order)
    at = _log_ratio(fine)
    right = torch.searchsorted(x, at).clamp(max=count - 1)
    left = (right - 1).clamp(min=0)
    low, high = x.gather(-1, left), x.gather(-1, right)
    share = ((at - low) / (high - low)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(0.0, 1.0)
    return torch.lerp(y.gather(-1, left), y.gather(-1, right), share)


def _log_ratio(system: System) -> Tensor:
    """Logarithm of P/Q of groups with a weight; 0 for the others."""
    return (system.P / system.Q).log().where(system.active, 0.0)
