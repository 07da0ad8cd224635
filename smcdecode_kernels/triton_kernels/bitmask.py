"""Packed masks on logits, the Triton twin of ``reference.apply_bitmask``. Knows rows in device memory only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["apply_bitmask"]

_BLOCK = 4096  # tokens a program


def apply_bitmask(logits: Tensor, words: Tensor) -> Tensor:
    """See :func:`smcdecode_kernels.reference.apply_bitmask`. Allowed logits are neither read nor written.

    Args:
        logits: (n, V), any floating type; rows may lie apart, their tokens not.
        words: (n, W) int32, W ≥ V/32; likewise.
    """
    n, V = logits.shape
    if logits.stride(1) != 1 or words.stride(1) != 1:
        raise ValueError("the tokens of a row must lie side by side in memory: give contiguous rows")
    if words.dtype != torch.int32 or len(words) != n or words.shape[1] * 32 < V:
        raise ValueError(f"{n} rows of {V} bits in int32 words are wanted; got {words.dtype} {tuple(words.shape)}")
    if n:
        grid = (n, triton.cdiv(V, _BLOCK))
        _apply_bitmask[grid](logits, words, logits.stride(0), words.stride(0), V, BLOCK=_BLOCK)
    return logits


@triton.jit
def _apply_bitmask(logits, words, logits_stride, words_stride, V, BLOCK: tl.constexpr):
    """Forbid the tokens whose bit is 0.

    ``logits`` (n, V) float, ``words`` (n, W) int32; strides in elements. One program a row and block of tokens. With
    V = 40 and words (0b101, 1) tokens 0, 2 and 32 stay, all others become −inf.
    """
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    packed = tl.load(words + row * words_stride + word, mask=word * 32 < V, other=0)
    bit = tl.arange(0, 32)
    token = word[:, None] * 32 + bit[None, :]
    forbidden = ((packed[:, None] >> bit[None, :]) & 1) == 0
    minus_inf = tl.full((BLOCK // 32, 32), float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * logits_stride + token, minus_inf, mask=forbidden & (token < V))
