"""A GPU that is not there: its tensors say they lie on it, are computed on the CPU, and refuse to meet CPU tensors.

What may meet is what CUDA allows: copies between devices, numbers (tensors without dimensions), and index tensors.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("meta")  # of all types the one that torch lets a Python class stand in for without its library
COPIES = {torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten.to}
INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}
DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
UNTAGGED = {torch.ops.aten.where.default, torch.ops.aten.repeat_interleave.self_Tensor}  # made of such ones
SYNCS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.item, torch.ops.aten.is_nonzero, torch.ops.aten.equal}


class Far(torch.Tensor):
    """A tensor that says it is on the device; ``near`` has its numbers."""

    @staticmethod
    def __new__(cls, near):
        with torch.inference_mode(near.is_inference()):
            far = torch.Tensor._make_wrapper_subclass(
                cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype,
                device=DEVICE,
            )  # fmt: skip
        far.near = near
        return far

    def __repr__(self):
        return f"Far({self.near!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class Pretend(TorchDispatchMode):
    """Tensors made on ``DEVICE`` are Far. ``syncs`` counts how often the host waited for a number.

    While ``strict``, what a CUDA graph cannot record is an error: the host waits for a number, numbers decide a shape,
    or tensors go from one device to the other.
    """

    def __init__(self):
        super().__init__()
        self.syncs, self.strict = 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.syncs += func.overloadpacket in SYNCS and any(isinstance(x, Far) for x in args)
        if self.strict:
            _check_static(func, args, kwargs)
        return _run(func, args, kwargs)


def _check_static(func, args, kwargs):
    leaves = tree_flatten((args, kwargs))[0]
    if not any(isinstance(x, Far) or x == DEVICE for x in leaves if isinstance(x, torch.Tensor | torch.device)):
        return
    if func.overloadpacket in SYNCS:
        raise RuntimeError(f"{func}: the host waits for the device")
    masks = [x for x in leaves[1:] if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
    indexed = func in INDEXED
    if masks if indexed else (DYNAMIC & set(func.tags) or func in UNTAGGED):
        raise RuntimeError(f"{func}: a shape depends on numbers")
    if func.overloadpacket in COPIES:
        there = {x.device == DEVICE for x in leaves if isinstance(x, torch.Tensor)}
        there |= {x == DEVICE for x in leaves if isinstance(x, torch.device)}
        if len(there) > 1 and any(x.ndim for x in leaves if isinstance(x, torch.Tensor)):
            raise RuntimeError(f"{func}: a tensor goes from one device to the other")


def _run(func, args, kwargs):
    leaves = tree_flatten((args, kwargs))[0]
    device = next((x for x in leaves if isinstance(x, torch.device)), None)
    far = any(isinstance(x, Far) for x in leaves)
    if not far and device != DEVICE:
        return func(*args, **kwargs)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    assert all(isinstance(x, Far) or x.device != DEVICE for x in tensors), f"{func} got a tensor without numbers"
    if func.overloadpacket in COPIES:
        far = device == DEVICE if device else isinstance(tensors[func is torch.ops.aten.to.other], Far)
    elif far:
        _check(func, args, tensors)
    else:
        far = device == DEVICE
    near = tree_map_only(Far, lambda x: x.near, (args, kwargs))
    near_args, near_kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), near)
    out = func(*near_args, **near_kwargs)
    if not far:
        return out
    mine = {id(x.near): x for x in tensors if isinstance(x, Far)}
    return tree_map_only(torch.Tensor, lambda x: mine[id(x)] if id(x) in mine else Far(x), out)


def _check(func, args, tensors):
    if func in INDEXED:
        tensors = [args[0], *args[2:3]]
    strangers = [x for x in tensors if not isinstance(x, Far) and x.ndim]
    if strangers:
        raise RuntimeError(f"{func} meets a CPU tensor of shape {tuple(strangers[0].shape)} on {DEVICE}")
