"""How a pass is cut into kernel calls so that a row's bits do not depend on its company. Knows row counts, no layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NARROW", "Cuts", "Rows", "row_parts"]

NARROW, WIDE, WIDE_LEAST = 32, 64, 40  # oneDNN's bfloat16 kernels sum alike for 2 … 32 rows, and for 37 … 64


def row_parts(kin: Tensor) -> tuple[Tensor, ...] | None:
    """How to cut a pass into kernel calls so that each row's bits follow from its own kin alone.

    Kin of up to 32 rows are served together by calls of up to 32 rows, kin of 33 to 64 together by calls of 40 to 64,
    more by themselves: within those bounds oneDNN adds the products of a row in one order.

    Args:
        kin: (T,) int64, rows of one number belong together.

    Returns:
        Packed indices of each call, padded by repetition; None for one call of all rows as they are.
    """
    total = len(kin)
    if total <= NARROW:
        return None
    rows = kin.argsort(stable=True)
    _, counts = torch.unique_consecutive(kin[rows], return_counts=True)
    size = counts.repeat_interleave(counts)  # (T,) how many each row's kin are
    parts = [
        *_chunks(rows[size <= NARROW], NARROW, 1),
        *_chunks(rows[(size > NARROW) & (size <= WIDE)], WIDE, WIDE_LEAST),
    ]
    parts += [part for part in torch.split(rows, counts.tolist()) if len(part) > WIDE]
    return None if len(parts) == 1 and len(parts[0]) == total else tuple(parts)


def _chunks(rows: Tensor, most: int, least: int) -> list[Tensor]:
    """Near-equal chunks of at most ``most`` rows, each padded to at least ``least`` by repeating its last."""
    if not len(rows):
        return []
    chunks = rows.tensor_split(-(-len(rows) // most))
    return [torch.cat([c, c[-1:].expand(max(least - len(c), 0))]) for c in chunks]


class Rows:
    """How the rows of the pass under way are cut into kernel calls; the model sets it, its packed layers read it.

    Attributes:
        total: rows of the pass.
        parts: see :func:`row_parts`.
        alone: by weight shape, type and absence of a bias: whether the kernel for one row agrees with that for more.
    """

    def __init__(self) -> None:
        self.total = 0
        self.parts: tuple[Tensor, ...] | None = None
        self.alone: dict[tuple[tuple[int, ...], torch.dtype, bool], bool] = {}

    def set(self, kin: Tensor) -> None:
        """Cut a pass whose rows belong to ``kin`` (T,)."""
        self.total, self.parts = len(kin), row_parts(kin)

    def grow(self) -> int:
        """Rows to be added to the pass itself, so that none of its layers has to add them to the only call it makes."""
        if self.parts is None or len(self.parts) > 1:
            return 0
        more = len(self.parts[0]) - self.total
        self.total, self.parts = self.total + more, None
        return more


@dataclass(frozen=True)
class Cuts:
    """The cut of all rows of a pass, and that of the rows whose logits are wanted."""

    body: Rows
    head: Rows

    def set(self, kin: Tensor, wanted: Tensor) -> int:
        """Cut a pass over rows of ``kin`` (T,), with logits at ``wanted`` (R,); how many rows to add behind them."""
        self.body.set(kin)
        self.head.set(kin[wanted])
        return self.body.grow()
