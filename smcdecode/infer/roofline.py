"""How fast a cycle can be: equation (7). Knows times; no models.

With T_m(n) the time of one pass of model m over n positions, autoregressive decoding makes one token per T_p(1), and a
cycle of SMC with a draft makes K+1 tokens per K T_q(N) + T_p(N(K+1)).
"""

__all__ = ["speedup"]


def speedup(
    block: float, draft_passes: float, *, target_one: float, draft: float, target: float, other: float = 0.0
) -> float:
    """S(N, K) of (7): how many times faster than autoregressive decoding a cycle writes.

    Args:
        block: tokens a cycle adds to a particle: K+1 at strictness 0, fewer when blocks are refused.
        draft_passes: K.
        target_one: T_p(1), seconds.
        draft: T_q(N), seconds.
        target: T_p(N(K+1)), seconds.
        other: seconds a cycle spends outside the models.
    """
    return block * target_one / (draft_passes * draft + target + other)
