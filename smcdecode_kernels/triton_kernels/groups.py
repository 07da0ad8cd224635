"""The Triton twin of ``groups``: one program a group of at most 1024 particles."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from smcdecode_kernels.groups import Weighed
from smcdecode_kernels.laws import Key
from smcdecode_kernels.triton_kernels.parts import edges, empty, unit_uniform

__all__ = ["weigh"]

_MOST = 1024  # particles a program holds


def weigh(
    log_w: Tensor,
    increments: Tensor,
    log_z: Tensor,
    may_resample: Tensor,
    threshold: Tensor,
    key: Key,
    stratified: bool,
) -> Weighed:
    """See :func:`smcdecode_kernels.groups.weigh`.

    Raises:
        ValueError: for more than 1024 particles a group.
    """
    G, N = log_w.shape
    if N > _MOST:
        raise ValueError(f"a group of {N} particles: at most {_MOST} fit in one program")
    out = Weighed(
        empty(log_w, G, N, dtype=torch.float64), empty(log_w, G, dtype=torch.float64),
        empty(log_w, G, dtype=torch.float64), empty(log_w, G, dtype=torch.bool), empty(log_w, G, N, dtype=torch.int64),
    )  # fmt: skip
    if G:
        _weigh[(G,)](
            log_w, increments.contiguous(), log_z, may_resample, threshold, key.seed, key.cycle, key.place, key.stream,
            out.log_w, out.ess, out.log_mean, out.resampled, out.ancestors, N, STRATIFIED=stratified,
            BLOCK=triton.next_power_of_2(N),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["N"])  # a 1 would become a constant, which has no type to change
def _weigh(
    log_w, increments, log_z, may_resample, threshold, seed, cycle, place, stream, total, ess, log_mean, resampled,
    ancestors, N, STRATIFIED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One group's weights, evidence and ancestors.

    ``log_w``, ``increments`` (G, N), ``log_z``, ``threshold`` (G,) float64, ``may_resample`` (G,) bool, ``seed``,
    ``cycle``, ``place`` (G,) int64; out: ``total`` (G, N), ``ess``, ``log_mean`` (G,) float64, ``resampled`` (G,) bool,
    ``ancestors`` (G, N) int64. Weights (0, 3, 0, 1) of a group below its threshold give ESS 1.6 and ancestors
    (1, 1, 1, 3).
    """
    g = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < N
    at = g * N + i
    carried = tl.load(log_w + at, mask=inside, other=float("-inf"))
    x = carried + tl.load(increments + at, mask=inside, other=0.0)
    most = tl.max(x, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    w = tl.exp(x - most)
    mass = tl.sum(w, 0)
    tiny = tl.full([], 2.2250738585072014e-308, tl.float64)
    size = mass * mass / tl.maximum(tl.sum(w * w, 0), tiny)
    mean = tl.log(mass) + most - tl.log(N.to(tl.float64))
    low = size < tl.load(threshold + g) * N.to(tl.float64)
    again = tl.load(may_resample + g).to(tl.int1) & (mean != float("-inf")) & low
    alive = mass > 0  # neither 0 nor NaN
    W = tl.where(alive, w / tl.where(alive, mass, 1.0), 0.0)
    counts = tl.where(again, _strata(W, i, N, g, seed, cycle, place, stream, STRATIFIED), 1)
    tl.store(ancestors + at, _settle(tl.where(inside, counts, 0), i, BLOCK).to(tl.int64), mask=inside)
    tl.store(total + at, x, mask=inside)
    tl.store(log_w + at, tl.where(again, 0.0, x), mask=inside)
    tl.store(log_z + g, tl.load(log_z + g) + tl.where(again, mean, 0.0))
    tl.store(ess + g, size)
    tl.store(log_mean + g, mean)
    tl.store(resampled + g, again)


@triton.jit
def _strata(W, i, N, g, seed, cycle, place, stream, STRATIFIED: tl.constexpr):
    """See ``groups.strata``, for one group: int32 offspring."""
    cdf = edges(W) * N.to(tl.float64)
    full = tl.floor(cdf)
    whole = full.to(tl.int32)
    stratum = tl.minimum(whole, N - 1).to(tl.int64) if STRATIFIED else tl.zeros_like(i).to(tl.int64)
    u = unit_uniform(
        tl.load(seed + g), stratum, tl.load(cycle + g) + stratum * 0, tl.load(place + g) + stratum * 0, stream
    )
    below = whole + (u < cdf - full).to(tl.int32)
    return below - tl.where(i > 0, tl.gather(below, tl.maximum(i - 1, 0), 0), 0)


@triton.jit
def _settle(counts, i, BLOCK: tl.constexpr):
    """See ``groups.settle``, for one group."""
    empty = counts == 0
    extras = tl.cumsum(tl.maximum(counts - 1, 0), 0)
    rank = tl.cumsum(empty.to(tl.int32), 0) - 1
    filler = tl.zeros_like(i)  # how many of ``extras``, which rise, are at most ``rank``: bisection
    for halving in tl.static_range(11):
        if BLOCK >> halving > 0:
            ahead = filler + (BLOCK >> halving)
            known = tl.gather(extras, tl.minimum(ahead, BLOCK) - 1, 0)
            filler = tl.where((ahead <= BLOCK) & (known <= rank), ahead, filler)
    return tl.where(empty, tl.minimum(filler, BLOCK - 1), i)
