"""Triton twins of the plain definitions, for GPUs: the file of a kernel has the name of the file that defines it.

Each function says what the function of the same name there says, and is tested against it. Importing this package
needs triton, whose compiler takes no annotations on a kernel's pointers and numbers.
"""

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise ImportError("the GPU kernels need triton: pip install 'smcdecode[gpu]'") from error

from smcdecode_kernels.triton_kernels.bitmask import apply_bitmask
from smcdecode_kernels.triton_kernels.groups import weigh
from smcdecode_kernels.triton_kernels.laws import draw, floor, score, sums
from smcdecode_kernels.triton_kernels.overlap import judge
from smcdecode_kernels.triton_kernels.pages import clear, grow, select

__all__ = ["apply_bitmask", "clear", "draw", "floor", "grow", "judge", "score", "select", "sums", "weigh"]
