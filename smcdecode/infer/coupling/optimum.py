"""The most a coupling can accept: knows the laws of n drafts and of the token, no coupling.

Over all couplings of the token with a set of drafts (Hu et al. 2025),

    α* = 1 + min_H ψ(H),    ψ(H) = p(H) − P(all drafts in H),

and the minimiser H* is a prefix of the tokens in the order of rising p/q, so that one sort finds it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from smcdecode.infer.coupling.drafting import INDEPENDENT, TOP_PLUS_ONE, WITHOUT_REPLACEMENT, Drafting, marked, without
from smcdecode.infer.coupling.protocol import counts_of

__all__ = ["optimal_acceptance", "ratio_order", "smallest_prefix"]

_NOISE = 1e-15  # a prefix this little below zero is the empty one
_LOG_TIMES = (-34.0, 40.0, 1200)


def optimal_acceptance(p: Tensor, q: Tensor, n: int | Tensor, drafting: Drafting = INDEPENDENT) -> Tensor:
    """Highest probability, over all couplings of law p, that the token is one of n drafts.

    One sort of the vocabulary for independent drafts, one selection for greedy ones; for drafts without replacement a
    loop over the vocabulary, meant for small ones.

    Args:
        p: (B, V) float64, rows summing to 1.
        q: (B, V) float64, rows summing to 1.
        n: drafts at each position, one number or (B,) int64, each ≥ 1.
        drafting: their joint law.

    Returns:
        (B,) float64.
    """
    return _VALUES[drafting.name](p, q, counts_of(n, p))


def ratio_order(p: Tensor, q: Tensor) -> Tensor:
    """Tokens by rising p/q: (B, V) int64; those q never draws come last, ties in their own order."""
    return torch.where(q > 0, p / q, torch.inf).argsort(dim=-1, stable=True)


def smallest_prefix(P: Tensor, Q: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """H* of independent drafts among prefixes of groups of tokens: their number (B,) int64 and ψ(H*) ≤ 0 (B,).

    Args:
        P: (B, F) float64, target mass of each group, groups in the order of rising p/q.
        Q: (B, F) float64, draft mass of each group.
        n: (B,) float64.
    """
    psi = P.cumsum(-1) - Q.cumsum(-1).clamp(max=1.0) ** n[:, None]
    lowest, last = psi.min(-1)
    empty = lowest > -_NOISE
    return torch.where(empty, 0, last + 1), torch.where(empty, 0.0, lowest)


def _independent(p: Tensor, q: Tensor, n: Tensor) -> Tensor:
    order = ratio_order(p, q)
    return 1.0 + smallest_prefix(p.gather(-1, order), q.gather(-1, order), n)[1]


def _top_plus_one(p: Tensor, q: Tensor, n: Tensor) -> Tensor:
    """Σ_A p + Σ_not A min(p, q without A), A the n − 1 likeliest tokens of q."""
    k = int(n.max()) - 1
    sure = torch.arange(k, device=p.device) < n[:, None] - 1
    top = marked(q, torch.topk(q, k).indices, sure)
    return torch.where(top, p, torch.minimum(p, without(q, top))).sum(-1)


def _without_replacement(p: Tensor, q: Tensor, n: Tensor) -> Tensor:
    order = ratio_order(p, q)
    psi = p.gather(-1, order).cumsum(-1) - _race(q.gather(-1, order), n)
    return 1.0 + psi.amin(-1).clamp(max=0.0)


def _race(Q: Tensor, n: Tensor) -> Tensor:
    """Chance that all n drafts without replacement lie in each prefix H of the tokens: (B, V) -> (B, V).

    Drafts arrive in the order of independent Exp(q_j) clocks: the n-th of H must beat the first of the others,
    ∫ q(H^c) e^(−q(H^c) t) P(at least n of H by time t) dt.
    """
    u = torch.linspace(*_LOG_TIMES, dtype=torch.float64, device=Q.device)
    t, du = u.exp(), u[1] - u[0]
    fewer = torch.zeros(len(Q), int(n.max()), len(t), dtype=torch.float64, device=Q.device)
    fewer[:, 0] = 1.0  # P(c tokens of H by time t), c < n
    counted = torch.arange(fewer.shape[1], device=Q.device)[:, None] < n[:, None, None]  # (B, c, 1)
    outside = Q.flip(-1).cumsum(-1).flip(-1) - Q  # (B, V): mass behind each prefix
    inside = []
    for j in range(Q.shape[-1]):
        arrived = -torch.expm1(-Q[:, j, None, None] * t)
        shifted = torch.cat([torch.zeros_like(fewer[:, :1]), fewer[:, :-1]], 1)
        fewer = fewer * (1 - arrived) + shifted * arrived
        rate = outside[:, j, None]
        inside.append((du * t * rate * (-rate * t).exp() * (1.0 - (fewer * counted).sum(1))).sum(-1))
    whole = torch.where(outside > _NOISE, torch.stack(inside, -1), 1.0)
    return torch.where((Q > 0).cumsum(-1) >= n[:, None], whole, 0.0)


_VALUES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    INDEPENDENT.name: _independent,
    TOP_PLUS_ONE.name: _top_plus_one,
    WITHOUT_REPLACEMENT.name: _without_replacement,
}
