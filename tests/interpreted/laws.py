"""Sums, draws, scores and floors against their plain definitions."""

import torch
from cases import DEVICE, generator, key_of, law_of, moved, rows_of
from hypothesis import given
from hypothesis import strategies as st

from smcdecode_kernels import laws, triton_kernels

SEEDS, SIZES = st.integers(0, 2**32), st.sampled_from([1, 2, 31, 256, 257, 700, 2049])
CLOSE = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}


@given(SEEDS, SIZES, st.sampled_from([1, 5]), st.booleans())
def check_sums_draws_and_scores(seed, V, R, base):
    g = generator(seed)
    law = law_of(g, R, V)
    plain, found = laws.sums(law, base), triton_kernels.sums(moved(law), base)
    assert_same_weight(plain.top, plain.total, found.top.cpu(), found.total.cpu())
    assert (plain.base_top is None) == (found.base_top is None)
    if plain.base_top is not None:
        assert_same_weight(plain.base_top, plain.base_total, found.base_top.cpu(), found.base_total.cpu())
    rows, key = torch.randint(R, (6,), generator=g), key_of(g, 6, stream=3)
    tokens, log_r = triton_kernels.draw(moved(law), found, rows.to(DEVICE), moved(key))
    expected = laws.draw(law, plain, rows, key)
    assert torch.equal(tokens.cpu(), expected[0])
    torch.testing.assert_close(log_r.cpu(), expected[1], **CLOSE)
    tokens = torch.randint(V, (R,), generator=g)
    scored = triton_kernels.score(moved(law), found, tokens.to(DEVICE))
    for got, want in zip(scored, laws.score(law, plain, tokens), strict=True):
        torch.testing.assert_close(got.cpu(), want, **CLOSE | {"atol": 1e-4})


def assert_same_weight(top, total, other_top, other_total):
    nan = total.isnan()  # what the largest of numbers and NaN is, nobody cares
    assert torch.equal(other_total.isnan(), nan)
    torch.testing.assert_close(other_top[~nan], top[~nan], **CLOSE)
    torch.testing.assert_close(other_total[~nan], total[~nan], **CLOSE)


@given(SEEDS, SIZES, st.none() | st.integers(1, 40), st.sampled_from([None, 0.05, 0.5, 0.9, 0.999, 1.0]))
def check_floors(seed, V, top_k, top_p):
    g = generator(seed)
    logits, inverse = rows_of(g, 3, V), torch.rand(3, generator=g) + 0.5
    found = triton_kernels.floor(logits.to(DEVICE), inverse.to(DEVICE), top_k, top_p)
    assert torch.equal(found.cpu(), laws.floor(logits, inverse, top_k, top_p))


def check_nothing_asked_of_no_rows():
    law = law_of(generator(0), 0, 40)
    empty, key = torch.zeros(0, dtype=torch.int64), key_of(generator(0), 0)
    sums = triton_kernels.sums(moved(law), base=True)
    assert triton_kernels.draw(moved(law), sums, moved(empty), moved(key))[0].shape == (0,)
    assert triton_kernels.score(moved(law), sums, moved(empty))[0].shape == (0,)
    assert triton_kernels.floor(moved(law.logits), moved(law.inverse_temperature), 3, 0.5).shape == (0,)
