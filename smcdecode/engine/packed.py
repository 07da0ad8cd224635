"""Linear layers packed once for oneDNN's kernels, with a step that follows folded in. Knows rows; no model.

How many rows go into a kernel call is :mod:`smcdecode.engine.cuts`' to say.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from smcdecode.engine.cuts import NARROW, Rows

__all__ = ["Packed", "PackedLinear"]


class Packed:
    """A linear layer whose weight lies packed for oneDNN: y = x Wᵀ + b, then ``swish``, or + or · another tensor.

    Args:
        weight: (out, in) bfloat16 or float32; not kept.
        bias: (out,) or None.
        rows: the pass's cut.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: Rows) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), NARROW)
        self.bias, self.width, self.rows = bias, weight.shape[0], rows
        shape = (tuple(weight.shape), weight.dtype, bias is None)
        if shape not in rows.alone:
            rows.alone[shape] = self._same_alone(weight.shape[1], weight.dtype)
        self.alone = rows.alone[shape]

    @property
    def place(self) -> tuple[int, int]:
        """Address and bytes of the packed weight, which is no ordinary tensor."""
        return torch.ops.mkldnn.data_ptr(self.weight), torch.ops.mkldnn._nbytes(self.weight)

    def _same_alone(self, width: int, dtype: torch.dtype) -> bool:
        """Whether one row gets the bits that it gets beside others; for some shapes oneDNN has another kernel."""
        generator = torch.Generator().manual_seed(0)
        x, other = (torch.randn(NARROW, size, generator=generator).to(dtype) for size in (width, self.width))
        together = self._kernel(x, "none", None), self._kernel(x, "add", other)
        return all(
            torch.equal(self._kernel(x[i : i + 1], "none", None), together[0][i : i + 1])
            and torch.equal(self._kernel(x[i : i + 1], "add", other[i : i + 1]), together[1][i : i + 1])
            for i in range(NARROW)
        )

    def __call__(self, x: Tensor, op: str = "none", other: Tensor | None = None) -> Tensor:
        """Map x (T, in) to (T, out); op is none, swish, add or mul, the last two with ``other`` (T, out)."""
        if self.rows.parts is not None and len(x) == self.rows.total:
            return self._in_parts(self.rows.parts, x, op, other)
        if self.alone or len(x) != 1:
            return self._kernel(x, op, other)
        return self._kernel(x.expand(2, -1), op, None if other is None else other.expand(2, -1))[:1]

    def _in_parts(self, parts: Sequence[Tensor], x: Tensor, op: str, other: Tensor | None) -> Tensor:
        out = x.new_empty(len(x), self.width)
        for part in parts:
            extra = None if other is None else other.index_select(0, part)
            out.index_copy_(0, part, self._kernel(x.index_select(0, part), op, extra))
        return out

    def _kernel(self, x: Tensor, op: str, other: Tensor | None) -> Tensor:
        y: Tensor
        if other is None:
            y = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, op, [], "")
        else:
            y = torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, op)
        return y


class PackedLinear(nn.Module):
    """A module with the signature of ``nn.Linear`` over a :class:`Packed`."""

    def __init__(self, linear: nn.Linear, rows: Rows) -> None:
        super().__init__()
        self.packed = Packed(linear.weight, linear.bias, rows)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (…, in) to (…, out)."""
        flat = x.reshape(-1, x.shape[-1])
        out = self.packed(flat) if len(flat) else flat.new_empty(0, self.packed.width)
        return out.view(*x.shape[:-1], self.packed.width)
