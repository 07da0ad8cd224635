"""Weights and ancestors of groups of particles. The plain definition; knows log-weights, not where they come from."""

import dataclasses
import math

import torch
from torch import Tensor

from smcdecode_kernels import reference
from smcdecode_kernels.laws import Key

__all__ = ["Weighed", "settle", "strata", "weigh"]


@dataclasses.dataclass(frozen=True)
class Weighed:
    """What one cycle's weights say, before resampling, and who descends from whom after it."""

    log_w: Tensor  # (G, N) float64, accumulated since the last resampling
    ess: Tensor  # (G,) float64
    log_mean: Tensor  # (G,) float64, log of the mean weight
    resampled: Tensor  # (G,) bool
    ancestors: Tensor  # (G, N) int64; a_i = i wherever i has offspring, and where the group is not resampled


def strata(W: Tensor, u: Tensor, M: Tensor | int) -> Tensor:
    """Offspring when stratum j holds the point (j + u_j)/M: differences of the number of points below each edge.

    Args:
        W: (G, N) float64, weights; rows sum to 1.
        u: (G, N) float64 in (0, 1).
        M: (G, 1) int64 or one number, at most N.

    Returns:
        (G, N) int64, rows summing to M.
    """
    edges = reference.cumulative(W) * M
    full = edges.floor()
    partial = u.gather(-1, full.long().clamp_max(W.shape[-1] - 1)) < edges - full
    return (full.long() + partial).diff(prepend=torch.zeros_like(full[:, :1], dtype=torch.int64))


def settle(counts: Tensor) -> Tensor:
    """Ancestors in place from offspring counts: a_i = i where i has offspring, further offspring fill the empty slots.

    Args:
        counts: (G, N) int64, rows summing to N, or to less: then some slots stay empty.

    Returns:
        (G, N) int64; -1 for slots that stay empty.

    Example:
        >>> settle(torch.tensor([[0, 3, 0, 1]]))
        tensor([[1, 1, 1, 3]])
    """
    empty = counts == 0
    extras = (counts - 1).clamp_min(0).cumsum(-1)
    filler = torch.searchsorted(extras, empty.cumsum(-1) - 1, right=True)
    filler = filler.masked_fill(filler == counts.shape[-1], -1)
    return torch.where(empty, filler, torch.arange(counts.shape[-1], device=counts.device))


def weigh(
    log_w: Tensor,
    increments: Tensor,
    log_z: Tensor,
    may_resample: Tensor,
    threshold: Tensor,
    key: Key,
    stratified: bool,
) -> Weighed:
    """Accumulate weights, and resample the groups whose effective sample size is low; all groups at once.

    Every slot holds a particle, before and after.

    Args:
        log_w: (G, N) float64, N ≤ 1024, carried weights; updated: 0 where a group is resampled.
        increments: (G, N) float64, of this cycle; −inf kills.
        log_z: (G,) float64, evidence closed by resamplings; updated: a resampling adds the log of the mean weight.
        may_resample: (G,) bool, groups that run and are not done.
        threshold: (G,) float64: resample where ESS < threshold · N.
        key: G uniforms' keys; ``particle`` is not read, stratum j takes its place.
        stratified: one uniform a stratum; else systematic, that of stratum 0 for all.

    Returns:
        The weights before resampling, and the ancestors. A group without weight has ESS 0 and log mean −inf and is left
        as it is; NaN and +inf come out as NaN.
    """
    G, N = log_w.shape
    total = log_w + increments
    over = (total - total.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).min)).exp()
    tiny = torch.finfo(torch.float64).tiny
    ess = over.sum(-1).square() / over.square().sum(-1).clamp_min(tiny)
    log_mean = torch.logsumexp(total, -1) - math.log(N)
    resampled = may_resample & ~torch.isneginf(log_mean) & (ess < threshold * N)
    W = (over / over.sum(-1, keepdim=True).clamp_min(tiny)).masked_fill(~resampled[:, None], 0.0)
    stratum = torch.arange(N, device=log_w.device) if stratified else torch.zeros_like(log_w, dtype=torch.int64)
    u = reference.uniform(key.seed[:, None], stratum, key.cycle[:, None], key.place[:, None], key.stream)
    counts = torch.where(resampled[:, None], strata(W, u.expand(G, N), N), 1)
    log_z += log_mean.masked_fill(~resampled, 0.0)
    log_w.copy_(total.masked_fill(resampled[:, None], 0.0))
    return Weighed(total, ess, log_mean, resampled, settle(counts))
