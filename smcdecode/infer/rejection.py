"""Lossless verification of one drafted chain: knows two laws a position and uniforms, not what drafted or scored.

A drafted token x ~ q is kept with probability min(1, p(x)/q(x)); at the first refusal the token is drawn from
(p − q)+ instead and the block ends there; a block kept whole is followed by one bonus token from p. The tokens have
exactly the law p (Leviathan et al. 2023; Chen et al. 2023):

    min(p, q)(y) + (1 − Σ min(p, q)) (p − q)+(y) / Σ (p − q)+ = p(y),    because 1 − Σ min(p, q) = Σ (p − q)+,

provided that q is the law the token was drawn from, after temperature, truncation and masks, and that the uniforms
used here had no part in drafting. A token of a deterministic drafter has a one-hot q.
"""

import dataclasses

import torch
from torch import Tensor

from smcdecode.infer.coupling.drafting import at_quantiles

__all__ = ["Verified", "acceptance", "residual", "verify"]


@dataclasses.dataclass(frozen=True)
class Verified:
    """What stands of a drafted block: ``accepted`` drafted tokens, then ``token``."""

    accepted: Tensor  # (B,) int64
    token: Tensor  # (B,) int64: the replacement, or the bonus token of a block kept whole


def verify(log_p: Tensor, log_q: Tensor, drafts: Tensor, counts: Tensor, u: Tensor) -> Verified:
    """Keep the drafted tokens up to the first refusal, and draw the token that follows them.

    Args:
        log_p: (B, K+1, V) floating, the target's normalised log-law at every position.
        log_q: (B, K, V) floating, the normalised log-law each drafted token was drawn from.
        drafts: (B, K) int64.
        counts: (B,) int64, how many tokens of the row were drafted; positions from there on are not read.
        u: (B, K+1) float64 uniforms in (0, 1): one for each drafted token, the last for the token that follows.
    """
    K = drafts.shape[1]
    keep = u[:, :K] < acceptance(log_p[:, :K], log_q, drafts)
    keep &= torch.arange(K, device=drafts.device) < counts[:, None]
    accepted = keep.long().cumprod(-1).sum(-1)
    row = torch.arange(len(drafts), device=drafts.device)
    weights = log_p[row, accepted].double().exp()  # (B, V) float64
    refused = (accepted < counts).nonzero()[:, 0]
    weights[refused] = residual(weights[refused], log_q[refused, accepted[refused]].double().exp())
    return Verified(accepted, at_quantiles(weights, u[:, K:])[:, 0])


def acceptance(log_p: Tensor, log_q: Tensor, tokens: Tensor) -> Tensor:
    """min(1, p(x)/q(x)) of one token a row: (…, V), (…, V) and (…,) int64 -> (…,) float64.

    0 where neither law knows the token.
    """
    at = [law.gather(-1, tokens[..., None])[..., 0].double() for law in (log_p, log_q)]
    return (at[0] - at[1]).exp().clamp(max=1.0).nan_to_num(nan=0.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The law after a refusal, not normalised: (p − q)+, (…, V) float64.

    Where p nowhere exceeds q a refusal is an event of rounding, and the weights are p's own.
    """
    rest = (p - q).clamp_(min=0.0)
    return torch.where((rest > 0).any(-1, keepdim=True), rest, p)
