"""The Triton twin of ``laws``: knows rows of logits in device memory, not what they mean."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from smcdecode_kernels.laws import CHUNK, Key, Law, Sums
from smcdecode_kernels.triton_kernels.parts import (
    chunks_of,
    empty,
    invert,
    largest,
    law_arguments,
    log_weights,
    unit_uniform,
)

__all__ = ["draw", "floor", "score", "sums"]

_CHUNKS = 8  # chunks a program
_BLOCK = 4096  # tokens a step of the search for a floor


def sums(law: Law, base: bool = False) -> Sums:
    """See :func:`smcdecode_kernels.laws.sums`."""
    R, V = law.logits.shape
    parts = [empty(law.logits, R, chunks_of(V), dtype=torch.float32) for _ in range(4 if base and not law.plain else 2)]
    if R:
        grid = (R, triton.cdiv(chunks_of(V), _CHUNKS))
        _sums[grid](
            **law_arguments(law), top=parts[0], total=parts[1], base_top=parts[2] if parts[2:] else None,
            base_total=parts[3] if parts[2:] else None, C=chunks_of(V), CHUNKS=_CHUNKS, CHUNK=CHUNK,
        )  # fmt: skip
    return Sums(*parts)


@triton.jit
def _sums(
    logits, stride, V, inverse_temperature, alpha, floor, words, words_stride, top, total, base_top, base_total, C,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Partial sums of CHUNKS chunks of one row.

    ``logits`` (R, V) float, ``inverse_temperature``, ``alpha``, ``floor`` (R,) float32, ``words`` (R, W) int32; out:
    ``top``, ``total`` and perhaps ``base_top``, ``base_total`` (R, C) float32. Logits (0, log 2, log 4) at
    temperature 1 give top = log 4 and total = 1.75.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = token < V
    at = row * C + chunk
    y = log_weights(logits, stride, inverse_temperature, alpha, floor, words, words_stride, row, token, inside)
    _store_sums(y, top + at, total + at, chunk < C)
    if base_top is not None:
        y = log_weights(logits, stride, inverse_temperature, None, floor, None, 0, row, token, inside)
        _store_sums(y, base_top + at, base_total + at, chunk < C)


@triton.jit
def _store_sums(y, top, total, inside):
    """Largest and sum of each row of a block (chunks, tokens)."""
    most = tl.max(y, 1)
    over = y - tl.where(most == float("-inf"), 0.0, most)[:, None]
    tl.store(top, most, mask=inside)
    tl.store(total, tl.sum(tl.exp(over), 1), mask=inside)


def draw(law: Law, partial: Sums, rows: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    """See :func:`smcdecode_kernels.laws.draw`."""
    n, C = len(rows), partial.top.shape[1]
    tokens, log_r = empty(rows, n, dtype=torch.int64), empty(rows, n, dtype=torch.float64)
    if n:
        _draw[(n,)](
            **law_arguments(law), top=partial.top, total=partial.total, rows=rows, seed=key.seed, particle=key.particle,
            cycle=key.cycle, place=key.place, stream=key.stream, tokens=tokens, log_r=log_r, C=C,
            CHUNK=CHUNK, BLOCK=triton.next_power_of_2(C),
        )  # fmt: skip
    return tokens, log_r


@triton.jit
def _draw(
    logits, stride, V, inverse_temperature, alpha, floor, words, words_stride, top, total, rows, seed, particle, cycle,
    place, stream, tokens, log_r, C, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token of one row: a chunk by the partial sums, then a token of it.

    ``logits`` … ``words_stride`` as in :func:`_sums`; ``top``, ``total`` (R, C) float32; ``rows``, ``seed``,
    ``particle``, ``cycle``, ``place`` (n,) int64; out: ``tokens`` (n,) int64, ``log_r`` (n,) float64. Weights (1, 2, 1)
    and the uniform 0.5 give token 1 and log ½.
    """
    i = tl.program_id(0)
    row = tl.load(rows + i)
    u = unit_uniform(tl.load(seed + i), tl.load(particle + i), tl.load(cycle + i), tl.load(place + i), stream)
    item = tl.arange(0, BLOCK)
    tops = tl.load(top + row * C + item, mask=item < C, other=float("-inf"))
    totals = tl.load(total + row * C + item, mask=item < C, other=0.0)
    most = largest(tops)
    weights = totals.to(tl.float64) * tl.exp((tops - most).to(tl.float64))
    chunk, rest = invert(weights, item, C - 1, u)
    whole = tl.sum(weights, 0)
    local = tl.arange(0, CHUNK)
    token = chunk * CHUNK + local
    y = log_weights(logits, stride, inverse_temperature, alpha, floor, words, words_stride, row, token, token < V)
    at, _ = invert(tl.exp((y - largest(y)).to(tl.float64)), local, CHUNK - 1, rest)
    norm = tl.log(whole) + most.to(tl.float64)
    found = tl.sum(tl.where(local == at, y, 0.0), 0).to(tl.float64) - norm
    tl.store(tokens + i, tl.where(whole > 0.0, chunk * CHUNK + at, 0).to(tl.int64))
    tl.store(log_r + i, tl.where(whole == 0.0, float("-inf"), found))


def score(law: Law, partial: Sums, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`smcdecode_kernels.laws.score`."""
    R, C = partial.top.shape
    log_pa, log_z = (empty(tokens, R, dtype=torch.float64) for _ in range(2))
    if R:
        _score[(R,)](
            **law_arguments(law), top=partial.top, total=partial.total, base_top=partial.base_top,
            base_total=partial.base_total, tokens=tokens, log_pa=log_pa, log_z=log_z, C=C,
            BLOCK=triton.next_power_of_2(C),
        )  # fmt: skip
    return log_pa, log_z


@triton.jit
def _score(
    logits, stride, V, inverse_temperature, alpha, floor, words, words_stride, top, total, base_top, base_total, tokens,
    log_pa, log_z, C, BLOCK: tl.constexpr,
):  # fmt: skip
    """The log p^α m of one token a row, and log Z, from partial sums.

    As in :func:`_draw`, with ``tokens`` (R,) int64; out: ``log_pa``, ``log_z`` (R,) float64. Weights (1, 2, 1), α = 2
    and token 1 give log ¼ and log ⅜.
    """
    row = tl.program_id(0).to(tl.int64)
    item = tl.arange(0, BLOCK)
    norm = _log_norm(top + row * C, total + row * C, item, C)
    base = norm
    if base_top is not None:
        base = _log_norm(base_top + row * C, base_total + row * C, item, C)
        if alpha is not None:
            base = base * tl.load(alpha + row).to(tl.float64)
    token = tl.load(tokens + row)
    y = log_weights(logits, stride, inverse_temperature, alpha, floor, words, words_stride, row, token, token < V)
    tl.store(log_pa + row, y.to(tl.float64) - base)
    tl.store(log_z + row, norm - base)


@triton.jit
def _log_norm(top, total, item, C):
    """See ``laws.log_norm``, for one row."""
    tops = tl.load(top + item, mask=item < C, other=float("-inf"))
    most = largest(tops)
    totals = tl.load(total + item, mask=item < C, other=0.0).to(tl.float64)
    return tl.log(tl.sum(totals * tl.exp((tops - most).to(tl.float64)), 0)) + most.to(tl.float64)


def floor(logits: Tensor, inverse_temperature: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """See :func:`smcdecode_kernels.laws.floor`; found by bisection over the bits of the threshold, without a sort."""
    R, V = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("the tokens of a row must lie side by side in memory: give contiguous rows")
    result = empty(logits, R, dtype=torch.float32)
    if R:
        kept = V if top_k is None else min(top_k, V)
        share = torch.full((1,), 1.0 if top_p is None else top_p, dtype=torch.float64, device=logits.device)
        _floor[(R,)](
            logits, logits.stride(0), V, inverse_temperature, kept, share, result,
            BY_MASS=top_p is not None and top_p < 1, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return result


@triton.jit
def _floor(logits, stride, V, inverse_temperature, kept, share, result, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The least logit kept in one row, by bisection over floats in order of size.

    ``logits`` (R, V) float, ``inverse_temperature`` (R,) float32, ``share`` (1,) float64; out: ``result`` (R,) float32.
    Logits (4, 1, 3, 2) with kept = 3 and share = 0.9 at temperature 1 give 3.
    """
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride
    scale = tl.load(inverse_temperature + row)
    least, most = _range(row_logits, V, BLOCK)
    low, high = _rank(least), _rank(most) + 1
    if kept < V:
        while high - low > 1:  # at least ``kept`` logits reach the float of rank low; fewer reach that of rank high
            middle = low + (high - low) // 2
            enough = _reach(row_logits, V, _float(middle), BLOCK) >= kept
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    if BY_MASS:
        high = _rank(most) + 1
        wanted = tl.load(share) * _mass(row_logits, V, _float(low), most, scale, BLOCK)
        while high - low > 1:
            middle = low + (high - low) // 2
            enough = _mass(row_logits, V, _float(middle), most, scale, BLOCK) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    tl.store(result + row, _float(low))


@triton.jit
def _rank(x):
    """A float32's place in the order of floats, as int64; both zeros in one place."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, (bits ^ 0x7FFFFFFF) + 1, bits).to(tl.int64)


@triton.jit
def _float(rank):
    """The float32 of a place in the order."""
    rank = rank.to(tl.int32)
    return tl.where(rank < 0, (rank - 1) ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def _range(logits, V, BLOCK: tl.constexpr):
    """Least and largest logit of a row."""
    least = tl.full([], float("inf"), tl.float32)
    most = tl.full([], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < V, other=float("-inf")).to(tl.float32)
        most = tl.maximum(most, tl.max(x, 0))
        least = tl.minimum(least, tl.min(tl.where(token < V, x, float("inf")), 0))
    return least, most


@triton.jit
def _reach(logits, V, threshold, BLOCK: tl.constexpr):
    """How many logits of a row reach a threshold."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < V, other=float("-inf")).to(tl.float32)
        count += tl.sum(((x >= threshold) & (token < V)).to(tl.int32), 0)
    return count


@triton.jit
def _mass(logits, V, threshold, most, scale, BLOCK: tl.constexpr):
    """Weight, over the largest, of the logits of a row that reach a threshold."""
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < V, other=float("-inf")).to(tl.float32)
        mass += tl.sum(tl.where(x >= threshold, tl.exp((x - most) * scale), 0.0).to(tl.float64), 0)
    return mass
