"""The page table against its plain definition, through lives of growing, taking over and giving back."""

import dataclasses

import torch
from cases import DEVICE, generator, moved
from hypothesis import given
from hypothesis import strategies as st

from smcdecode_kernels import groups, pages, triton_kernels
from smcdecode_kernels.pages import Pages

IN_ORDER = DEVICE == "cpu"  # the interpreter runs one program after another


def assert_alike(found, plain):
    """The same table and the same free pages; on a GPU the numbers of pages are a matter of timing."""
    found = Pages(*(getattr(found, field.name).cpu() for field in dataclasses.fields(Pages)))
    found.audit()
    assert torch.equal(found.used, plain.used) and torch.equal(found.left, plain.left)
    assert torch.equal(found.counts.sort().values, plain.counts.sort().values)
    if IN_ORDER:
        assert torch.equal(found.rows, plain.rows) and torch.equal(found.counts, plain.counts)
        n = int(plain.left)
        assert torch.equal(found.free[:n].sort().values, plain.free[:n].sort().values)
        found.free.copy_(plain.free)


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 5, 9]), st.sampled_from([1, 3, 4]))
def check_a_life(seed, S, page_size):
    g = generator(seed)
    plain = Pages.create(S, 160, 200 * S, torch.device("cpu"))
    found = moved(Pages(*(getattr(plain, field.name).clone() for field in dataclasses.fields(Pages))))
    cached, state = torch.zeros(S, dtype=torch.int32), torch.arange(3 * S).view(S, 3)
    for _ in range(3):
        writes = torch.rand(S, generator=g) < 0.8
        length = torch.where(writes, cached + torch.randint(1, 140 if page_size == 1 else 30, (S,), generator=g), 0)
        length = length.clamp_max(160 * page_size).to(torch.int32)
        source, copy = pages.grow(plain, cached, length, page_size)
        other = [x.cpu() for x in triton_kernels.grow(found, moved(cached), moved(length), page_size)]
        assert torch.equal(other[0] > 0, other[1] > 0) and int((other[0] > 0).sum()) == int((source > 0).sum())
        if IN_ORDER:
            assert torch.equal(other[0], source) and torch.equal(other[1], copy)
        assert_alike(found, plain)
        cached = torch.maximum(cached, (length - torch.randint(2, (S,), generator=g)).clamp_min(0).to(torch.int32))
        counts = torch.bincount(torch.randint(S, (S,), generator=g), minlength=S)
        ancestors = groups.settle(counts[None])[0]
        keep = -(-cached // page_size)
        states = [moved(x.clone()) for x in (state, state.double(), state > 4)]
        triton_kernels.select(found, moved(ancestors), moved(keep), tuple(states))
        pages.select(plain, ancestors, keep, (state,))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(states, (state, state.double(), state > 4), strict=True))
        assert_alike(found, plain)
        cached = cached[ancestors]
    gone = torch.rand(S, generator=g) < 0.5
    triton_kernels.clear(found, moved(gone))
    pages.clear(plain, gone)
    assert_alike(found, plain)
