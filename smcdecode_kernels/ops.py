"""The kernels by name, each where its tensors lie: plain torch on CPUs, Triton on GPUs. Knows devices only.

What an operation does is told by its plain definition, in :mod:`~smcdecode_kernels.laws` (rows of logits),
:mod:`~smcdecode_kernels.overlap` (strictness), :mod:`~smcdecode_kernels.groups` (weights and ancestors),
:mod:`~smcdecode_kernels.pages` (the page table) and :mod:`~smcdecode_kernels.reference` (masks). None of them waits for
the device, or makes a tensor whose shape depends on what another holds.
"""

from collections.abc import Callable
from typing import TypeVar, cast

from torch import Tensor

from smcdecode_kernels import groups, laws, overlap, pages, reference
from smcdecode_kernels.groups import Weighed
from smcdecode_kernels.laws import Key, Law, Sums
from smcdecode_kernels.pages import Pages

__all__ = ["apply_bitmask", "clear", "draw", "floor", "grow", "judge", "score", "select", "sums", "weigh"]

F = TypeVar("F", bound=Callable[..., object])


def _on(x: Tensor, plain: F) -> F:
    """A plain definition, or its twin of the same name if x lies on a GPU."""
    if not x.is_cuda:
        return plain
    from smcdecode_kernels import triton_kernels

    return cast(F, getattr(triton_kernels, plain.__name__))


def apply_bitmask(logits: Tensor, words: Tensor) -> Tensor:
    """See :func:`smcdecode_kernels.reference.apply_bitmask`."""
    return _on(logits, reference.apply_bitmask)(logits, words)


def floor(logits: Tensor, inverse_temperature: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """See :func:`smcdecode_kernels.laws.floor`."""
    return _on(logits, laws.floor)(logits, inverse_temperature, top_k, top_p)


def sums(law: Law, base: bool = False) -> Sums:
    """See :func:`smcdecode_kernels.laws.sums`."""
    return _on(law.logits, laws.sums)(law, base)


def draw(law: Law, partial: Sums, rows: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    """See :func:`smcdecode_kernels.laws.draw`."""
    return _on(law.logits, laws.draw)(law, partial, rows, key)


def score(law: Law, partial: Sums, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`smcdecode_kernels.laws.score`."""
    return _on(law.logits, laws.score)(law, partial, tokens)


def judge(
    q: Law, q_norm: Tensor, r: Law, r_norm: Tensor, r_rows: Tensor, tokens: Tensor, strictness: Tensor, accept: Key,
    redraw: Key,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See :func:`smcdecode_kernels.overlap.judge`."""
    return _on(tokens, overlap.judge)(q, q_norm, r, r_norm, r_rows, tokens, strictness, accept, redraw)


def weigh(
    log_w: Tensor,
    increments: Tensor,
    log_z: Tensor,
    may_resample: Tensor,
    threshold: Tensor,
    key: Key,
    stratified: bool,
) -> Weighed:
    """See :func:`smcdecode_kernels.groups.weigh`."""
    return _on(log_w, groups.weigh)(log_w, increments, log_z, may_resample, threshold, key, stratified)


def select(table: Pages, ancestors: Tensor, keep: Tensor, state: tuple[Tensor, ...]) -> None:
    """See :func:`smcdecode_kernels.pages.select`."""
    _on(ancestors, pages.select)(table, ancestors, keep, state)


def grow(table: Pages, cached: Tensor, length: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """See :func:`smcdecode_kernels.pages.grow`."""
    return _on(cached, pages.grow)(table, cached, length, page_size)


def clear(table: Pages, slots: Tensor) -> None:
    """See :func:`smcdecode_kernels.pages.clear`."""
    _on(slots, pages.clear)(table, slots)
