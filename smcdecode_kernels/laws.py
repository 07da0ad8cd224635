"""Rows of logits as laws: tokens drawn from them and scored under them. The plain definition; knows no model, no page.

A token is drawn by inversion of the distribution function, in two levels: a chunk of tokens, then a token of the
chunk. That takes one uniform a draw, the same on every device, so that a seed gives the same tokens wherever it runs
(up to rounding: a uniform within 1e-7 of an edge between tokens). It also reads the logits once: the sums of the chunks
come out of the pass that finds the normaliser, and a draw then looks at these and at one chunk. Gumbel's trick, the
other way to draw in one pass, needs a uniform for every token, which a CPU cannot make at the speed of a draft model.
"""

import dataclasses

import torch
from torch import Tensor

from smcdecode_kernels import reference

__all__ = ["CHUNK", "Key", "Law", "Sums", "draw", "floor", "log_norm", "log_weights", "score", "some", "sums"]

CHUNK = 256  # tokens of one partial sum


@dataclasses.dataclass(frozen=True)
class Key:
    """What makes n uniforms: see :func:`smcdecode_kernels.reference.uniform`. Nothing else has a part in a draw."""

    seed: Tensor  # (n,) int64, of the request
    particle: Tensor  # (n,) int64, within its group
    cycle: Tensor  # (n,) int64
    place: Tensor  # (n,) int64, in the block
    stream: int  # the purpose

    def uniform(self) -> Tensor:
        """The uniforms, (n,) float64 in (0, 1)."""
        return reference.uniform(self.seed, self.particle, self.cycle, self.place, self.stream)


@dataclasses.dataclass(frozen=True)
class Law:
    """R laws r ∝ p^α m over V tokens, where p is the softmax of x/T over the tokens with logits x of at least a floor.

    Attributes:
        logits: (R, V) float32, float16 or bfloat16; the tokens of a row side by side in memory.
        inverse_temperature: (R,) float32, 1/T > 0.
        alpha: (R,) float32 exponents; None for 1.
        floor: (R,) float32, the least logit that is kept, as :func:`floor` finds it; None keeps all.
        words: (R, W) int32, the mask m packed as in :func:`smcdecode_kernels.reference.apply_bitmask`; None allows all.
    """

    logits: Tensor
    inverse_temperature: Tensor
    alpha: Tensor | None = None
    floor: Tensor | None = None
    words: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether r is p itself."""
        return self.alpha is None and self.words is None


@dataclasses.dataclass(frozen=True)
class Sums:
    """Partial sums of the weights of R laws over chunks of CHUNK tokens, C = ⌈V / CHUNK⌉.

    Attributes:
        top: (R, C) float32, the largest log-weight of a chunk; −inf where it has no weight.
        total: (R, C) float32, the sum of its weights over the largest; NaN where a logit is NaN or +inf.
        base_top, base_total: the same of p instead of p^α m; None where they were not asked for, or p is r.
    """

    top: Tensor
    total: Tensor
    base_top: Tensor | None = None
    base_total: Tensor | None = None


def log_weights(law: Law) -> Tensor:
    """The log-weights α x/T of a law, −inf below the floor and where the mask forbids: (R, V) float32.

    They lack the constant −α log Σ exp(x/T), which :func:`score` puts back.
    """
    y = law.logits.float() * _scale(law)[:, None]
    if law.floor is not None:
        y = y.masked_fill(law.logits.float() < law.floor[:, None], -torch.inf)
    return y if law.words is None else reference.apply_bitmask(y, law.words)


def _scale(law: Law) -> Tensor:
    return law.inverse_temperature if law.alpha is None else law.alpha * law.inverse_temperature


def floor(logits: Tensor, inverse_temperature: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """The least logit kept by truncation: to the k largest, then to the smallest set of these of mass ``top_p``.

    Ties with the last token kept are kept as well. The law is that of :func:`smcdecode_kernels.reference.log_law`.

    Args:
        logits: (R, V), any floating type.
        inverse_temperature: (R,) float32.
        top_k: None or at least V keeps all.
        top_p: None or at least 1 keeps all.

    Returns:
        (R,) float32.

    Example:
        >>> floor(torch.tensor([[4.0, 1.0, 3.0, 2.0]]), torch.ones(1), 3, 0.9)
        tensor([3.])
    """
    x = logits.float().sort(-1, descending=True).values
    least = x[:, -1 if top_k is None else min(top_k, x.shape[-1]) - 1, None]
    if top_p is None or top_p >= 1:
        return least[:, 0]
    weights = ((x - x[:, :1]) * inverse_temperature[:, None]).exp().double().masked_fill(x < least, 0.0)
    mass = weights.cumsum(-1)
    short = (mass < top_p * mass[:, -1:]).sum(-1, keepdim=True)
    return x.gather(-1, short.clamp_max(x.shape[-1] - 1))[:, 0]


def sums(law: Law, base: bool = False) -> Sums:
    """Partial sums of R laws; the one pass over their logits.

    Args:
        law: the laws.
        base: whether :func:`score` will want log Z, and so the sums of p too, where p is not r.
    """
    own = _sums(log_weights(law))
    if not base or law.plain:
        return Sums(*own)
    return Sums(*own, *_sums(log_weights(dataclasses.replace(law, alpha=None, words=None))))


def _sums(y: Tensor) -> tuple[Tensor, Tensor]:
    """Largest of each chunk, and the sum of exponentials over it: (R, V) float32 → (R, C) float32 twice."""
    chunks = _chunked(y)
    top = chunks.amax(-1)
    return top, (chunks - _finite(top)[..., None]).exp().sum(-1)


def _finite(top: Tensor) -> Tensor:
    """A largest log-weight that can be subtracted: 0 for −inf."""
    return top.masked_fill(torch.isneginf(top), 0.0)


def _chunked(y: Tensor) -> Tensor:
    """Log-weights in chunks, padded with −inf: (R, V) → (R, C, CHUNK)."""
    padded = torch.nn.functional.pad(y, (0, -y.shape[-1] % CHUNK), value=-torch.inf)
    return padded.view(len(y), -1, CHUNK)


def log_norm(top: Tensor, total: Tensor) -> Tensor:
    """Log of the sum of weights from partial sums: (R, C) float32 twice → (R,) float64; −inf, NaN as sums have it."""
    largest, weights = _weights(top, total)
    return weights.sum(-1).log() + largest


def _weights(top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The row's largest log-weight (R,) and the chunks' weights over it (R, C), float64."""
    largest = _finite(top.amax(-1)).double()
    return largest, total.double() * (top.double() - largest[:, None]).exp()


def draw(law: Law, partial: Sums, rows: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    """One token from each of some rows.

    Args:
        law: R laws.
        partial: of :func:`sums`.
        rows: (n,) int64, the law each token is drawn from.
        key: n uniforms.

    Returns:
        tokens: (n,) int64, never one without weight; 0 where a row has no weight or is not a number.
        log_r: (n,) float64, the normalised log r of the token; −inf where the row has no weight, NaN where it is none.
    """
    largest, weights = _weights(partial.top[rows], partial.total[rows])
    chunk, rest = reference.invert(weights, key.uniform())
    every = torch.arange(len(rows), device=rows.device)
    inside = _chunked(log_weights(some(law, rows)))[every, chunk]  # (n, CHUNK)
    top = _finite(partial.top[rows].gather(-1, chunk[:, None]))
    at, _ = reference.invert((inside - top).double().exp(), rest)
    norm = weights.sum(-1).log() + largest
    log_r = (inside.gather(-1, at[:, None])[:, 0].double() - norm).masked_fill(torch.isneginf(norm), -torch.inf)
    return torch.where(weights.sum(-1) > 0, chunk * CHUNK + at, 0), log_r


def some(law: Law, rows: Tensor) -> Law:
    """Some rows of a law: (n,) int64."""
    fields = (law.logits, law.inverse_temperature, law.alpha, law.floor, law.words)
    return Law(*(None if x is None else x[rows] for x in fields))  # type: ignore[arg-type]


def score(law: Law, partial: Sums, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """A token under each row, (4) and (5) of docs/mathematics.md.

    Args:
        law: R laws.
        partial: of :func:`sums` with ``base``.
        tokens: (R,) int64.

    Returns:
        log_pa: (R,) float64, log p^α m of the token.
        log_z: (R,) float64, log Σ p^α m; exactly 0 where r is p.
    """
    y = log_weights(law).gather(-1, tokens[:, None])[:, 0].double()
    norm = log_norm(partial.top, partial.total)
    if partial.base_top is None or partial.base_total is None:
        return y - norm, norm - norm  # a row that is not a number stays none
    base = log_norm(partial.base_top, partial.base_total) * (1.0 if law.alpha is None else law.alpha.double())
    return y - base, norm - base
