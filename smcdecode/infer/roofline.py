"""How fast a cycle can be: equations (6) and (7). Knows times and sizes; no models.

With T_m(n) the time of one pass of model m over n positions, autoregressive decoding makes one token per T_p(1), and a
cycle of SMC with a draft makes K+1 tokens per K T_q(N) + T_p(N(K+1)).
"""

__all__ = ["expected_block", "pass_seconds", "speedup"]


def pass_seconds(
    n: int, *, weight_bytes: float, parameters: float, bandwidth: float, flops: float, overhead: float
) -> float:
    """T_m(n) from hardware limits, (6): the larger of reading the weights once and computing n positions.

    Args:
        n: positions in the pass.
        weight_bytes: bytes of weights (and of keys and values read) a pass.
        parameters: multiply-adds a position.
        bandwidth: bytes a second.
        flops: floating-point operations a second.
        overhead: seconds a pass costs besides.
    """
    return max(weight_bytes / bandwidth, 2 * parameters * n / flops) + overhead


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


def expected_block(acceptance: float, K: int) -> float:
    """Tokens a cycle adds when each drafted token is kept with probability a, independently: Σ_{k=0..K} a^k.

    A refusal still emits its redrawn token, a full block its bonus token.
    """
    return sum(acceptance**k for k in range(K + 1))
