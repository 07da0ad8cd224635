"""How good one run's Ẑ is, from its genealogy: knows final weights and first ancestors, not the run.

Lee & Whiteley, "Variance estimation in the particle filter", Biometrika 105(3), 2018; section 4 of docs/mathematics.md.
"""

import math

import torch
from torch import Tensor

from smcdecode.infer.resampling import offspring

__all__ = ["lineages", "multinomial_equivalents", "rebased", "relative_variance", "saturated"]


def _mass(W: Tensor, origin: Tensor) -> Tensor:
    """Weight of all descendants of each first-generation particle: (G, N), (G, N) -> (G, N)."""
    return torch.zeros_like(W).scatter_add_(-1, origin, W)


def relative_variance(W: Tensor, origin: Tensor, resamplings: Tensor) -> Tensor:
    """Estimate the variance of Ẑ/Z from a single run, ``V = 1 − (N/(N−1))^(r+1) (1 − Σ_e (Σ_{i: E_i=e} W_i)²)``.

    For multinomial resampling at fixed times, and r the number of resamplings, ``E[Ẑ² V] = Var Ẑ`` exactly for every
    N > 1. Schemes of lower variance merge fewer lineages than r multinomial resamplings would, so that a count makes
    V far too small, even negative: give :func:`multinomial_equivalents` instead, an approximation for every scheme.
    Small negative values still happen: it estimates something that may be near 0. Where :func:`saturated` holds, V is
    1 whatever the truth: read it as "at least".

    Args:
        W: (G, N) float64 final normalised weights.
        origin: (G, N) int64, index of each particle's ancestor before the first resampling (itself if there was none).
        resamplings: (G,) int64 or float64, r: a count, or the sum of the resamplings' equivalents.

    Returns:
        (G,) float64; NaN where all particles are dead, for which Ẑ = 0 has no relative variance.
    """
    N = W.shape[-1]
    mass = _mass(W, origin)
    distinct = 1 - mass.square().sum(-1)  # chance that two particles drawn by weight have different first ancestors
    V = 1 - (N / max(N - 1, 1)) ** (resamplings + 1) * distinct
    return V.masked_fill(mass.sum(-1) == 0, torch.nan)


def multinomial_equivalents(W: Tensor, ancestors: Tensor) -> Tensor:
    """How many multinomial resamplings one resampling was, by the share of pairs of lineages that it merged.

    Two independent draws from W have different parents with chance 1 − ΣW²; two offspring, drawn with replacement,
    with 1 − Σ(O/N)². Multinomial resampling makes the second N/(N−1) times smaller on average: one equivalent. The
    low-variance schemes merge little beyond what the weights ask for: near 0.

    With it E[Ẑ² V] was within 10% of Var Ẑ for every scheme where resampling waits for ESS < N/2 (a three-state chain,
    N = 8 and 32), and up to half too small where even weights are resampled in every cycle by residual resampling.

    Args:
        W: (G, N) float64 normalised weights before the resampling.
        ancestors: (G, N) int64, what the scheme made of them.

    Returns:
        (G,) float64, to be summed over the resamplings of a group.
    """
    N = W.shape[-1]
    if N == 1:
        return torch.zeros_like(W[:, 0])
    counts = offspring(ancestors).double()
    asked = (1 - W.square().sum(-1)).clamp_min(0.0)
    share = counts / counts.sum(-1, keepdim=True)
    left = (1 - share.square().sum(-1)).clamp_min(1 / N**2)  # one parent: V saturates
    return (asked / left).log() / math.log(N / (N - 1))


def rebased(resamplings: float, columns: int, first: int, final: int) -> float:
    """Resamplings counted for lanes of ``columns`` slots, as :func:`relative_variance` of ``final`` counts them.

    Where the number of particles changes, (N/(N−1))^(r+1) is the product of M/(M−1) over the first particles and all
    resamplings to M. For multinomial resampling that keeps E[Ẑ² V] = Var Ẑ exact at fixed times and numbers.
    """
    per = [math.log(n / (n - 1)) for n in (columns, first, final)]
    return (per[0] * resamplings + per[1]) / per[2] - 1


def lineages(W: Tensor, origin: Tensor) -> Tensor:
    """How many first-generation particles still have living descendants: (G, N), (G, N) -> (G,) int64."""
    return (_mass(W, origin) > 0).sum(-1)


def saturated(W: Tensor, origin: Tensor) -> Tensor:
    """Where at most one first-generation particle has living descendants: the genealogy can say no more. (G,) bool."""
    return lineages(W, origin) <= 1
