"""Global Resolution as published: softmax over the set of distinct drafts, on the k likeliest tokens of the draft.

Thomas & Pal (2025): H* of least ψ(H) = p(H) − q(H)^n; residual masses of the tokens outside H* from a vertex of the
polymatroid of ψ,

    p'_{v_i} = p(v_i) + min_{T ⊇ H_{i+1}} ψ(T) − min_{T ⊇ H_i} ψ(T),    H_i = H* ∪ {v_i, …},

where with v in the order of falling p/q both minima run over sorted prefixes; and two convex programs with one weight
e^a a token, softmax over the drafts outside H* if there are any, else, with a slack of 1, over all; solved by L-BFGS-B.

The programs list the sets of at most n of the k tokens, so k and n must be small. Drafts with other tokens are not in
them: the law of the token is then *approximate*, off by at most 15 τ in L1 if each program leaves out draft mass τ
(lemma 6.6 of the paper), and as close as the solver gets if the draft itself is truncated to the k tokens. For exact
output at any vocabulary size see :mod:`~smcdecode.infer.coupling.global_resolution`; this stands beside it.
"""

import dataclasses
import itertools
from functools import lru_cache
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from smcdecode.errors import InvalidOption
from smcdecode.infer.coupling.drafting import INDEPENDENT, Drafting
from smcdecode.infer.coupling.optimum import ratio_order, smallest_prefix
from smcdecode.infer.coupling.protocol import Branches, Plan, counts_of

__all__ = ["SetSoftmax", "SetSoftmaxPlan"]

_SETS = 4096
_NOISE = 1e-15
_RANGE = 500.0

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class SetSoftmax:
    """Published Global Resolution of i.i.d. drafts: *approximate* unless the k tokens hold all of the draft's mass.

    Args:
        top_k: tokens with a weight, the draft's likeliest.
        iterations: most L-BFGS-B steps for each program.
    """

    top_k: int = 10
    iterations: int = 1000
    name: str = "set softmax"
    drafting: Drafting = INDEPENDENT

    def prepare(self, p: Tensor, q: Tensor, n: int | Tensor) -> "SetSoftmaxPlan":
        """See :class:`~smcdecode.infer.coupling.protocol.Coupling`; positions are solved one after another.

        Raises:
            InvalidOption: more than 4096 sets of at most n of the k tokens.
        """
        counts = counts_of(n, p)
        k, largest = min(self.top_k, p.shape[-1]), int(counts.max())
        if sum(comb(k, r) for r in range(1, largest + 1)) > _SETS:
            raise InvalidOption(
                f"sets of at most {largest} of {k} tokens are too many to list: lower top_k, "
                "or use GlobalResolution, which lists none"
            )
        inside, share = _shares(p, q, counts)
        kept = torch.topk(q, k).indices  # (B, k)
        weight = torch.zeros_like(p)
        for b in range(len(p)):
            at = kept[b]
            w = _weights(
                share[b, at].numpy(force=True), q[b, at].numpy(force=True), inside[b, at].numpy(force=True),
                float(q[b][inside[b]].sum()), int(counts[b]), self.iterations,
            )  # fmt: skip
            weight[b, at] = torch.from_numpy(w).to(p.device)
        return SetSoftmaxPlan(p, inside, share, weight, _left_out(q, inside, kept, counts))


class SetSoftmaxPlan(Plan):
    """A fitted coupling; its token has law p up to the truncation."""

    def __init__(self, p: Tensor, inside: Tensor, share: Tensor, weight: Tensor, left_out: Tensor) -> None:
        """For each token (B, V): p, whether in H*, mass p' it is to get from drafts, weight."""
        self.p, self.inside, self.share, self.weight = p, inside, share, weight
        self.left_out = left_out
        """(B,) float64, τ: probability of drafts that the programs leave out, the larger of the two."""

    def branches(self, drafts: Tensor, alive: Tensor) -> Branches:
        """See :class:`~smcdecode.infer.coupling.protocol.Plan`."""
        first = alive & ~_repeated(drafts, alive)
        outside = first & ~self.inside.gather(-1, drafts)
        some = outside.any(-1, keepdim=True)
        served = torch.where(some, outside, first)
        weight = self.weight.gather(-1, drafts).where(served, 0.0)
        weight = torch.where(some & (weight.sum(-1, keepdim=True) == 0), outside.double(), weight)
        law = weight / ((~some).double() + weight.sum(-1, keepdim=True))
        return Branches(law, lambda rows: (self.p[rows] - self.share[rows]).clamp_(min=0.0))


def _repeated(drafts: Tensor, alive: Tensor) -> Tensor:
    """(B, N) bool: slots whose token an earlier slot alive has too."""
    same = (drafts[:, :, None] == drafts[:, None, :]) & alive[:, None, :]
    return same.tril(-1).any(-1)


def _shares(p: Tensor, q: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """H* (B, V) bool, and the mass each token is to get from drafts (B, V): all of p inside, p' outside."""
    order = ratio_order(p, q)
    P, Q = p.gather(-1, order), q.gather(-1, order)
    h, _ = smallest_prefix(P, Q, n)
    zero = torch.zeros_like(P[:, :1])
    psi = torch.cat([zero, P.cumsum(-1) - Q.cumsum(-1).clamp(max=1.0) ** n[:, None]], -1)
    least = psi.flip(-1).cummin(-1).values.flip(-1)  # of the prefixes from each one on
    share = (P + least[:, :-1] - least[:, 1:]).clamp(min=0.0)
    ranked = torch.arange(P.shape[-1], device=p.device) < h[:, None]
    share = torch.where(ranked, P, share)
    return torch.zeros_like(ranked).scatter(-1, order, ranked), torch.zeros_like(p).scatter(-1, order, share)


def _left_out(q: Tensor, inside: Tensor, kept: Tensor, n: Tensor) -> Tensor:
    """The larger of 1 − q(H* ∪ T)^n and q(H*)^n − q(H* ∩ T)^n, T the tokens with a weight."""
    in_t = torch.zeros_like(inside).scatter(-1, kept, True)
    mass = [(q * which).sum(-1).clamp(max=1.0) ** n for which in (inside | in_t, inside, inside & in_t)]
    return torch.maximum(1.0 - mass[0], mass[1] - mass[2])


@lru_cache(maxsize=16)
def _sets(k: int, n: int) -> tuple[Array, Array]:
    """All sets of at most n of k tokens, the empty one first: incidence (S, k), inclusion–exclusion signs (S, S)."""
    listed = [c for r in range(n + 1) for c in itertools.combinations(range(k), r)]
    incidence = np.zeros((len(listed), k))
    for s, members in enumerate(listed):
        incidence[s, list(members)] = 1.0
    size = incidence.sum(1)
    below = incidence @ incidence.T == size  # (S, S): the column's set lies in the row's
    return incidence, below * (-1.0) ** (size[:, None] - size)


def _weights(share: Array, q: Array, inside: NDArray[np.bool_], in_h: float, n: int, iterations: int) -> Array:
    """Weights e^a of one position's k tokens: the outer program, then the inner one, each (k,)."""
    weight = np.zeros_like(q)
    drafted = (share > _NOISE) & (q > 0)
    for part, slack in ((~inside, 0.0), (inside, 1.0)):
        at = np.flatnonzero(part & drafted)
        free = in_h if slack == 0 else float(q[inside & ~drafted].sum())
        if len(at):
            weight[at] = _solve(share[at], q[at], free, slack, n, iterations)
    return weight


def _solve(share: Array, q: Array, free: float, slack: float, n: int, iterations: int) -> Array:
    """Minimise Σ_U d(U) log(slack + Σ_U e^a) − share·a, d(U) the chance that drafts are U and tokens of weight 0."""
    incidence, signs = _sets(len(q), min(n, len(q)))
    law = np.maximum(signs @ (free + incidence @ q) ** n, 0.0)[1:]
    incidence = incidence[1:]

    def program(a: Array) -> tuple[float, Array]:
        top = max(0.0, float(a.max()))
        e = incidence * np.exp(a - top)
        total = slack * np.exp(-top) + e.sum(1)
        safe = np.maximum(total, 1e-300)
        return float(law @ (np.log(safe) + top) - share @ a), (law / safe) @ e - share

    box = [(-_RANGE, _RANGE)] * len(q)  # a truncated program may have no minimum, and a vertex has its own at infinity
    a = minimize(
        program, np.zeros(len(q)), jac=True, method="L-BFGS-B", bounds=box,
        options={"maxiter": iterations, "maxfun": 4 * iterations, "ftol": 0.0, "gtol": 1e-10, "maxcor": 30},
    ).x  # fmt: skip
    weights: Array = np.exp(a - a.max()) if slack == 0 else np.exp(a)
    return weights
