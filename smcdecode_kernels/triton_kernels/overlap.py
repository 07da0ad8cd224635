"""The Triton twin of ``overlap``: one pass over both rows of logits, then a decision a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from smcdecode_kernels.laws import CHUNK, Key, Law
from smcdecode_kernels.triton_kernels.parts import chunks_of, empty, invert, law_arguments, log_weights, unit_uniform

__all__ = ["judge"]

_CHUNKS = 4  # chunks a program


def judge(
    q: Law, q_norm: Tensor, r: Law, r_norm: Tensor, r_rows: Tensor, tokens: Tensor, strictness: Tensor, accept: Key,
    redraw: Key,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See :func:`smcdecode_kernels.overlap.judge`. The uniforms' keys must be equal but for their streams."""
    n, V = q.logits.shape
    C = chunks_of(V)
    over, excess = (empty(tokens, n, C, dtype=torch.float32) for _ in range(2))
    emitted, refused = empty(tokens, n, dtype=torch.int64), empty(tokens, n, dtype=torch.bool)
    log_ratio = empty(tokens, n, dtype=torch.float64)
    laws = {f"q_{name}": x for name, x in law_arguments(q).items() if name != "V"} | {
        f"r_{name}": x for name, x in law_arguments(r).items() if name != "V"
    }
    both = laws | {"V": V, "q_norm": q_norm, "r_norm": r_norm, "r_rows": r_rows, "strictness": strictness, "C": C}
    if n:
        _overlap[(n, triton.cdiv(C, _CHUNKS))](**both, over=over, excess=excess, CHUNKS=_CHUNKS, CHUNK=CHUNK)
        _judge[(n,)](
            **both, over=over, excess=excess, tokens=tokens, seed=accept.seed, particle=accept.particle,
            cycle=accept.cycle, place=accept.place, accept=accept.stream, redraw=redraw.stream, emitted=emitted,
            refused=refused, log_ratio=log_ratio, CHUNK=CHUNK, BLOCK=triton.next_power_of_2(C),
        )  # fmt: skip
    return emitted, refused, log_ratio


@triton.jit
def _overlap(
    q_logits, q_stride, q_inverse_temperature, q_alpha, q_floor, q_words, q_words_stride, r_logits, r_stride,
    r_inverse_temperature, r_alpha, r_floor, r_words, r_words_stride, V, q_norm, r_norm, r_rows, strictness, C, over,
    excess, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sums of (q − r/s)+ and (r − q)+ over CHUNKS chunks of one position.

    Laws as in ``laws._sums``; ``q_norm`` (n,), ``r_norm`` (R,), ``strictness`` (n,) float64, ``r_rows`` (n,) int64;
    out: ``over``, ``excess`` (n, C) float32. q = (¾, ¼), r = (¼, ¾) and s = 1 give ½ and ½.
    """
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(r_rows + i)
    s = tl.load(strictness + i).to(tl.float32)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    q = _law(q_logits, q_stride, q_inverse_temperature, q_alpha, q_floor, q_words, q_words_stride, q_norm, i, token, V)
    r = _law(
        r_logits, r_stride, r_inverse_temperature, r_alpha, r_floor, r_words, r_words_stride, r_norm, row, token, V
    )
    tl.store(over + i * C + chunk, tl.sum(tl.maximum(q - r / s, 0.0), 1), mask=chunk < C)
    tl.store(excess + i * C + chunk, tl.sum(tl.maximum(r - q, 0.0), 1), mask=chunk < C)


@triton.jit
def _judge(
    q_logits, q_stride, q_inverse_temperature, q_alpha, q_floor, q_words, q_words_stride, r_logits, r_stride,
    r_inverse_temperature, r_alpha, r_floor, r_words, r_words_stride, V, q_norm, r_norm, r_rows, strictness, C, over,
    excess, tokens, seed, particle, cycle, place, accept, redraw, emitted, refused, log_ratio, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep or redraw one token, by the sums of :func:`_overlap`.

    As there, with ``tokens``, ``seed``, ``particle``, ``cycle``, ``place`` (n,) int64; out: ``emitted`` (n,) int64,
    ``refused`` (n,) bool, ``log_ratio`` (n,) float64. q = (¾, ¼), r = (¼, ¾), s = 1: token 0 stands with chance ⅓,
    token 1 is drawn in its place, and the ratio is 0.
    """
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(r_rows + i)
    s = tl.load(strictness + i)
    drafted = tl.load(tokens + i)
    item = tl.arange(0, BLOCK)
    overs = tl.load(over + i * C + item, mask=item < C, other=0.0).to(tl.float64)
    excesses = tl.load(excess + i * C + item, mask=item < C, other=0.0).to(tl.float64)
    below, above = tl.sum(overs, 0), tl.sum(excesses, 0)  # 1 − A, D
    refusal = tl.minimum(tl.maximum(below, s * above), 1.0)
    tiny = tl.full([], 1e-300, tl.float64)
    keep = (1.0 - refusal) / tl.maximum(1.0 - below, tiny)
    key, a = tl.load(seed + i), tl.load(particle + i)
    b, c = tl.load(cycle + i), tl.load(place + i)

    q = _law(
        q_logits, q_stride, q_inverse_temperature, q_alpha, q_floor, q_words, q_words_stride, q_norm, i, drafted, V
    )
    r = _law(
        r_logits, r_stride, r_inverse_temperature, r_alpha, r_floor, r_words, r_words_stride, r_norm, row, drafted, V
    )
    q, r = q.to(tl.float64), r.to(tl.float64)
    acceptance = keep * tl.minimum(r / (s * q), 1.0)
    barren = tl.load(r_norm + row) == float("-inf")
    refuse = unit_uniform(key, a, b, c, accept) >= acceptance

    chunk, rest = invert(excesses, item, C - 1, unit_uniform(key, a, b, c, redraw))
    local = tl.arange(0, CHUNK)
    at = chunk * CHUNK + local
    inside_q = _law(
        q_logits, q_stride, q_inverse_temperature, q_alpha, q_floor, q_words, q_words_stride, q_norm, i, at, V
    )
    inside_r = _law(
        r_logits, r_stride, r_inverse_temperature, r_alpha, r_floor, r_words, r_words_stride, r_norm, row, at, V
    )
    found, _ = invert(tl.maximum(inside_r - inside_q, 0.0).to(tl.float64), local, CHUNK - 1, rest)
    again = refuse & (above > 0.0) & (barren == 0)
    q = tl.where(again, tl.sum(tl.where(local == found, inside_q, 0.0), 0).to(tl.float64), q)
    r = tl.where(again, tl.sum(tl.where(local == found, inside_r, 0.0), 0).to(tl.float64), r)

    law = keep * tl.minimum(q, r / s) + tl.maximum(r - q, 0.0) * (refusal / tl.maximum(above, tiny))
    ratio = tl.where(s == 1.0, 0.0, tl.log(r) - tl.log(law))
    tl.store(emitted + i, tl.where(again, (chunk * CHUNK + found).to(tl.int64), drafted))
    tl.store(refused + i, refuse | barren)
    tl.store(log_ratio + i, tl.where(barren, float("-inf"), ratio))


@triton.jit
def _law(logits, stride, inverse_temperature, alpha, floor, words, words_stride, norm, row, token, V):
    """Probabilities at a block of tokens; zeros where the law has no weight."""
    y = log_weights(logits, stride, inverse_temperature, alpha, floor, words, words_stride, row, token, token < V)
    log_norm = tl.load(norm + row).to(tl.float32)
    return tl.exp(y - tl.where(log_norm == float("-inf"), 0.0, log_norm))
