"""Strictness against its plain definition."""

import dataclasses

import torch
from cases import generator, key_of, law_of, moved
from hypothesis import given
from hypothesis import strategies as st

from smcdecode_kernels import laws, overlap, triton_kernels


@given(st.integers(0, 2**32), st.sampled_from([2, 31, 257, 1030]))
def check_judgements(seed, V):
    g = generator(seed)
    n, R = 5, 7
    q, r = law_of(g, n, V), law_of(g, R, V)
    norms = [laws.log_norm(sums.top, sums.total) for sums in (laws.sums(q), laws.sums(r))]
    drafted = laws.draw(q, laws.sums(q), torch.arange(n), key_of(g, n))[0]
    s = torch.rand(n, generator=g, dtype=torch.float64).clamp(0.05)
    s[0] = 1.0
    accept = key_of(g, n, stream=1)
    redraw = dataclasses.replace(accept, stream=2)
    arguments = (q, norms[0], r, norms[1], torch.randint(R, (n,), generator=g), drafted, s, accept, redraw)
    found = triton_kernels.judge(*map(moved, arguments))
    tokens, refused, log_ratio = overlap.judge(*arguments)
    sane = ~(norms[0].isneginf() | norms[0].isnan() | norms[1][arguments[4]].isnan())  # the others were not drafted
    assert torch.equal(found[1].cpu()[sane], refused[sane])
    assert torch.equal(found[0].cpu()[sane], tokens[sane])
    torch.testing.assert_close(found[2].cpu()[sane], log_ratio[sane], rtol=1e-4, atol=1e-4)


def check_no_rows():
    g = generator(0)
    none, number = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
    key = key_of(g, 0)
    q, r = law_of(g, 0, 40), law_of(g, 2, 40)
    arguments = (q, number, r, torch.zeros(2, dtype=torch.float64), none, none, number, key, key)
    assert [x.shape for x in triton_kernels.judge(*map(moved, arguments))] == [(0,)] * 3
