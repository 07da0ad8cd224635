"""Strictness: how much of a bad guess is carried as weight, how much is redrawn. Knows two laws, no model.

A drafted token d ~ q is accepted with probability a(d) = c min(1, r(d) / (s q(d))); on refusal the token is drawn from
ρ ∝ (r − q)+ instead and the block ends there. The token emitted has the law

    e(x) = c min(q(x), r(x)/s) + (1 − c A) ρ(x),     A = Σ_x min(q(x), r(x)/s),

so its exact weight is log r(x) − log e(x). s = 0 keeps every token (e = q); s = 1 is lossless speculative decoding
(e = r, weight 0; Leviathan et al. 2023, Chen et al. 2023). The factor

    c = min(1, (1 − s D) / A),     D = Σ_x (r(x) − q(x))+,

makes a refusal at least as likely as s D: without it a draft that never errs by more than 1/s would never be refused,
and tokens that it misses would never be written. With it every weight r/e lies in [s, 1/s], for every draft: where
r > q, r ≥ e ≥ c q + s (r − q) ≥ s r, because c ≥ s; elsewhere c r ≤ e ≤ r/s. Kin: rejection control (Liu, Chen & Wong
1998) and partial rejection control (Peters, Fan & Sisson 2012).
"""

import torch
from torch import Tensor

from smcdecode_kernels.overlap import Overlap, overlap

__all__ = ["START", "Overlap", "kept", "moments", "overlap", "retune"]

START = 0.2  # where automatic strictness begins
_WANTED = 0.8  # effective share of the particles that automatic strictness wants to be left by one cycle's weights
_RISE, _FALL, _LEAST = 1.5, 0.9, 0.02


def kept(both: Overlap, tokens: Tensor) -> Tensor:
    """The law of accepted tokens over the target's, g/r with g = c min(q, r/s), at one token a row: (n,) float64."""
    q, r = (law.gather(-1, tokens[:, None])[:, 0].double() for law in (both.q, both.r))
    return both.keep * torch.minimum(q / r.clamp(min=1e-300), 1.0 / both.strictness)


def moments(both: Overlap) -> tuple[Tensor, Tensor, Tensor]:
    """Of the emitted token's weight r/e: Σ r² (e − g)/e², Σ r² g/e² and Σ r g/e, all (n,) float64.

    The first two are E[(r/e)²] where the token is refused and where accepted, with sum 1 + χ²(r‖e), 1 at s = 1; the
    third is E[r/e] where accepted.
    """
    s, c, share = (
        x[:, None].float() for x in (both.strictness, both.keep, both.refused / both.excess.clamp(min=1e-300))
    )
    accepted = torch.minimum(both.q, both.r / s) * c
    redrawn = (both.r - both.q).clamp_(min=0.0) * share
    w = both.r / (accepted + redrawn).clamp_(min=torch.finfo(torch.float32).tiny)
    once = (w * accepted).sum(-1, dtype=torch.float64)
    ended, went_on = ((w.square() * part).sum(-1, dtype=torch.float64) for part in (redrawn, accepted))
    return ended, went_on, once


def retune(strictness: Tensor, efficiency: Tensor) -> Tensor:
    """The strictness of the next cycle, from the last one's: stricter after uneven weights, laxer after even ones.

    It looks only at the past, so every weight stays proper and E[Ẑ] = Z holds.

    Args:
        strictness: (G,) float64, s of the cycle that ended.
        efficiency: (G,) float64, ESS over N of that cycle's incremental weights.
    """
    moved = torch.where(efficiency < _WANTED, strictness * _RISE, strictness * _FALL)
    return moved.clamp(_LEAST, 1.0)
