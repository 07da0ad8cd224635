"""The oracle: enumerates π on models small enough to write out; knows next-token laws and Ψ, not how they arise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from smcdecode.errors import InvalidOption, InvalidWeight

__all__ = ["Exact", "enumerate_target"]

Tokens = tuple[int, ...]

_MOST = 2_000_000  # sequences; beyond it a mistyped max_tokens would fill the memory before anyone notices


@dataclass(frozen=True)
class Exact:
    """A target written out: every complete sequence that p can produce, with its log γ (1).

    Attributes:
        sequences: complete sequences, shorter ones first; one that Ψ forbids is listed with probability 0.
        log_gamma: (n,) float64, ``α log p(x) + log Ψ(x)``.
    """

    sequences: list[Tokens]
    log_gamma: NDArray[np.float64]

    @cached_property
    def log_z(self) -> float:
        """Log of Z = Σ_x γ(x); -inf where nothing has positive weight."""
        return float(np.logaddexp.reduce(self.log_gamma, initial=-np.inf))

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """(n,) float64, π(x) in the order of ``sequences``; all 0 where Z is 0."""
        return np.exp(self.log_gamma - max(self.log_z, np.finfo(np.float64).min))

    @cached_property
    def index(self) -> dict[Tokens, int]:
        """Position of each sequence in ``sequences``."""
        return {x: i for i, x in enumerate(self.sequences)}

    def total_variation(self, other: Mapping[Tokens, float] | ArrayLike) -> float:
        """Total variation distance ½ Σ_x |π(x) − ρ(x)| to another law ρ, in [0, 1].

        Args:
            other: counts or probabilities, normalised here: by sequence (one that p cannot produce counts in full),
                or (n,) in the order of ``sequences``.

        Raises:
            InvalidOption: the masses are negative, sum to nothing, or are an array of another length.
        """
        mass, elsewhere = self._aligned(other)
        total = mass.sum() + elsewhere
        if mass.shape != self.log_gamma.shape or not (mass.min(initial=0.0) >= 0 and 0 < total < np.inf):
            raise InvalidOption(
                f"total_variation needs non-negative counts or probabilities of {len(self.sequences)} sequences with a "
                f"positive sum; got shape {mass.shape} summing to {total}"
            )
        return float(np.abs(self.probabilities - mass / total).sum() + elsewhere / total) / 2

    def _aligned(self, other: Mapping[Tokens, float] | ArrayLike) -> tuple[NDArray[np.float64], float]:
        """Masses in the order of ``sequences``, and the mass of sequences that are not among them."""
        if not isinstance(other, Mapping):
            return np.asarray(other, dtype=np.float64), 0.0
        mass = np.array([other.get(x, 0.0) for x in self.sequences], dtype=np.float64)
        return mass, float(sum(m for x, m in other.items() if x not in self.index))


def enumerate_target(
    log_p_next: Callable[[Tokens], ArrayLike],
    log_psi: Callable[[Tokens], float],
    *,
    vocab_size: int,
    eos: frozenset[int],
    max_tokens: int,
    alpha: float = 1.0,
    stopped: Callable[[Tokens], bool] = lambda _: False,
) -> Exact:
    """Write out ``γ(x) = p(x)^α Ψ(x)`` (1) over all complete sequences: those ending in an EOS, or of ``max_tokens``.

    Args:
        log_p_next: from a prefix of token ids to the (V,) log-probabilities of the next token.
        log_psi: log Ψ of a complete sequence, which includes its EOS if it ended so; -inf forbids it.
        vocab_size: V.
        eos: token ids that end a sequence.
        max_tokens: length at which a sequence is complete without an EOS.
        alpha: power of p.
        stopped: whether a sequence is complete for another reason, such as a stop string; asked of every prefix once.

    Returns:
        The target, over the sequences of positive p.

    Raises:
        InvalidOption: ``max_tokens`` is below 1, or there are too many sequences to write out.
        InvalidWeight: a log-probability or log Ψ is NaN or +inf.
    """
    if max_tokens < 1:
        raise InvalidOption(f"max_tokens must be at least 1, got {max_tokens}")
    complete: dict[Tokens, float] = {}  # log p
    unfinished: dict[Tokens, float] = {(): 0.0}
    for length in range(1, max_tokens + 1):
        longer = _children(unfinished, log_p_next, vocab_size)
        goes_on = {x for x in longer if x[-1] not in eos and length < max_tokens and not stopped(x)}
        unfinished = {x: lp for x, lp in longer.items() if x in goes_on}
        complete |= {x: lp for x, lp in longer.items() if x not in unfinished}
    log_gamma = [alpha * lp + _checked(log_psi(x), f"log_psi{x}") for x, lp in complete.items()]
    return Exact(list(complete), np.array(log_gamma, dtype=np.float64))


def _children(
    parents: dict[Tokens, float], log_p_next: Callable[[Tokens], ArrayLike], vocab_size: int
) -> dict[Tokens, float]:
    """Every prefix of positive p that is one token longer, with its log p."""
    if len(parents) * vocab_size > _MOST:
        raise InvalidOption(
            f"more than {_MOST:,} sequences to enumerate; use a smaller vocabulary, a smaller max_tokens or a top-k law"
        )
    return {(*x, v): lp + step for x, lp in parents.items() for v, step in _steps(log_p_next(x), vocab_size, x)}


def _steps(row: ArrayLike, vocab_size: int, prefix: Tokens) -> list[tuple[int, float]]:
    """Tokens of positive probability after a prefix, with their log-probabilities."""
    log_p = np.asarray(row, dtype=np.float64)
    if log_p.shape != (vocab_size,):
        raise InvalidOption(f"log_p_next{prefix} has shape {log_p.shape}; vocab_size asks for ({vocab_size},)")
    _checked(float(log_p.max()), f"log_p_next{prefix}")
    return [(int(v), float(log_p[v])) for v in np.flatnonzero(log_p > -np.inf)]


def _checked(value: float, source: str) -> float:
    if not value < np.inf:
        raise InvalidWeight(f"{source} is {value}; a log-weight is a number below infinity, or -inf for weight zero")
    return value
