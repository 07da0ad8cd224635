"""The reference kernels against published vectors, transformers' warpers and plain float64 arithmetic."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from stats import assert_frequencies, assert_mean
from transformers import TopKLogitsWarper, TopPLogitsWarper

from smcdecode_kernels.counter import _philox, _philox_numpy, _unit
from smcdecode_kernels.reference import (
    _CHUNK,
    cumulative,
    draw,
    exp_,
    log_,
    log_law,
    log_norm,
    log_softmax_,
    uniform,
)

INF = math.inf
HIGHEST = 1 - 2.0**-53  # the largest double below 1


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def midpoints(n: int) -> torch.Tensor:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


# Random123's kat_vectors, lines "philox4x32 10": counter, key, output
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
@pytest.mark.parametrize(("philox", "array"), [(_philox_numpy, np.array), (_philox, torch.tensor)])
def test_philox_gives_the_published_words(counter, key, output, philox, array):
    words = philox(*(array([w]) for w in counter + key))
    assert [int(w[0]) for w in words] == output


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_uniform_is_the_first_two_words(counter, key, output):
    a, b, c, stream = counter
    seed = np.array([key[1] << 32 | key[0]], dtype=np.uint64).view(np.int64)
    u = uniform(torch.from_numpy(seed), tensor(a), tensor(b), tensor(c), stream)
    assert u.dtype == torch.float64
    assert u.item() == ((output[0] << 20 | output[1] >> 12) + 0.5) / 2**52


def test_uniform_broadcasts_and_counts_modulo_two_to_the_32():
    seed, a, b = tensor(7, -7)[:, None], torch.arange(3), torch.tensor(5)
    u = uniform(seed, a, b, b, 2)
    assert u.shape == (2, 3)
    assert torch.equal(u, uniform(seed, a + 2**32, b - 2**32, b, 2))
    assert u[1, 2] == uniform(torch.tensor(-7), torch.tensor(2), b, b, 2)
    assert len(torch.cat([u, uniform(seed, a, b, b, 3), uniform(seed, a, b, b + 1, 2)]).unique()) == 18


def test_uniform_fills_the_unit_interval():
    u = uniform(tensor(3), torch.arange(200)[:, None], torch.arange(100), tensor(0), 0).flatten()
    assert_frequencies(torch.bincount((u * 64).long(), minlength=64), np.full(64, 1 / 64))
    assert_mean((u[1:] - 0.5) * (u[:-1] - 0.5), 0.0)


def test_uniform_stays_inside_at_both_ends():
    words = np.array([0, 0xFFFFFFFF])
    assert _unit(words, words).tolist() == [2.0**-53, HIGHEST]


@settings(deadline=None)
@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-300, 1e300)), min_size=1, max_size=40))
def test_cumulative_is_flat_at_zero_weights_and_ends_at_one(values):
    weights = torch.tensor(values, dtype=torch.float64) / max(*values, 1.0)
    cdf = cumulative(weights)
    steps = cdf.diff(prepend=cdf.new_zeros(1))
    assert (steps >= 0).all()
    assert (steps[weights == 0] == 0).all()
    assert cdf[-1] == (1.0 if weights.any() else 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("V", [1, 5, _CHUNK, 3 * _CHUNK + 17])
def test_draw_follows_the_weights(V, dtype):
    generator = torch.Generator().manual_seed(V)
    log_w = 2 * torch.randn(V, generator=generator, dtype=dtype) + 40
    log_w[1::3] = -INF
    n = 20_000
    u = uniform(tensor(V), torch.arange(n), tensor(0), tensor(0), 0)
    tokens, norm = draw(log_w.expand(n, V), u)
    assert_frequencies(torch.bincount(tokens, minlength=V), log_w.double().softmax(-1))
    torch.testing.assert_close(norm, log_w.double().logsumexp(-1).expand(n), rtol=1e-8, atol=0)
    assert torch.equal(norm[:3], log_norm(log_w.expand(3, V)))


@pytest.mark.parametrize("V", [7, 1000])
def test_draw_inverts_the_distribution_function(V):
    """At the midpoints of a fine grid every count is within one of its expectation: far finer than chance."""
    log_w = torch.randn(V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    n = 4000
    tokens, _ = draw(log_w.expand(n, V), midpoints(n))
    assert (tokens.diff() >= 0).all()
    assert ((torch.bincount(tokens, minlength=V) - n * log_w.softmax(-1)).abs() < 1 + 1e-9).all()


@pytest.mark.parametrize("u", [2.0**-53, 0.5, HIGHEST])
@pytest.mark.parametrize("V", [3, _CHUNK + 1, 5 * _CHUNK])
def test_draw_never_returns_a_token_of_weight_zero(V, u):
    log_w = torch.full((V, V), -INF).fill_diagonal_(-200.0)  # one living token a row, everywhere once
    tokens, norm = draw(log_w, torch.full((V,), u, dtype=torch.float64))
    assert torch.equal(tokens, torch.arange(V))
    assert (norm == -200).all()


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 600), st.sampled_from([2.0**-53, 0.3, HIGHEST]))
def test_draw_lands_on_weight_under_any_rounding(seed, V, u):
    generator = torch.Generator().manual_seed(seed)
    log_w = 30 * torch.randn(4, V, generator=generator)
    log_w[torch.rand(4, V, generator=generator) < 0.7] = -INF
    log_w[:, seed % V] = 0.0
    tokens, _ = draw(log_w, torch.full((4,), u, dtype=torch.float64))
    assert (log_w.gather(-1, tokens[:, None]) > -INF).all()


@pytest.mark.parametrize("V", [5, 700, 49152])
def test_a_row_does_not_depend_on_the_rows_beside_it(V):
    logits = 3 * torch.randn(7, V, generator=torch.Generator().manual_seed(4))
    u = midpoints(7)

    def decode(rows, u):
        law = log_law(rows, 0.8, 600, 0.95)
        return torch.stack([*draw(law, u), log_norm(rows)])

    alone = torch.cat([decode(logits[i : i + 1], u[i : i + 1]) for i in range(7)], 1)
    assert torch.equal(decode(logits, u), alone)


def test_draw_reports_dead_rows_and_nan_as_values():
    log_w = torch.zeros(4, 600)
    log_w[0] = -INF
    log_w[1, 400] = math.nan
    log_w[2, 3] = INF
    tokens, norm = draw(log_w, torch.full((4,), 0.999, dtype=torch.float64))
    assert tokens.tolist() == [0, 0, 0, 599]
    assert norm[0] == -INF
    assert norm[1:3].isnan().all()
    torch.testing.assert_close(norm[3].item(), math.log(600))
    torch.testing.assert_close(log_norm(log_w), norm, equal_nan=True)


def test_log_law_is_log_softmax_after_temperature():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    law = log_law(logits.bfloat16(), 0.7, None, None)
    assert law.dtype == torch.float32
    torch.testing.assert_close(law.double(), (logits.bfloat16().double() / 0.7).log_softmax(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 3, 40])
def test_laws_normalised_in_place_are_those_of_the_copy_bit_by_bit(n):
    logits = torch.randn(n, 5000, generator=torch.Generator().manual_seed(n)) * 4
    logits[0, 7] = -INF
    expected = log_law(logits, 1.0, None, None)
    found = log_softmax_(logits)
    assert found.data_ptr() == logits.data_ptr() and torch.equal(found, expected)
    damaged = torch.full((1, 8), math.nan)
    assert log_softmax_(damaged).isnan().all()


def test_log_law_at_temperature_zero_takes_the_first_largest():
    assert log_law(torch.tensor([[0.0, 3.0, 3.0]]), 0.0, None, 0.5).tolist() == [[-INF, 0.0, -INF]]


@pytest.mark.parametrize("V", [11, 6000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(4, None), (None, 0.9), (None, 0.05), (300, 0.8), (10**6, 1.0)])
def test_log_law_truncates_as_transformers_does(V, temperature, top_k, top_p):
    logits = 3 * torch.randn(4, V, generator=torch.Generator().manual_seed(2))
    scores = logits / temperature
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None and top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    torch.testing.assert_close(log_law(logits, temperature, top_k, top_p), scores.log_softmax(-1), rtol=1e-5, atol=1e-5)


def test_log_law_keeps_ties_with_the_last_kept():
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    assert (log_law(logits, 1.0, 2, None) > -INF).all()
    assert (log_law(logits, 1.0, None, 0.5) > -INF).all()
    torch.testing.assert_close(log_law(logits, 1.0, None, 0.39).exp(), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))


def test_the_relative_entropy_bound_of_the_assertions_holds():
    """The bound behind assert_frequencies against exact binomial tails: never above it, and not idle."""
    for n, p in ((50, 0.02), (400, 0.3), (2000, 0.5)):
        k = np.arange(n + 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.nan_to_num(k * np.log(k / (n * p))) + np.nan_to_num((n - k) * np.log((n - k) / (n * (1 - p))))
        for level in (4.0, 8.0, 16.0):
            tail = scipy_stats.binom.pmf(k[t >= level], n, p).sum()
            assert tail <= math.exp(-level) * math.e * level


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quick_exponentials_and_logarithms_are_torchs_own(dtype):
    x = torch.tensor([0.0, -1.0, -50.0, -80.0, 3.0], dtype=dtype)
    torch.testing.assert_close(exp_(x.clone()), x.exp())
    torch.testing.assert_close(log_(x.exp()), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quick_exponentials_and_logarithms_know_zero_and_nan(dtype):
    assert exp_(torch.tensor([-INF, -1e4], dtype=dtype)).tolist() == [0.0, 0.0]
    assert log_(torch.zeros(2, dtype=dtype)).tolist() == [-INF, -INF]
    assert exp_(torch.tensor([math.nan], dtype=dtype)).isnan().all() and log_(torch.tensor([math.nan])).isnan().all()
