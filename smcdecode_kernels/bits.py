"""Masks over tokens, a bit each: knows words and flags, not who allows what."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["apply_bitmask", "list_bits", "pack_bits", "unpack_bits"]

Words = NDArray[np.int32]
Ints = NDArray[np.int64]


def apply_bitmask(logits: Tensor, words: Tensor) -> Tensor:
    """Set logits to -inf, in place, where a packed mask has the bit 0.

    Args:
        logits: (n, V), any floating type.
        words: (n, W) int32 with W ≥ V/32: token i of a row has bit ``i mod 32`` of word ``i div 32``, 1 for allowed.

    Returns:
        ``logits``.

    Raises:
        ValueError: the words are not int32, or too few.

    Example:
        >>> apply_bitmask(torch.zeros(1, 4), torch.tensor([[0b0101]], dtype=torch.int32))
        tensor([[0., -inf, 0., -inf]])
    """
    n, V = logits.shape
    if words.dtype != torch.int32 or len(words) != n or words.shape[1] * 32 < V:
        raise ValueError(f"{n} rows of {V} bits in int32 words are wanted; got {words.dtype} {tuple(words.shape)}")
    return logits.masked_fill_(unpack_bits(~words, V), -torch.inf)


def unpack_bits(words: Tensor, V: int) -> Tensor:
    """Packed masks as rows of flags, see :func:`apply_bitmask`: (n, W) int32 with W ≥ V/32 → (n, V) bool."""
    if words.device.type == "cpu":  # numpy unpacks bits ten times as fast as shifts do
        packed = np.ascontiguousarray(words.numpy()).astype("<i4", copy=False).view(np.uint8)
        return torch.from_numpy(np.unpackbits(packed, axis=1, count=V, bitorder="little").view(np.bool_))
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    return ((bits & 1) != 0).flatten(1)[:, :V]


def list_bits(words: Words, V: int) -> tuple[Ints, Ints]:
    """The tokens of packed masks one by one, quick where they are few: (n, W) int32 → rows and tokens, (m,) int64 each.

    In order of rows and tokens; bits beyond V mean nothing.

    Example:
        >>> list_bits(np.array([[0b0101], [0b1000]], dtype=np.int32), 4)
        (array([0, 0, 1]), array([0, 2, 3]))
    """
    row, word = words.nonzero()
    octets = words[row, word].astype("<i4", copy=False)[:, None].view(np.uint8)
    which, bit = np.unpackbits(octets, axis=1, bitorder="little").nonzero()
    token = word[which] * 32 + bit
    real = token < V
    return row[which[real]], token[real]


def pack_bits(mask: Tensor) -> Tensor:
    """Rows of flags as packed masks, the inverse of :func:`unpack_bits`: (n, V) bool → (n, ⌈V/32⌉) int32.

    Example:
        >>> pack_bits(torch.tensor([[True, False, True, False]]))
        tensor([[5]], dtype=torch.int32)
    """
    n, V = mask.shape
    W = -(-V // 32)
    bits = np.packbits(mask.cpu().numpy(), axis=1, bitorder="little")
    packed = np.zeros((n, 4 * W), dtype=np.uint8)
    packed[:, : bits.shape[1]] = bits
    return torch.from_numpy(packed.view("<i4").astype(np.int32, copy=False)).to(mask.device)
