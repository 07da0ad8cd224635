"""Sums of log-weights: knows groups of particles (G, N), not where their weights come from.

All take float64 log-weights with the particles last. -inf is the weight of a dead particle, a value like any other;
NaN (and +inf, which has no ratio) comes out as NaN, for the caller to name its culprit.
"""

import math

import torch
from torch import Tensor

__all__ = ["chi2_plus_one", "ess", "log_mean_exp", "log_sum_exp", "normalise"]

_LOWEST = torch.finfo(torch.float64).min
_TINY = torch.finfo(torch.float64).tiny


def _over_largest(log_w: Tensor) -> Tensor:
    """Weights over their group's largest, which is exactly 1; all 0 in a group that is dead."""
    return (log_w - log_w.amax(-1, keepdim=True).clamp_min(_LOWEST)).exp()


def log_sum_exp(log_w: Tensor) -> Tensor:
    """Log of the sum of weights of each group: (G, N) -> (G,); -inf where all are dead."""
    return torch.logsumexp(log_w, -1)


def log_mean_exp(log_w: Tensor) -> Tensor:
    """Log of the mean weight of each group: (G, N) -> (G,). The term one resampling adds to log Ẑ."""
    return torch.logsumexp(log_w, -1) - math.log(log_w.shape[-1])


def normalise(log_w: Tensor) -> Tensor:
    """Weights W that sum to 1 in each group: (G, N) -> (G, N); all 0 where all are dead."""
    w = _over_largest(log_w)
    return w / w.sum(-1, keepdim=True).clamp_min(_TINY)


def ess(log_w: Tensor) -> Tensor:
    """Effective sample size (Σw)² / Σw², in [1, N]: (G, N) -> (G,); 0 where all are dead (Kong et al. 1994)."""
    w = _over_largest(log_w)
    return w.sum(-1).square() / w.square().sum(-1).clamp_min(_TINY)


def chi2_plus_one(log_increments: Tensor, log_w: Tensor) -> Tensor:
    """Estimate of ρ = 1 + χ²(p‖q) from one cycle's incremental weights w, ``Σ W w² / (Σ W w)²``: (G, N) -> (G,).

    One step's bias is at most 12ρ/N and its mean squared error 4ρ/N for |f| ≤ 1 (Agapiou et al. 2017). The estimate
    never exceeds 1/min W, N for equal weights: a value near N says only that ρ is at least of that size.

    Args:
        log_increments: (G, N) float64, log w; finite or -inf.
        log_w: (G, N) float64, log-weights the particles carried into the cycle; need not be normalised.

    Returns:
        (G,) float64; inf where all are dead.
    """
    carried, w = _over_largest(log_w), _over_largest(log_increments)
    mean = (carried * w).sum(-1)
    rho = (carried * w.square()).sum(-1) * carried.sum(-1) / mean.square().clamp_min(_TINY)
    return rho.masked_fill(mean == 0, torch.inf)
