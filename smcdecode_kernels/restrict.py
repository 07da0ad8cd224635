"""A packed mask applied to rows of log-weights, and what is left of them summed. Knows rows and bits, not who allows.

On a CPU rows that keep few tokens, as under a tight constraint, cost no work on the others but forgetting them.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcdecode_kernels.bits import apply_bitmask, list_bits
from smcdecode_kernels.reference import log_norm

__all__ = ["restrict"]

_FEW = 256  # a row is worked on token by token if fewer words of its mask have a bit


def restrict(law: Tensor, words: Tensor) -> Tensor:
    """Apply a packed mask to log-weights, in place, and give the log of the sum of what it leaves.

    Args:
        law: (n, V) float32.
        words: (n, W) int32, see :func:`~smcdecode_kernels.bits.apply_bitmask`.

    Returns:
        (n,) float64; -inf where nothing is left, NaN where any of it is NaN or +inf.
    """
    if law.device.type != "cpu":
        return log_norm(apply_bitmask(law, words))
    masks = words.numpy()
    few = np.count_nonzero(masks, axis=1) < min(_FEW, masks.shape[1])  # a row that keeps all is as unmasked
    if not few.any():
        return log_norm(apply_bitmask(law, words))
    norm = np.empty(len(law))
    norm[few] = _token_by_token(law, masks, np.flatnonzero(few))
    if not few.all():
        many = torch.from_numpy(np.flatnonzero(~few))
        rows = apply_bitmask(law[many], words[many])
        law[many], norm[~few] = rows, log_norm(rows).numpy()
    return torch.from_numpy(norm)


def _token_by_token(law: Tensor, masks: NDArray[np.int32], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """The same for some rows (m,) of a law (n, V) and of its masks (n, W): (m,)."""
    row, token = list_bits(masks[rows], law.shape[1])
    numbers = law.numpy()
    kept = numbers[rows[row], token]
    law.index_fill_(0, torch.from_numpy(rows), -torch.inf)
    numbers[rows[row], token] = kept
    top = np.full(len(rows), np.finfo(numbers.dtype).min, dtype=np.float64)  # a dead row: exp(-inf)
    np.maximum.at(top, row, kept)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(np.bincount(row, np.exp(kept - top[row]), len(rows))) + top)
