"""Resampling: knows normalised weights and uniforms, not what a particle is.

Every scheme maps W (G, N) float64, rows summing to 1, and u (G, N) float64 in (0, 1) to ancestors (G, N) int64 with
``E[#{j : a_j = i}] = N W_i`` in each group. A particle of weight zero has no offspring; one that has offspring keeps
one of them in its own slot (:func:`keep_in_place`). A group whose weights are all zero is left as it is.

A third argument, M (G,) int64 of at most N, asks for M offspring in place of N, ``E[#{j : a_j = i}] = M W_i``; slots
that stand empty then have ancestor -1.
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from smcdecode_kernels.groups import settle, strata
from smcdecode_kernels.reference import cumulative

__all__ = ["SCHEMES", "keep_in_place", "multinomial", "offspring", "residual", "ssp", "stratified", "systematic"]

Scheme = Callable[..., Tensor]
_Rule = Callable[[Tensor, Tensor, Tensor], Tensor]

SCHEMES: dict[str, Scheme] = {}
"""The schemes by name; a new one is a function from (W, u, M) to offspring counts under ``@_scheme``."""


def offspring(ancestors: Tensor) -> Tensor:
    """How many offspring each particle has: (G, N) int64 -> (G, N) int64; -1 is the ancestor of an empty slot."""
    held = ancestors >= 0
    return torch.zeros_like(ancestors).scatter_add_(-1, ancestors.clamp(min=0), held.long())


def keep_in_place(ancestors: Tensor) -> Tensor:
    """Reorder so that a_i = i wherever i has offspring; extra offspring fill the empty slots in order.

    Slots then change only where a particle died, and a surviving particle's pages stay where they are. The law does
    not change: particles are exchangeable after resampling.

    Args:
        ancestors: (G, N) int64.

    Returns:
        (G, N) int64, each row a permutation of the row given.
    """
    return settle(offspring(ancestors))


def _scheme(rule: _Rule) -> Scheme:
    """Make a public scheme, listed in SCHEMES, of a rule from (W, u, M) to offspring counts; M is (G, 1) there."""

    @wraps(rule)
    def scheme(W: Tensor, u: Tensor, M: Tensor | None = None) -> Tensor:
        alive = (W > 0).any(-1, keepdim=True)
        wanted = torch.full_like(W[:, :1], W.shape[-1], dtype=torch.int64) if M is None else M[:, None]
        return settle(torch.where(alive, rule(W, u, wanted), 1))

    SCHEMES[rule.__name__] = scheme
    return scheme


def _shares(W: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """Expected offspring M W in whole (int64) and fractional (float64) parts, (G, N) each."""
    share = W * M
    whole = share.floor()
    return whole.long(), share - whole


@_scheme
def multinomial(W: Tensor, u: Tensor, M: Tensor) -> Tensor:
    """M independent draws: the baseline, of highest variance (Gordon, Salmond & Smith 1993)."""
    N = W.shape[-1]
    drawn = torch.searchsorted(cumulative(W), u, right=True).clamp_max(N - 1)
    return offspring(drawn.masked_fill(torch.arange(N, device=W.device) >= M, -1))


@_scheme
def stratified(W: Tensor, u: Tensor, M: Tensor) -> Tensor:
    """One uniform in each of M equal strata (Kitagawa 1996)."""
    return strata(W, u, M)


@_scheme
def systematic(W: Tensor, u: Tensor, M: Tensor) -> Tensor:
    """One uniform, u[:, 0], at the same place in every stratum: offspring ⌊M W⌋ or ⌈M W⌉ (Carpenter et al. 1999).

    Of lowest cost, and in practice of low variance; that it beats multinomial resampling is not provable in general
    (Douc, Cappé & Moulines 2005).
    """
    return strata(W, u[:, :1].expand_as(u), M)


@_scheme
def residual(W: Tensor, u: Tensor, M: Tensor) -> Tensor:
    """⌊M W⌋ offspring for sure, the rest multinomial on the fractional parts (Liu & Chen 1998)."""
    N = W.shape[-1]
    whole, part = _shares(W, M)
    chosen = torch.searchsorted(cumulative(part), u, right=True).clamp_max(N - 1)
    drawn = torch.arange(N, device=W.device) < M - whole.sum(-1, keepdim=True)
    return whole.scatter_add(-1, chosen, drawn.long())


@_scheme
def ssp(W: Tensor, u: Tensor, M: Tensor) -> Tensor:
    """Srinivasan sampling process: offspring ⌊M W⌋ or ⌈M W⌉, negatively associated (Gerber, Chopin & Whiteley 2019).

    Consistent where systematic resampling is not proven to be. Fractional parts meet in pairs, in a knock-out
    tournament of log₂ N rounds (Srinivasan 2001): of each pair one is settled at 0 or 1, at odds that keep both
    expectations, and the other carries what is left of their sum to the next round.
    """
    counts, part = _shares(W, M)
    who = torch.arange(W.shape[-1], device=W.device).expand_as(counts)
    while part.shape[-1] > 1:
        m = part.shape[-1] // 2
        a, b, coin, u = part[:, :m], part[:, m : 2 * m], u[:, :m], u[:, m:]
        both = a + b
        whole = both >= 1
        first_carries = coin < torch.where(
            whole, (1 - a) / (2 - both), a / both
        )  # 0/0 compares false: nothing to carry
        first, second = who[:, :m], who[:, m : 2 * m]
        counts = counts.scatter_add(-1, torch.where(first_carries, second, first), whole.long())
        part = torch.cat([both - whole.double(), part[:, 2 * m :]], -1)
        who = torch.cat([torch.where(first_carries, first, second), who[:, 2 * m :]], -1)
    return counts.scatter_add(-1, who, part.round().long())
