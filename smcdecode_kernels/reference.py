"""The plain definition of every kernel, and the path on CPUs: knows rows of numbers, not what they mean.

A faster kernel is correct when it agrees with the function of the same name here. Nothing here holds a random
state: see :mod:`smcdecode_kernels.counter`.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcdecode_kernels.bits import apply_bitmask, pack_bits, unpack_bits
from smcdecode_kernels.counter import uniform

Floats = NDArray[np.float64]

__all__ = [
    "Urn",
    "apply_bitmask",
    "cumulative",
    "draw",
    "exp_",
    "invert",
    "log_",
    "log_law",
    "log_norm",
    "log_softmax_",
    "pack_bits",
    "parts",
    "together",
    "uniform",
    "unpack_bits",
]

_CHUNK = 256  # tokens summed at once in the weights' own precision (1e-7 in float32); chunks are summed in float64
_TOGETHER = 2**22  # numbers worked on at once on a CPU: 16 MiB in float32
_BELOW_ONE = 1.0 - 2.0**-53
_TINY = np.finfo(np.float64).tiny
_RUN = 64  # tokens a search for the largest skips at once
_TOP_P_GUESS = 256  # most nuclei are smaller; the search grows from here until it holds the asked mass


def cumulative(weights: Tensor) -> Tensor:
    """Distribution function of rows of weights, fit for inversion by ``searchsorted(…, right=True)``.

    Never decreases, stands still at zero weights whatever the order of summation, and ends at exactly 1, so a
    uniform below 1 never lands on a zero weight. A row of zeros gives zeros.

    Args:
        weights: (…, n) float64, non-negative.

    Returns:
        (…, n) float64.
    """
    total = weights.cumsum(-1).masked_fill(weights == 0, 0.0).cummax(-1).values
    return total / total[..., -1:].clamp_min(torch.finfo(torch.float64).tiny)


def draw(log_weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row by inversion of the distribution function, in two levels: a chunk, then a token of it.

    Args:
        log_weights: (n, V) float32 or float64, unnormalised; -inf is weight zero.
        u: (n,) float64 in (0, 1).

    Returns:
        tokens: (n,) int64, never one of weight zero; 0 where the row has no weight (all -inf) or is not a number.
        log_norm: (n,) float64, log Σ exp of the row: -inf where all are -inf, NaN where any is NaN or +inf.
    """
    rows = parts(log_weights)
    if len(rows) == 1:
        return _draw(log_weights, u)
    drawn = [_draw(*part) for part in zip(rows, torch.split(u, together(log_weights)), strict=True)]
    return torch.cat([x for x, _ in drawn]), torch.cat([x for _, x in drawn])


def _draw(log_weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    w, top = _scaled(log_weights)  # (n, C, c), (n,) float64
    sums = w.sum(-1).double()  # (n, C)
    total = sums.sum(-1)
    if w.device.type == "cpu":
        chosen = _choose_numpy(w.numpy(), sums.numpy(), u.numpy()[:, None])
        return torch.from_numpy(np.where(total.numpy() > 0, chosen, 0)), total.log_().add_(top)
    if w.shape[1] == 1:
        token = invert(w[:, 0].double(), u)[0]
    else:
        chunk, rest = invert(sums, u)
        inside = w[torch.arange(len(w), device=w.device), chunk].double()  # (n, c) float64
        token = chunk * w.shape[-1] + invert(inside, rest)[0]
    return torch.where(total > 0, token, 0), total.log() + top


def _choose_numpy(w: NDArray[Any], sums: Floats, u: Floats) -> NDArray[np.int64]:
    """A token of each row by chunks (n, C, c) and their sums (n, C), bit for bit as above: u (n, 1) → (n,)."""
    if w.shape[1] == 1:
        return _item_numpy(w[:, 0].astype(np.float64), u)[0]
    chunk, low, high = _item_numpy(sums, u)
    inside = w[np.arange(len(w)), chunk].astype(np.float64)  # (n, c)
    return np.asarray(chunk * w.shape[-1] + _item_numpy(inside, _rest_numpy(u, low, high)[:, None])[0])


def log_norm(log_weights: Tensor) -> Tensor:
    """Log of the sum of exponentials of each row, the second value of :func:`draw`.

    Args:
        log_weights: (n, V) float32 or float64.

    Returns:
        (n,) float64; -inf where all are -inf, NaN where any is NaN or +inf.
    """
    norms = [w.sum(-1).double().sum(-1).log() + top for w, top in map(_scaled, parts(log_weights))]
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def parts(x: Tensor) -> tuple[Tensor, ...]:
    """Views of some rows of x (n, V) at a time, in order: on a CPU so few that what is made of them stays small.

    An allocator hands small memory out again; large memory it returns to the system, and every page that comes back
    costs more than the arithmetic done on it.
    """
    most = together(x)
    return (x,) if most >= len(x) else torch.split(x, most)


def together(x: Tensor, n: int | None = None) -> int:
    """How many of n rows of the width of x (…, V), by default of its own, go into a part; at least 1."""
    n, V = len(x) if n is None else n, x.shape[-1]
    return max(1, min(n, _TOGETHER // max(V, 1))) if x.device.type == "cpu" else max(1, n)


def exp_(x: Tensor) -> Tensor:
    """Exponentials in place, 0 where they are below the smallest normal number (2.4e-38 in float32) or x is -inf.

    On CPUs torch's own takes ten times as long on such numbers as on others, and masked rows are full of them.
    """
    tiny = torch.finfo(x.dtype).tiny
    return torch.threshold_(x.clamp_(min=math.log(1.5 * tiny)).exp_(), 2 * tiny, 0.0)


def log_(x: Tensor) -> Tensor:
    """Logarithms of non-negative numbers in place, -inf where those are 0 or below what :func:`exp_` keeps."""
    tiny = torch.finfo(x.dtype).tiny
    return torch.threshold_(x.clamp_(min=tiny).log_(), math.log(2 * tiny), -math.inf)


def _scaled(log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights over their row's largest, padded with zeros to whole chunks (n, C, c), and its log (n,) float64."""
    n, V = log_weights.shape
    top = log_weights.amax(-1, keepdim=True).clamp_min(torch.finfo(log_weights.dtype).min)  # a dead row: exp(-inf)
    if V <= _CHUNK:
        return exp_(log_weights - top)[:, None], top[:, 0].double()
    w = log_weights.new_empty(n, -(-V // _CHUNK) * _CHUNK)
    w[:, V:] = 0.0
    exp_(torch.sub(log_weights, top, out=w[:, :V]))
    return w.view(n, -1, _CHUNK), top[:, 0].double()


def invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The item a uniform falls on, and where inside it.

    Args:
        weights: (n, k) float64, non-negative.
        u: (n,) float64 in [0, 1).

    Returns:
        item: (n,) int64, drawn in proportion to the weights, never one of weight zero; meaningless where all are zero.
        rest: (n,) float64, u's place inside the item, again in [0, 1).
    """
    if weights.device.type == "cpu":
        item_, low_, high_ = _item_numpy(weights.numpy(), u.numpy()[:, None])
        return torch.from_numpy(item_), torch.from_numpy(_rest_numpy(u.numpy()[:, None], low_, high_))
    cdf = cumulative(weights)
    item = torch.searchsorted(cdf, u[:, None], right=True).clamp_max(weights.shape[-1] - 1)  # (n, 1)
    high = cdf.gather(-1, item)
    low = cdf.gather(-1, (item - 1).clamp_min(0)) * (item > 0)
    return item[:, 0], ((u[:, None] - low) / (high - low))[:, 0].clamp(0.0, _BELOW_ONE)


def _item_numpy(weights: Floats, u: Floats) -> tuple[NDArray[np.int64], Floats, Floats]:
    """The same, bit for bit, where operations on few elements are cheap: weights (n, k), u (n, 1).

    Returns:
        the item, and where it begins and ends, (n,) each. A sum that is made in order never decreases, and stands still
        at zero weights.
    """
    total = weights.cumsum(-1)
    cdf = np.divide(total, np.maximum(total[:, -1:], _TINY), out=total)
    item = (cdf > u).argmax(-1)
    rows = np.arange(len(item))
    return item, np.where(item > 0, cdf[rows, item - 1], 0.0), cdf[rows, item]


def _rest_numpy(u: Floats, low: Floats, high: Floats) -> Floats:
    """Where u (n, 1) lies between two numbers (n,)."""
    return np.asarray(np.minimum(np.maximum((u[:, 0] - low) / np.maximum(high - low, _TINY), 0.0), _BELOW_ONE))


class Urn:
    """Rows of weights from which tokens are drawn and taken away, one at a time, in the two levels of :func:`draw`.

    What is left is summed anew and never found by subtraction, so it is right to rounding even where all but a
    trillionth of the weight has been taken.

    Args:
        log_weights: (n, V) float32 or float64, unnormalised; -inf is weight zero. They stay as they are.
    """

    def __init__(self, log_weights: Tensor) -> None:
        self._w, self._top = _scaled(log_weights)  # (n, C, c), (n,) float64
        self._sums = self._w.sum(-1).double()  # (n, C)

    def log_left(self, rows: Tensor) -> Tensor:
        """Log of the weight left in some rows: (m,) int64 → (m,) float64, -inf where nothing is."""
        return self._sums[rows].sum(-1).log() + self._top[rows]

    def draw(self, rows: Tensor, u: Tensor) -> Tensor:
        """One token of each of some rows, in proportion to what is left: (m,) int64, (m,) float64 → (m,) int64.

        A row with nothing left gives a token that means nothing.
        """
        chunk, rest = invert(self._sums[rows], u)
        return chunk * self._w.shape[-1] + invert(self._w[rows, chunk].double(), rest)[0]

    def take(self, rows: Tensor, tokens: Tensor) -> None:
        """Take one token away from each of some rows, all different: (m,) int64 each."""
        chunk = tokens // self._w.shape[-1]
        self._w[rows, chunk, tokens % self._w.shape[-1]] = 0.0
        self._sums[rows, chunk] = self._w[rows, chunk].sum(-1).double()


def log_law(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """The law a token is drawn from: logits over the temperature, then the k likeliest, then the likeliest p.

    The order and the meaning are those of transformers' warpers. Ties with the last token kept are kept as well,
    so that the law does not depend on the order in which a sort leaves equals.

    Args:
        logits: (n, V), any floating type.
        temperature: 0 is all mass on the largest logit, the first of equals.
        top_k: keep the ``top_k`` largest; None keeps all.
        top_p: keep the smallest set of the largest whose mass reaches ``top_p``; None keeps all.

    Returns:
        (n, V) float32 log-probabilities, normalised; -inf off the support.
    """
    logits = logits.float()
    if temperature == 0:
        return torch.full_like(logits, -torch.inf).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
    log_p = torch.log_softmax(logits if temperature == 1 else logits / temperature, -1)
    if top_k is not None and top_k < log_p.shape[-1]:
        log_p = _from(log_p, _largest(log_p, top_k)[:, -1:])
    if top_p is not None and top_p < 1:
        log_p = _from(log_p, _nucleus(log_p, top_p))
    return log_p


def log_softmax_(x: Tensor) -> Tensor:
    """Rows of floating-point numbers (n, V) on a CPU less the log of their sum of exponentials, in place."""
    return torch._log_softmax(x, -1, False, out=x)


def _from(log_p: Tensor, threshold: Tensor) -> Tensor:
    """The law restricted to log-probabilities of at least ``threshold`` (n, 1)."""
    return torch.log_softmax(log_p.masked_fill(log_p < threshold, -torch.inf), -1)


def _largest(x: Tensor, k: int) -> Tensor:
    """The k largest of each row of x (n, V), descending: all of them lie in the k runs of largest maximum."""
    runs = x.shape[-1] // _RUN
    if 2 * k > runs:
        return x.topk(k).values
    body = x[:, : runs * _RUN].reshape(-1, runs, _RUN)
    best = body.amax(-1).topk(k).indices[..., None].expand(-1, -1, _RUN)
    return torch.cat([body.gather(1, best).flatten(1), x[:, runs * _RUN :]], -1).topk(k).values


def _nucleus(log_p: Tensor, top_p: float) -> Tensor:
    """Smallest log-probability (n, 1) inside the smallest set of mass ``top_p``."""
    k = _TOP_P_GUESS
    while True:
        k = min(k, log_p.shape[-1])
        largest = _largest(log_p, k)
        mass = largest.double().exp().cumsum(-1)
        if k == log_p.shape[-1] or bool((mass[:, -1] >= top_p).all()):
            return largest.gather(-1, (mass < top_p).sum(-1, keepdim=True).clamp_max(k - 1))
        k *= 16
