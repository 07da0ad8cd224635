"""What followed the same tokens before, as a law: prompt lookup (Saxena 2023). Knows ids; no model, no page."""

import torch
from torch import Tensor

__all__ = ["law", "recurrences"]


def law(text: Tensor, ngram: int, floor: float, size: int) -> tuple[Tensor, Tensor]:
    """The next token's law q(v) = (1 − floor) · c(v) / Σ c + floor / V, with c(v) how often v followed the last ones.

    Args:
        text: (n, L) int64, flush right behind −1s.
        ngram: how many last tokens must recur.
        floor: probability that is spread over all tokens.
        size: V.

    Returns:
        the rows in which they do recur, (m,) int64, and their log q, (m, V) float32.
    """
    found = recurrences(text, ngram)
    count = found.sum(-1)
    known = (count > 0).nonzero()[:, 0]
    weights = found[known] * ((1 - floor) / count[known])[:, None]
    q = torch.full((len(known), size), floor / size)
    return known, q.scatter_add_(1, text[known].clamp(min=0), weights).log_()


def recurrences(text: Tensor, ngram: int) -> Tensor:
    """Where the last ``ngram`` tokens of each row stood just before: (n, L) int64, −1 for none, → (n, L) bool."""
    length = text.shape[1]
    found = torch.ones_like(text, dtype=torch.bool)
    found[:, :ngram] = False
    for back in range(1, min(ngram, length) + 1):
        last = text[:, length - back, None]
        found[:, back:] &= (text[:, : length - back] == last) & (last >= 0)
    return found
