"""Which tokens of a particle system are final: those all its survivors share. Knows tokens and who lives; no weights.

Whatever resampling does, every later particle descends from one that lives now, and a descendant keeps its ancestor's
tokens. So the common prefix of the living is a prefix of every answer still possible, and it never shrinks.
"""

from torch import Tensor

__all__ = ["settled"]


def settled(tokens: Tensor, lengths: Tensor, alive: Tensor) -> Tensor:
    """The common prefix of the particles that live.

    Args:
        tokens: (N, L) int64; of row i the first ``lengths[i]`` count.
        lengths: (N,) int64.
        alive: (N,) bool, particles of positive weight.

    Returns:
        (n,) int64; empty if none lives.
    """
    if not alive.any():
        return tokens[0, :0]
    rows = tokens[alive][:, : int(lengths[alive].min())]
    same = (rows == rows[0]).all(0)
    return rows[0, : int(same.long().cumprod(0).sum())]
