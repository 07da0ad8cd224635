"""Fan-outs: the closed form is the optimum of its model, and the greedy allocation that of measured tables."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smcdecode.infer.fanout import Outcomes, allocate, geometric, outcome_probabilities, rounded


def misses(F, a, r):
    return float(outcome_probabilities(a, len(F) - 1) @ np.asarray(F, dtype=float) ** -r)


@given(st.floats(0.05, 0.95), st.floats(0.2, 3), st.integers(1, 9), st.floats(5, 60), st.integers(0, 2**31))
def test_no_feasible_perturbation_beats_the_closed_form(a, r, K, B, seed):
    F = geometric(B, K, a, r)
    assert F.sum() == pytest.approx(B)
    best = misses(F, a, r)
    assert best == pytest.approx(B**-r * (outcome_probabilities(a, K) ** (1 / (1 + r))).sum() ** (1 + r))
    moves = np.random.default_rng(seed).standard_normal((20, K + 1)) * F * 0.05
    for G in F + moves - moves.mean(1, keepdims=True):
        assert (G <= 0).any() or misses(G, a, r) >= best - 1e-12


def test_the_closed_form_written_out():
    a, r, K, B = 0.7, 0.5, 3, 20.0
    rho = a ** (1 / (1 + r))
    last = (1 - a) ** (-1 / (1 + r))
    F0 = B / ((1 - rho**K) / (1 - rho) + rho**K * last)
    np.testing.assert_allclose(geometric(B, K, a, r), [F0, F0 * rho, F0 * rho**2, F0 * rho**3 * last])
    np.testing.assert_allclose(geometric(B, K, 0.0, r), [B, 0, 0, 0])
    np.testing.assert_allclose(geometric(B, 0, a, r), [B])


def every_split(B, n):
    return (F for F in itertools.product(range(B + 1), repeat=n) if sum(F) == B)


def value(P, hit, F):
    return sum(p * row[f] for p, row, f in zip(P, hit, F, strict=True))


@given(st.integers(0, 2**31))
def test_greedy_is_the_best_split_of_concave_tables(seed):
    rng = np.random.default_rng(seed)
    n, B = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    P = rng.dirichlet(np.ones(n))
    steps = -np.sort(-rng.dirichlet(np.ones(B + 1), size=n)[:, :B], axis=1)
    hit = np.concatenate([np.zeros((n, 1)), steps.cumsum(1)], 1)
    best = max(value(P, hit, F) for F in every_split(B, n))
    F = allocate(P, hit, B)
    assert F.sum() == B and value(P, hit, F) == pytest.approx(best)


@pytest.mark.parametrize(("a", "r", "K"), [(0.3, 0.4, 1), (0.7, 0.5, 2), (0.9, 1.0, 3), (0.6, 2.0, 3)])
def test_what_was_learnt_is_within_a_hundredth_of_the_best_split(a, r, K):
    """Outcomes drawn from a power law of guesses; the fan-out learnt from them against all fan-outs."""
    rng, B, most = np.random.default_rng(0), 6, 8
    P = outcome_probabilities(a, K)
    hit = np.tile(1 - (np.arange(most + 1) + 1.0) ** -r, (K + 1, 1))
    outcomes = Outcomes(K, most)
    kept = rng.choice(K + 1, size=4000, p=P)
    places = rng.choice(most + 1, size=4000, p=np.append(np.diff(hit[0]), 1 - hit[0, -1]))
    for k, place in zip(kept.tolist(), places.tolist(), strict=True):
        outcomes.observe(k, place)
    learnt = outcomes.fanout(B, K, True)
    assert learnt.sum() == B
    assert value(P, hit, learnt) >= max(value(P, hit, F) for F in every_split(B, K + 1)) - 0.01
    assert value(P, hit, rounded(geometric(B, K, a, r))) <= value(P, hit, learnt) + 0.01


def test_rounding_keeps_the_sum():
    for B in (1, 7, 24):
        for K in (0, 1, 4):
            F = rounded(geometric(B, K, 0.8, 0.5))
            assert F.sum() == B and (abs(F - geometric(B, K, 0.8, 0.5)) < 1).all()


def test_nothing_is_prepared_behind_the_end_of_a_text():
    outcomes = Outcomes(3, 4)
    assert outcomes.fanout(8, 2, False)[-1] == 0
    assert (outcomes.fanout(8, 0, False) == [0]).all()
    for _ in range(40):
        outcomes.observe(1, 0)
    assert outcomes.fanout(8, 2, False)[-1] == 0
    assert outcomes.fanout(8, 3, True).argmax() == 1


def test_behind_a_backup_the_whole_budget_goes_to_the_first_place():
    assert (Outcomes(3, 16, acceptance=0.0).fanout(8, 3, True) == [8, 0, 0, 0]).all()
