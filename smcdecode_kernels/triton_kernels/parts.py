"""What several kernels share: a law's log-weights, uniforms, and inversion. Knows blocks in registers only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from smcdecode_kernels.laws import CHUNK, Law

__all__ = ["chunks_of", "edges", "empty", "invert", "largest", "law_arguments", "log_weights", "unit_uniform"]


def law_arguments(law: Law) -> dict[str, object]:
    """A law as arguments of a kernel that reads it by :func:`log_weights`."""
    logits, words = law.logits, law.words
    if logits.stride(1) != 1 or (words is not None and words.stride(1) != 1):
        raise ValueError("the tokens of a row must lie side by side in memory: give contiguous rows")
    if words is not None and (words.dtype != torch.int32 or words.shape[1] * 32 < logits.shape[1]):
        raise ValueError(
            f"{len(logits)} rows of {logits.shape[1]} bits in int32 words are wanted; "
            f"got {words.dtype} {tuple(words.shape)}"
        )
    return {
        "logits": logits, "stride": logits.stride(0), "V": logits.shape[1],
        "inverse_temperature": law.inverse_temperature, "alpha": law.alpha, "floor": law.floor, "words": words,
        "words_stride": 0 if words is None else words.stride(0),
    }  # fmt: skip


def chunks_of(V: int) -> int:
    """How many chunks V tokens make."""
    return -(-V // CHUNK)


def empty(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Room on the device of another tensor."""
    return torch.empty(shape, dtype=dtype, device=like.device)


@triton.jit
def log_weights(logits, stride, inverse_temperature, alpha, floor, words, words_stride, row, token, inside):
    """The law's log-weights at a block of tokens (any shape), −inf outside; pointers that are None change nothing."""
    x = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    scale = tl.load(inverse_temperature + row)
    if alpha is not None:
        scale = tl.load(alpha + row) * scale
    y = x * scale
    if floor is not None:
        y = tl.where(x < tl.load(floor + row), float("-inf"), y)
    if words is not None:
        packed = tl.load(words + row * words_stride + token // 32, mask=inside, other=0)
        y = tl.where(((packed >> (token % 32)) & 1) == 0, float("-inf"), y)
    return tl.where(inside, y, float("-inf"))


@triton.jit
def largest(x):
    """The largest of a block, 0 where all are −inf, so that it can be subtracted."""
    top = tl.max(x, 0)
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def unit_uniform(seed, a, b, c, stream):
    """See ``reference.uniform``: int64 words, of one shape, to float64."""
    high, low, _, _ = tl.philox(
        seed, a.to(tl.uint32), b.to(tl.uint32), c.to(tl.uint32), (tl.zeros_like(a) + stream).to(tl.uint32)
    )
    k = (high.to(tl.int64) << 20) | (low.to(tl.int64) >> 12)
    return (k.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2⁻⁵²


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def edges(weights):
    """See ``reference.cumulative``, for a block of float64 weights."""
    rising = tl.where(weights == 0.0, 0.0, tl.cumsum(weights, 0))
    rising = tl.associative_scan(rising, 0, _larger)
    total = tl.max(rising, 0)
    tiny = tl.full([], 2.2250738585072014e-308, tl.float64)
    return rising / tl.maximum(total, tiny)


@triton.jit
def invert(weights, item, last, u):
    """See ``reference.invert``: weights of a block of items 0, 1, … of which ``last`` is the last."""
    cdf = edges(weights)
    found = tl.minimum(tl.sum((cdf <= u).to(tl.int32), 0), last)
    high = tl.sum(tl.where(item == found, cdf, 0.0), 0)
    low = tl.sum(tl.where(item == found - 1, cdf, 0.0), 0)
    below_one = tl.full([], 0.9999999999999999, tl.float64)  # 1 − 2⁻⁵³
    rest = tl.where(high > low, (u - low) / (high - low), 0.0)
    return found, tl.minimum(tl.maximum(rest, 0.0), below_one)
