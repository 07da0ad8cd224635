"""Adaptive weighted rejection: tokens of a law that pass a yes/no check, with weights. Knows rows of numbers, no model.

A row is a law p over tokens, and ok(x) a check that is asked about single tokens only. What comes back is a token and
a weight W with E[W 1{x}] = p(x) ok(x) for every token x, so W estimates Z = Σ_x p(x) ok(x) without bias, though most
tokens are never asked about (AWRS; Lipkin et al. 2025, "Fast controlled generation from language models with adaptive
weighted rejection sampling").
"""

from collections.abc import Callable

import torch
from torch import Tensor

from smcdecode_kernels.reference import Urn

__all__ = ["Check", "Uniforms", "draw_checked", "geometric", "recursive"]

Check = Callable[[Tensor, Tensor], Tensor]  # rows (m,) int64, a token of each (m,) int64 → (m,) bool
Uniforms = Callable[[Tensor, int, int], Tensor]  # rows (m,) int64, number of the draw, 0 or 1 → (m,) float64 in (0, 1)


def draw_checked(
    log_weights: Tensor, uniforms: Uniforms, check: Check, *, most: int, acceptances: int = 1
) -> tuple[Tensor, Tensor]:
    """One token a row that passes the check, and its weight: :func:`recursive`, or :func:`geometric` if asked for more.

    Args:
        log_weights: (n, V) float32 or float64, log p of each row, normalised or not; -inf is probability zero.
        uniforms: gives the random numbers; of each draw, 0 chooses the token and 1 counts repeated refusals.
        check: whether a token of a row may stand. It is asked about drawn tokens only, of many rows at once.
        most: M ≥ 1, refusals after which a row gives up. Weights are proper for every M.
        acceptances: A ≥ 1, accepted tokens the weight is estimated from.

    Returns:
        tokens: (n,) int64; where the weight is zero it means nothing.
        log_w: (n,) float64, log W relative to the row's whole weight; -inf where no token passed.
    """
    if acceptances == 1:
        return recursive(log_weights, uniforms, check, most=most)
    return geometric(log_weights, uniforms, check, most=most, acceptances=acceptances)


def recursive(log_weights: Tensor, uniforms: Uniforms, check: Check, *, most: int) -> tuple[Tensor, Tensor]:
    """Tokens are drawn without replacement until one passes, and one more to weigh it.

    With R the probability of the refused tokens and x the first that passes, W = 1 − R if the token drawn behind x
    passes too, or none is left, or x was the last allowed try; otherwise W = p(x). Arguments and results as for
    :func:`draw_checked`.
    """
    urn, rows = Urn(log_weights), torch.arange(len(log_weights))
    total = urn.log_left(rows)
    tokens, found = torch.zeros_like(rows), torch.zeros(len(rows), dtype=torch.bool)
    log_w = torch.full_like(total, -torch.inf)
    draw, left = 0, torch.zeros_like(total)  # left: log(1 − R)
    rows, left = rows[total > -torch.inf], left[total > -torch.inf]
    while len(rows):
        drawn = urn.draw(rows, uniforms(rows, draw, 0))
        passed, weighing = check(rows, drawn), found[rows]
        first, alone = passed & ~weighing, ~passed & weighing
        tokens[rows[first]], log_w[rows[first]] = drawn[first], left[first]
        log_w[rows[alone]] = _log_share(log_weights, total, rows[alone], tokens[rows[alone]])
        found[rows] |= passed
        urn.take(rows, drawn)
        left = urn.log_left(rows) - total[rows]
        going = ~weighing & (left > -torch.inf) & (draw < most - 1)
        rows, left, draw = rows[going], left[going], draw + 1
    return tokens, log_w


def geometric(
    log_weights: Tensor, uniforms: Uniforms, check: Check, *, most: int, acceptances: int
) -> tuple[Tensor, Tensor]:
    """Tokens are drawn as if with replacement until A ≥ 2 have passed; refused ones are not asked about again.

    How often refused tokens would have come up again is drawn from its geometric law, so with a accepted and r refused
    draws W = min(A − 1, a) / (a + r − 1), the unbiased estimate from negative binomial sampling; r stops at M. The
    token is the first that passed. Less variance than :func:`recursive` for more checks. Arguments and results as for
    :func:`draw_checked`.
    """
    urn, rows = Urn(log_weights), torch.arange(len(log_weights))
    total, tokens = urn.log_left(rows), torch.zeros_like(rows)
    accepted, refused = torch.zeros_like(total), torch.zeros_like(total)
    draw = 0
    while len(rows):
        refused[rows] += _repeats(urn.log_left(rows) - total[rows], uniforms(rows, draw, 1))
        rows = rows[refused[rows] < most]
        drawn = urn.draw(rows, uniforms(rows, draw, 0))
        passed = check(rows, drawn)
        first = passed & (accepted[rows] == 0)
        tokens[rows[first]] = drawn[first]
        accepted[rows] += passed.double()
        refused[rows] += (~passed).double()
        urn.take(rows[~passed], drawn[~passed])
        rows, draw = rows[(accepted[rows] < acceptances) & (refused[rows] < most)], draw + 1
    tried = accepted + refused.clamp(max=most) - 1.0
    weight = torch.where(accepted > 0, accepted.clamp(max=acceptances - 1) / tried.clamp(min=1.0), 0.0)
    return tokens, weight.log()


def _log_share(log_weights: Tensor, total: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """The log p(x) of a token of each of some rows."""
    return log_weights[rows, tokens].double() - total[rows]


def _repeats(left: Tensor, u: Tensor) -> Tensor:
    """Draws of already refused tokens before one of others comes up, (m,) float64; ``left`` is log(1 − R)."""
    return (u.log() / torch.log1p(-left.exp().clamp(max=1.0))).nan_to_num(nan=torch.inf).floor()
