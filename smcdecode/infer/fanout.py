"""Which verification outcomes to prepare for. Knows counts and probabilities; no tokens, no model.

A block of K drafted tokens ends in an outcome (k, t): k tokens kept, and behind them a token t that the target wrote.
With F_k tokens prepared for each k, Σ_k F_k = B, the outcome is *hit* with probability Σ_k P_k hit_k(F_k), where P_k is
the probability of k and hit_k(F) that of t being among the F likeliest guesses there (Kumar, Dao & May 2026,
arXiv 2603.03251).
"""

import heapq

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Outcomes", "allocate", "geometric", "outcome_probabilities", "rounded"]

_ENOUGH = 24  # outcomes seen before their measured frequencies decide
_PRIOR = 8.0  # outcomes that the power law below counts for
_DECAY = 0.5  # misses fall about like (F + 1)^-½; real pairs at temperature 1 show exponents of 0.4 to 0.5
_START = 0.7  # acceptance assumed before anything is known


def outcome_probabilities(acceptance: float, block: int) -> NDArray[np.float64]:
    """P_k of k = 0…K tokens kept when each is kept with one probability: a^k (1 − a), and a^K for all."""
    kept = acceptance ** np.arange(block + 1, dtype=np.float64)
    kept[:-1] *= 1.0 - acceptance
    return kept


def geometric(budget: float, block: int, acceptance: float, decay: float) -> NDArray[np.float64]:
    """The fan-out that minimises Σ_k P_k F_k^-r subject to Σ_k F_k = B, in closed form (Theorem 12 there).

    ``F_k = F_0 ρ^k`` for k < K and ``F_K = F_0 ρ^K (1 − a)^(−1/(1+r))`` with ρ = a^(1/(1+r)): Lagrange's condition
    r P_k F_k^(−r−1) = λ of a convex problem.

    Args:
        budget: B > 0.
        block: K ≥ 0.
        acceptance: a in [0, 1).
        decay: r > 0, the power with which misses fall.

    Returns:
        (K+1,) float64, summing to B; real numbers, see :func:`rounded`.
    """
    weights = outcome_probabilities(acceptance, block) ** (1.0 / (1.0 + decay))
    return np.asarray(budget * weights / weights.sum())


def rounded(fanout: ArrayLike) -> NDArray[np.int64]:
    """Integers with the same sum (to rounding), none further than 1 from its number: largest remainders go up."""
    exact = np.asarray(fanout, dtype=np.float64)
    whole = np.floor(exact + 1e-9).astype(np.int64)
    left = round(exact.sum()) - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:left]] += 1
    return whole


def allocate(outcomes: ArrayLike, hit: ArrayLike, budget: int) -> NDArray[np.int64]:
    """Spend a budget one guess at a time where it raises the hit rate most; optimal where each table is concave.

    Args:
        outcomes: (n,) P_k.
        hit: (n, most+1) float64, hit_k(F) for F = 0…most, rising from 0.
        budget: B; no position gets more than ``most``.

    Returns:
        (n,) int64 F_k.
    """
    P, table = np.asarray(outcomes, dtype=np.float64), np.asarray(hit, dtype=np.float64)
    gains = (P[:, None] * np.diff(table, axis=1)).tolist()  # n lists of ``most``
    F = [0] * len(gains)
    next_ = [(-here[0], k) for k, here in enumerate(gains) if here]
    heapq.heapify(next_)
    for _ in range(min(budget, sum(map(len, gains)))):
        _, k = heapq.heappop(next_)
        F[k] += 1
        if F[k] < len(gains[k]):
            heapq.heappush(next_, (-gains[k][F[k]], k))
    return np.array(F, dtype=np.int64)


class Outcomes:
    """Outcomes seen so far: how often each k, and at which place among the guesses the token was.

    Args:
        block: K.
        most: guesses a position can have.
        acceptance: what is assumed before anything is seen; 0 puts the whole budget at k = 0.
    """

    def __init__(self, block: int, most: int, acceptance: float = _START) -> None:
        self.block, self.most, self.acceptance = block, most, acceptance
        self.seen = np.zeros((block + 1, most + 1))  # by k and place; the last place is "not among the guesses"

    def observe(self, kept: int, place: int) -> None:
        """Count one outcome: k, and the token's place among the guesses at k, from 0; ``most`` if it was not there."""
        self.seen[kept, place] += 1

    @property
    def total(self) -> float:
        """Outcomes seen."""
        return float(self.seen.sum())

    def probabilities(self) -> NDArray[np.float64]:
        """P_k as seen, a start of :data:`_PRIOR` outcomes counted in: (K+1,)."""
        start = _PRIOR * outcome_probabilities(self.acceptance, self.block)
        return np.asarray((self.seen.sum(1) + start) / (self.total + _PRIOR))

    def hit(self) -> NDArray[np.float64]:
        """The hit_k(F) as seen, a power law counted in: (K+1, most+1)."""
        law = 1.0 - (np.arange(self.most + 1) + 1.0) ** -_DECAY
        below = np.concatenate([np.zeros((self.block + 1, 1)), self.seen[:, :-1].cumsum(1)], 1)
        return np.asarray((below + _PRIOR * law) / (self.seen.sum(1, keepdims=True) + _PRIOR))

    def fanout(self, budget: int, count: int, bonus: bool) -> NDArray[np.int64]:
        """How many guesses to prepare behind a block of ``count`` ≤ K tokens: F_0…F_count.

        The closed form at first, then :func:`allocate` on what was seen.

        Args:
            budget: B.
            count: tokens in the block; all of them being kept is one outcome, whatever their number.
            bonus: whether a token follows when all are kept; if not (a text that ends there), F_count = 0.
        """
        rows = count + bonus
        F = np.zeros(count + 1, dtype=np.int64)
        if not rows:
            return F
        if self.total < _ENOUGH:
            F[:rows] = np.minimum(rounded(self._start(budget, count)[:rows]), self.most)
            return F
        P, table = self.probabilities(), self.hit()
        P = np.concatenate([P[:count], P[count:].sum(keepdims=True)])
        table = np.concatenate([table[:count], table[-1:]])
        F[:rows] = allocate(P[:rows], table[:rows], budget)
        return F

    def _start(self, budget: int, count: int) -> NDArray[np.float64]:
        return geometric(budget, count, self.acceptance, _DECAY)
