"""How fast speculation is, with the draft waiting for the target or beside it. Knows times and rates; no clock.

The unit of time is one target pass; E is tokens a cycle, T_q the draft's K passes, T_p the preparation of a whole cache
beside the target (it costs only what exceeds 1), T_b what a miss adds, h the hit rate. Kumar, Dao & May 2026
(arXiv 2603.03251): Theorem 7, Corollaries 9 and 16, Theorem 17.
"""

import math

__all__ = ["batch_speedup", "crossover", "emitted", "gain_bounds", "speculative_speedup"]


def emitted(acceptance: float, block: int) -> float:
    """E, tokens a cycle of K drafted tokens each kept with probability a: (1 − a^(K+1)) / (1 − a)."""
    return sum(acceptance**k for k in range(block + 1))


def speculative_speedup(tokens: float, draft: float) -> float:
    """Speed over one token a target pass when the target waits for the draft: E / (1 + T_q)."""
    return tokens / (1.0 + draft)


def batch_speedup(
    hit: float, tokens_hit: float, tokens_miss: float, *, prepare: float, backup: float, batch: int = 1
) -> float:
    """Speed of one of b sequences over one token a target pass (Theorem 7; Corollary 16 for b > 1).

    ``[h E_hit + (1 − h) E_miss] / [h^b max(1, T_p) + (1 − h^b)(1 + T_b)]``: one miss delays the whole batch.

    Args:
        hit: h, the share of cycles whose outcome was prepared.
        tokens_hit: E_hit, tokens of a cycle that follows a hit.
        tokens_miss: E_miss, the same behind a miss.
        prepare: T_p.
        backup: T_b.
        batch: b, sequences decoded together.
    """
    tokens = hit * tokens_hit + (1.0 - hit) * tokens_miss
    every = hit**batch
    return tokens / (every * max(1.0, prepare) + (1.0 - every) * (1.0 + backup))


def gain_bounds(hit: float, tokens_hit: float, tokens: float, draft: float) -> tuple[float, float]:
    """Least and most of the speed over ordinary speculative decoding, where T_p ≤ 1 and misses re-draft (Corollary 9).

    Args:
        hit: h.
        tokens_hit: E_hit.
        tokens: E of ordinary speculative decoding.
        draft: T_q of it.
    """
    ratio = (1.0 + draft) * tokens_hit / tokens
    return ratio / (1.0 + (1.0 - hit) * draft), ratio


def crossover(hit: float, slow: tuple[float, float], fast: tuple[float, float]) -> float:
    """The batch size b* from which the faster, poorer of two backups is the better one (Theorem 17), where T_p ≤ 1.

    ``b* = ln(1 − δ) / ln h`` with ``δ = (N_1 − N_2) / (N_2 T_1 − N_1 T_2)``: below it misses are rare and worth a good
    block.

    Args:
        hit: h in (0, 1).
        slow: (N_1, T_1) of the better backup: tokens a cycle over hits and misses together, and T_b.
        fast: (N_2, T_2) of the other, N_2 ≤ N_1.

    Returns:
        b*; 0 where the fast backup is better for every batch, infinity where the slow one is.
    """
    (n1, t1), (n2, t2) = slow, fast
    if n1 <= n2:
        return 0.0 if t2 <= t1 else math.inf
    saved = n2 * t1 - n1 * t2
    delta = (n1 - n2) / saved if saved > 0 else math.inf
    return math.log(1.0 - delta) / math.log(hit) if delta < 1 else math.inf
