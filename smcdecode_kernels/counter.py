"""Uniforms without a random state: knows keys and counters, not what they number.

A uniform is a function of its key and counter (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
so a draw depends on its request alone, never on what else shares the batch.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["uniform"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_BUMPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_HALVES = np.dtype("<u4")  # of a little-endian product, the low one first


def uniform(seed: Tensor, a: Tensor, b: Tensor, c: Tensor, stream: int | Tensor) -> Tensor:
    """Uniforms in (0, 1) as a pure function of a key and a counter: Philox4x32-10 (Salmon et al. 2011).

    Args:
        seed: int64, the 64-bit key (low word, high word).
        a: int64, first counter word. ``seed``, ``a``, ``b``, ``c`` and ``stream`` broadcast together.
        b: int64, second counter word.
        c: int64, third counter word. Each counter word is used modulo 2³².
        stream: fourth counter word: one number for each purpose a uniform serves.

    Returns:
        float64 of the broadcast shape: ``(k + ½) 2⁻⁵²`` with the 52-bit k made of the high 32 bits (first output
        word) and the low 20 (top of the second). One bit less than a double holds keeps 1.0 out of reach.
    """
    if seed.device.type == "cpu":
        key = seed.numpy()
        high, low, _, _ = _philox_numpy(a.numpy(), b.numpy(), c.numpy(), np.asarray(stream), key, key >> 32)
        return torch.as_tensor(_unit(high, low))
    words = (a & _WORD, b & _WORD, c & _WORD, stream & _WORD, seed & _WORD, (seed >> 32) & _WORD)
    u: Tensor = _unit(*_philox(*words)[:2])
    return u


def _unit(high: Any, low: Any) -> Any:
    """Two random words as a float64 strictly between 0 and 1."""
    return (((high << 20) | (low >> 12)) + 0.5) * 2.0**-52


def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, ...]:
    """Ten rounds on 32-bit words held in int64 tensors; wrapping products keep their bits."""
    for _ in range(_ROUNDS):
        x, y = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((y >> 32) & _WORD) ^ c1 ^ k0, y & _WORD
        c2, c3 = ((x >> 32) & _WORD) ^ c3 ^ k1, x & _WORD
        k0, k1 = (k0 + _BUMPS[0]) & _WORD, (k1 + _BUMPS[1]) & _WORD
    return c0, c1, c2, c3


def _philox_numpy(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, ...]:
    """The same of numbers of any sign, for few of them: numpy's operations cost a third of torch's, and go by twos."""
    shape = np.broadcast(c0, c1, c2, c3, k0, k1).shape
    even, odd, key = np.empty((3, 2, *shape), np.int64)
    for pair, (one, two) in zip((even, odd, key), ((c0, c2), (c1, c3), (k0, k1)), strict=True):
        pair[0], pair[1] = one, two
    even, odd, key = (x.astype(_HALVES) for x in (even, odd, key))  # modulo 2³²
    multipliers, bumps = (
        np.array(x, dtype).reshape(2, *(1 for _ in shape)) for x, dtype in ((_MULTIPLIERS, "<u8"), (_BUMPS, _HALVES))
    )
    for _ in range(_ROUNDS):
        halves = (even * multipliers)[..., None].view(_HALVES)
        even, odd = halves[::-1, ..., 1] ^ odd ^ key, halves[::-1, ..., 0]
        key = key + bumps
    return tuple(x.astype(np.uint64) for x in (even[0], odd[0], even[1], odd[1]))
