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

import dataclasses

import torch
from torch import Tensor

from smcdecode_kernels.reference import exp_, log_

__all__ = ["START", "Overlap", "overlap", "retune"]

START = 0.2  # where automatic strictness begins
_WANTED = 0.8  # effective share of the particles that automatic strictness wants to be left by one cycle's weights
_RISE, _FALL, _LEAST = 1.5, 0.9, 0.02


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Two laws side by side, a row for each drafted position."""

    q: Tensor  # (n, V) float32, the law the tokens were drawn from
    r: Tensor  # (n, V) float32, the target's local law
    strictness: Tensor  # (n,) float64, s in (0, 1]
    keep: Tensor  # (n,) float64, c
    refused: Tensor  # (n,) float64, 1 − c A
    excess: Tensor  # (n,) float64, D

    def acceptance(self, tokens: Tensor) -> Tensor:
        """a(d) of one drafted token a row: (n,) int64 → (n,) float64."""
        q, r = _at(self.q, tokens), _at(self.r, tokens)
        return self.keep * (r / (self.strictness * q)).clamp(max=1.0)

    def redraw_log_weights(self, rows: Tensor) -> Tensor:
        """The log (r − q)+ of some rows, the unnormalised redraw law ρ: (m,) int64 → (m, V) float32."""
        return log_((self.r[rows] - self.q[rows]).clamp_(min=0.0))

    def log_ratio(self, tokens: Tensor) -> Tensor:
        """The log r(x) − log e(x) of one emitted token a row: (n,) int64 → (n,) float64; exactly 0 at s = 1."""
        q, r = _at(self.q, tokens), _at(self.r, tokens)
        redrawn = (r - q).clamp(min=0.0) * (self.refused / self.excess.clamp(min=1e-300))
        ratio = r.log() - (self.keep * torch.minimum(q, r / self.strictness) + redrawn).log()
        return ratio.masked_fill(self.strictness == 1.0, 0.0)


def overlap(log_q: Tensor, log_r: Tensor, strictness: Tensor) -> Overlap:
    """Compare the drafted law with the target's, a row for each position.

    Args:
        log_q: (n, V) float32, normalised log-law the tokens were drawn from.
        log_r: (n, V) float32, normalised local law of the target.
        strictness: (n,) float64, s in (0, 1].
    """
    q, r = exp_(log_q.clone()), exp_(log_r.clone())
    over = (
        (q - r / strictness[:, None].float()).clamp_(min=0.0).sum(-1, dtype=torch.float64)
    )  # 1 − A, without its cancellation
    excess = (r - q).clamp_(min=0.0).sum(-1, dtype=torch.float64)
    refused = torch.maximum(over, strictness * excess).clamp(max=1.0)
    keep = (1.0 - refused) / (1.0 - over).clamp(min=1e-300)
    return Overlap(q, r, strictness, keep, refused, excess)


def retune(strictness: Tensor, efficiency: Tensor) -> Tensor:
    """The strictness of the next cycle, from the last one's: stricter after uneven weights, laxer after even ones.

    It looks only at the past, so every weight stays proper and E[Ẑ] = Z holds.

    Args:
        strictness: (G,) float64, s of the cycle that ended.
        efficiency: (G,) float64, ESS over N of that cycle's incremental weights.
    """
    moved = torch.where(efficiency < _WANTED, strictness * _RISE, strictness * _FALL)
    return moved.clamp(_LEAST, 1.0)


def _at(law: Tensor, tokens: Tensor) -> Tensor:
    return law.gather(-1, tokens[:, None])[:, 0].double()
