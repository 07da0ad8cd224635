"""A drafted token under strictness: kept, or redrawn. The plain definition; knows two laws a row, no model.

The law of the token emitted and its weight are derived in :mod:`smcdecode.infer.strictness`.
"""

import dataclasses

import torch
from torch import Tensor

from smcdecode_kernels import reference
from smcdecode_kernels.laws import Key, Law, log_weights, some

__all__ = ["Overlap", "judge", "overlap"]


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
        return reference.log_((self.r[rows] - self.q[rows]).clamp_(min=0.0))

    def log_ratio(self, tokens: Tensor, rows: Tensor | None = None) -> Tensor:
        """The log r(x) − log e(x) of one emitted token a row: (n,) int64 → (n,) float64; exactly 0 at s = 1.

        Args:
            tokens: of each row, or of some.
            rows: which, (m,) int64; None for all.
        """
        if rows is not None:
            fields = (getattr(self, field.name)[rows] for field in dataclasses.fields(self))
            return Overlap(*fields).log_ratio(tokens)
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
    q, r = reference.exp_(log_q.clone()), reference.exp_(log_r.clone())
    over = (
        (q - r / strictness[:, None].float()).clamp_(min=0.0).sum(-1, dtype=torch.float64)
    )  # 1 − A, without its cancellation
    excess = (r - q).clamp_(min=0.0).sum(-1, dtype=torch.float64)
    refused = torch.maximum(over, strictness * excess).clamp(max=1.0)
    keep = (1.0 - refused) / (1.0 - over).clamp(min=1e-300)
    return Overlap(q, r, strictness, keep, refused, excess)


def _at(law: Tensor, tokens: Tensor) -> Tensor:
    return law.gather(-1, tokens[:, None])[:, 0].double()


def judge(
    q: Law, q_norm: Tensor, r: Law, r_norm: Tensor, r_rows: Tensor, tokens: Tensor, strictness: Tensor, accept: Key,
    redraw: Key,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Keep or redraw one drafted token a row.

    Args:
        q: n laws the tokens were drawn from.
        q_norm: (n,) float64, log-norms of their weights (:func:`smcdecode_kernels.laws.log_norm`).
        r: R laws of the target.
        r_norm: (R,) float64.
        r_rows: (n,) int64, the target's law at each drafted token.
        tokens: (n,) int64.
        strictness: (n,) float64, s in (0, 1].
        accept: n uniforms, for keeping.
        redraw: n uniforms, for the token that stands instead.

    Returns:
        tokens: (n,) int64, the tokens emitted.
        refused: (n,) bool, where the drafted token does not stand. (Where r = q up to rounding it may stand all the
            same; the block ends there.)
        log_ratio: (n,) float64, log r − log e of the token emitted; −inf where the target's law has no weight at all.
    """
    rows = some(r, r_rows)
    norm = r_norm[r_rows]
    barren = torch.isneginf(norm)
    log_r = log_weights(rows) - norm.masked_fill(barren, 0.0)[:, None].float()
    both = overlap(log_weights(q) - q_norm[:, None].float(), log_r, strictness)
    refused = accept.uniform() >= both.acceptance(tokens)
    drawn, weight = reference.draw(
        both.redraw_log_weights(torch.arange(len(tokens), device=tokens.device)), redraw.uniform()
    )
    emitted = torch.where(refused & ~torch.isneginf(weight), drawn, tokens)
    ratio = both.log_ratio(emitted).masked_fill(barren, -torch.inf)
    return torch.where(barren, tokens, emitted), refused | barren, ratio
