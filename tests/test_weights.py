"""Log-weight sums against plain arithmetic, at the extremes a decoder meets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smcdecode.infer.weights import chi2_plus_one, ess, log_mean_exp, log_sum_exp, normalise

INF = math.inf


def chi2_of_even(log_increments):
    return chi2_plus_one(log_increments, torch.zeros_like(log_increments))


FUNCTIONS = [log_sum_exp, log_mean_exp, normalise, ess, chi2_of_even]


def groups(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@settings(deadline=None)
@given(st.lists(st.one_of(st.just(-INF), st.floats(-20, 20)), min_size=1, max_size=12))
def test_against_plain_arithmetic(values):
    w = [math.exp(v) for v in values]
    total, squares = sum(w), sum(x * x for x in w)
    log_w = groups(values)
    expected_ess = total**2 / squares if total else 0.0
    torch.testing.assert_close(log_sum_exp(log_w).exp().item(), total)
    torch.testing.assert_close(log_mean_exp(log_w).exp().item(), total / len(w))
    torch.testing.assert_close(normalise(log_w)[0].tolist(), [x / total if total else 0.0 for x in w])
    torch.testing.assert_close(ess(log_w).item(), expected_ess)
    torch.testing.assert_close(chi2_of_even(log_w).item(), len(w) / expected_ess if total else INF)


@pytest.mark.parametrize("shift", [-1e5, 0.0, 1e5])
def test_equal_weights_are_exact_at_any_scale(shift):
    log_w = torch.full((3, 8), shift, dtype=torch.float64)
    assert (ess(log_w) == 8).all()
    assert (normalise(log_w) == 1 / 8).all()
    assert (chi2_of_even(log_w) == 1).all()
    torch.testing.assert_close(log_mean_exp(log_w), log_w[:, 0])


def test_a_dead_group_is_a_value():
    log_w = groups([-INF, -INF], [0.0, -INF])
    assert log_sum_exp(log_w).tolist() == [-INF, 0.0]
    assert log_mean_exp(log_w).tolist() == [-INF, -math.log(2)]
    assert normalise(log_w).tolist() == [[0.0, 0.0], [1.0, 0.0]]
    assert ess(log_w).tolist() == [0.0, 1.0]
    assert chi2_of_even(log_w).tolist() == [INF, 2.0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nan_stays_nan_and_in_its_group(function):
    out = function(groups([math.nan, 0.0], [-INF, math.nan], [0.0, 0.0]))
    assert out[:2].isnan().all()
    assert not out[2].isnan().any()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_float64_in_and_out(function):
    assert function(torch.zeros(2, 3, dtype=torch.float64)).dtype == torch.float64


def test_chi2_weighs_each_particle_by_what_it_carried():
    log_w = torch.tensor([[0.0, -torch.inf, math.log(3.0)]], dtype=torch.float64)
    w = torch.tensor([[2.0, 7.0, 0.5]], dtype=torch.float64)
    carried = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64)
    expected = (carried * w[0] ** 2).sum() / (carried * w[0]).sum() ** 2
    torch.testing.assert_close(chi2_plus_one(w.log(), log_w)[0], expected)
