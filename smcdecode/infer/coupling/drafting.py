"""Joint laws of n drafts at one position: knows q and uniforms, not which coupling will judge the drafts.

Only chains that share a prefix are drafted jointly. Chains made distinct at one position never share a prefix again,
so from there on each drafts alone, n = 1, where all three laws are q itself.
"""

from typing import Protocol

import torch
from torch import Tensor

from smcdecode.errors import InvalidOption
from smcdecode_kernels.reference import cumulative

__all__ = ["INDEPENDENT", "TOP_PLUS_ONE", "WITHOUT_REPLACEMENT", "Drafting", "at_quantiles", "marked", "without"]


class Drafting(Protocol):
    """How n drafts are drawn from a law q."""

    name: str

    def draw(self, q: Tensor, u: Tensor) -> Tensor:
        """Draw n drafts a row: q (B, V) float64, rows summing to 1, and u (B, n) float64 in (0, 1) -> (B, n) int64."""

    def probability(self, q: Tensor, drafts: Tensor) -> Tensor:
        """Probability of drafts (B, n) in this order: (B,) float64."""


def at_quantiles(weights: Tensor, u: Tensor) -> Tensor:
    """Indices at the quantiles u (B, n) of rows of weights (B, V) float64: (B, n) int64, never of weight 0."""
    return torch.searchsorted(cumulative(weights), u.contiguous(), right=True).clamp_max(weights.shape[-1] - 1)


def marked(like: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """Which of the tokens of ``like`` (B, V) are in some slot of tokens (B, N) marked in where (B, N): (B, V) bool."""
    return torch.zeros_like(like).scatter_add_(-1, tokens, where.to(like.dtype)) > 0


def without(q: Tensor, drawn: Tensor) -> Tensor:
    """The law q (B, V) given that the tokens marked drawn (B, V) bool are excluded.

    Where q has no other token, uniform over those not drawn: a draft is then worth little, but its law is known.
    """
    rest = q.masked_fill(drawn, 0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, (~drawn).double() / (~drawn).sum(-1, keepdim=True).clamp(min=1))


def _check_room(V: int, n: int) -> None:
    if n > V:
        raise InvalidOption(f"{n} distinct drafts do not exist among {V} tokens: draft fewer chains, or independently")


class _Independent:
    """Every draft ~ q, duplicates allowed."""

    name = "independent"

    def draw(self, q: Tensor, u: Tensor) -> Tensor:
        return at_quantiles(q, u)

    def probability(self, q: Tensor, drafts: Tensor) -> Tensor:
        return q.gather(-1, drafts).prod(-1)


class _WithoutReplacement:
    """Draft s ~ q without the drafts before it (successive sampling)."""

    name = "without replacement"

    def draw(self, q: Tensor, u: Tensor) -> Tensor:
        _check_room(q.shape[-1], u.shape[-1])
        drawn = torch.zeros_like(q, dtype=torch.bool)
        drafts = []
        for s in range(u.shape[-1]):
            drafts.append(at_quantiles(without(q, drawn), u[:, s : s + 1]))
            drawn = drawn.scatter(-1, drafts[-1], True)
        return torch.cat(drafts, -1)

    def probability(self, q: Tensor, drafts: Tensor) -> Tensor:
        drawn = torch.zeros_like(q, dtype=torch.bool)
        law = torch.ones(len(q), dtype=q.dtype, device=q.device)
        for s in range(drafts.shape[-1]):
            law = law * without(q, drawn).gather(-1, drafts[:, s : s + 1])[:, 0]
            drawn = drawn.scatter(-1, drafts[:, s : s + 1], True)
        return law


class _TopPlusOne:
    """The n − 1 likeliest tokens of q for certain, then one ~ q without them (Hu et al. 2025)."""

    name = "top plus one"

    def draw(self, q: Tensor, u: Tensor) -> Tensor:
        _check_room(q.shape[-1], u.shape[-1])
        top = self._top(q, u.shape[-1] - 1)
        return torch.cat([top, at_quantiles(self._last(q, top), u[:, -1:])], -1)

    def probability(self, q: Tensor, drafts: Tensor) -> Tensor:
        top = self._top(q, drafts.shape[-1] - 1)
        chance = self._last(q, top).gather(-1, drafts[:, -1:])[:, 0]
        return chance * (drafts[:, :-1] == top).all(-1)

    @staticmethod
    def _top(q: Tensor, k: int) -> Tensor:
        return torch.topk(q, k).indices

    @staticmethod
    def _last(q: Tensor, top: Tensor) -> Tensor:
        return without(q, torch.zeros_like(q, dtype=torch.bool).scatter(-1, top, True))


INDEPENDENT: Drafting = _Independent()
WITHOUT_REPLACEMENT: Drafting = _WithoutReplacement()
TOP_PLUS_ONE: Drafting = _TopPlusOne()
