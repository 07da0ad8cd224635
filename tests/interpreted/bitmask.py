"""Masks on logits against their plain definition."""

import torch
from cases import DEVICE

from smcdecode_kernels import reference, triton_kernels


def bits(n, W, seed):
    words = torch.randint(-(2**31), 2**31, (n, W), generator=torch.Generator().manual_seed(seed))
    words[0, 0], words[-1, -1] = -1, 0
    return words.to(torch.int32)


def assert_bitmask(n, V, W, dtype):
    logits = torch.randn(n, V + 3, generator=torch.Generator().manual_seed(V)).to(dtype)
    words = bits(n, W, seed=V)
    expected = logits.clone()
    reference.apply_bitmask(expected[:, :V], words)
    found = logits.to(DEVICE)
    view = found[:, :V]
    assert triton_kernels.apply_bitmask(view, words.to(DEVICE)) is view
    assert torch.equal(found.cpu(), expected)  # what lies between rows included


def check_masks():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for n, V, W in [(1, 1, 1), (3, 40, 2), (2, 64, 3), (2, 4096, 128), (3, 5001, 157)]:
            assert_bitmask(n, V, W, dtype)
    triton_kernels.apply_bitmask(torch.zeros(0, 40, device=DEVICE), torch.zeros(0, 2, dtype=torch.int32, device=DEVICE))
