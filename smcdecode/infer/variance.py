"""How good one run's Ẑ is, from its genealogy: knows final weights and first ancestors, not the run.

Lee & Whiteley, "Variance estimation in the particle filter", Biometrika 105(3), 2018; section 4 of docs/mathematics.md.
"""

import torch
from torch import Tensor

__all__ = ["lineages", "relative_variance", "saturated"]


def _mass(W: Tensor, origin: Tensor) -> Tensor:
    """Weight of all descendants of each first-generation particle: (G, N), (G, N) -> (G, N)."""
    return torch.zeros_like(W).scatter_add_(-1, origin, W)


def relative_variance(W: Tensor, origin: Tensor, resamplings: Tensor) -> Tensor:
    """Estimate the variance of Ẑ/Z from a single run, ``V = 1 − (N/(N−1))^(r+1) (1 − Σ_e (Σ_{i: E_i=e} W_i)²)``.

    For multinomial resampling at fixed times ``E[Ẑ² V] = Var Ẑ`` exactly, for every N > 1; an approximation
    otherwise, and a pessimistic one for the schemes of lower variance. Small negative values happen: it is an unbiased
    estimate of something that may be near 0. Where :func:`saturated` holds V is 1 whatever the truth: read it as
    "at least".

    Args:
        W: (G, N) float64 final normalised weights.
        origin: (G, N) int64, index of each particle's ancestor before the first resampling (itself if there was none).
        resamplings: (G,) int64, how many resamplings the group went through.

    Returns:
        (G,) float64; NaN where all particles are dead, for which Ẑ = 0 has no relative variance.
    """
    N = W.shape[-1]
    mass = _mass(W, origin)
    distinct = 1 - mass.square().sum(-1)  # chance that two particles drawn by weight have different first ancestors
    V = 1 - (N / max(N - 1, 1)) ** (resamplings + 1) * distinct
    return V.masked_fill(mass.sum(-1) == 0, torch.nan)


def lineages(W: Tensor, origin: Tensor) -> Tensor:
    """How many first-generation particles still have living descendants: (G, N), (G, N) -> (G,) int64."""
    return (_mass(W, origin) > 0).sum(-1)


def saturated(W: Tensor, origin: Tensor) -> Tensor:
    """Where at most one first-generation particle has living descendants: the genealogy can say no more. (G,) bool."""
    return lineages(W, origin) <= 1
