"""The law σ_{F,C} that makes refusals foreseeable, and what a choice of C is worth. Knows laws; no model, no cache.

A drafted token x ~ Q is kept with probability min(1, p/Q) and otherwise redrawn from (p − Q)+. If Q gives the F
likeliest tokens C times their share, those are under-drafted, so a redrawn token is among them more often (the share of
the residual's mass on them never falls as C falls), while fewer tokens are kept (Kumar, Dao & May 2026,
arXiv 2603.03251, Definition 14, Theorem 15). The text's law is p for every Q, as long as Q is what was drawn from.
"""

import torch
from torch import Tensor

__all__ = ["downweight", "foreseen"]


def downweight(log_law: Tensor, top: Tensor, share: float) -> Tensor:
    """The log-weights of σ_{F,C}: C times the weight on some tokens of each row; draw() normalises them.

    Args:
        log_law: (n, V) float32.
        top: (n, F) int64, the F likeliest tokens of each row.
        share: C in (0, 1]; 1 gives ``log_law`` itself.
    """
    if share == 1:
        return log_law
    shift = torch.tensor(share, dtype=log_law.dtype).log()
    return log_law.scatter_add(-1, top, shift.expand_as(top).contiguous())


def foreseen(p: Tensor, q: Tensor, top: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """For several C: how often a token of σ_{F,C} is kept, and how often a refusal's redraw is among the top F.

    Args:
        p: (n, V) float64, the target's law.
        q: (n, V) float64, the draft's law before C.
        top: (n, F) int64, the F likeliest tokens of each row.
        shares: (c,) float64, values of C in (0, 1].

    Returns:
        kept (c, n) and foreseen (c, n), both float64; foreseen is 1 where nothing is refused.
    """
    lifted = torch.zeros_like(q, dtype=torch.bool).scatter_(-1, top, True)
    weights = torch.where(lifted, q * shares[:, None, None], q)  # (c, n, V)
    law = weights / weights.sum(-1, keepdim=True)
    residual = (p - law).clamp(min=0.0)
    refused = residual.sum(-1)
    on_top = (residual * lifted).sum(-1)
    return 1.0 - refused, torch.where(refused > 0, on_top / refused.clamp(min=1e-300), 1.0)
