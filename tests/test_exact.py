"""The oracle against closed forms: a power of a Markov chain, a constraint, and the laws it must be told apart from."""

import itertools
import math

import numpy as np
import pytest

from smcdecode.errors import InvalidOption, InvalidWeight
from smcdecode.infer.exact import enumerate_target

EOS = frozenset({0})
P = np.array([0.2, 0.5, 0.3])


def iid(prefix):
    assert not EOS & set(prefix), "nothing follows an EOS"
    return np.log(P)


def plain(x):
    return 0.0


def enumerate_iid(log_psi=plain, **options):
    return enumerate_target(iid, log_psi, **{"vocab_size": 3, "eos": EOS, "max_tokens": 3, **options})


def test_every_complete_sequence_once():
    exact = enumerate_iid()
    expected = {
        (*body, *end)
        for n in range(4)
        for body in itertools.product((1, 2), repeat=n)
        for end in ([(0,)] if n < 3 else [()])
    }
    assert len(exact.sequences) == len(expected)
    assert set(exact.sequences) == expected
    assert exact.log_z == pytest.approx(0.0, abs=1e-12)
    assert exact.probabilities[exact.index[1, 2, 0]] == pytest.approx(0.5 * 0.3 * 0.2)
    assert exact.probabilities[exact.index[1, 2, 1]] == pytest.approx(0.5 * 0.3 * 0.5)


def test_power_and_potential_multiply():
    exact = enumerate_iid(lambda x: 0.7 * x.count(2), alpha=2.0)
    a, b, c = P**2 * [1, 1, math.exp(1.4) ** 0.5]
    s = b + c
    assert exact.log_z == pytest.approx(math.log(a * (1 + s + s**2) + s**3))
    assert exact.log_gamma[exact.index[2, 1, 0]] == pytest.approx(math.log(c * b * a))


def test_a_forbidden_sequence_has_probability_zero():
    exact = enumerate_iid(lambda x: 0.0 if x[-1] == 0 else -math.inf)
    assert exact.probabilities[exact.index[1, 1, 1]] == 0
    assert exact.probabilities.sum() == pytest.approx(1)
    assert math.exp(exact.log_z) == pytest.approx(0.2 * (1 + 0.8 + 0.64))


def test_nothing_allowed_is_log_z_minus_infinity():
    exact = enumerate_iid(lambda x: -math.inf)
    assert exact.log_z == -math.inf
    assert not exact.probabilities.any()


def test_impossible_tokens_are_not_listed():
    exact = enumerate_target(
        lambda x: [0.0, -math.inf] if x else [-math.inf, 0.0], plain, vocab_size=2, eos=EOS, max_tokens=9
    )
    assert exact.sequences == [(1, 0)]


def test_total_variation_takes_counts_probabilities_and_strangers():
    exact = enumerate_iid(max_tokens=1)
    assert exact.sequences == [(0,), (1,), (2,)]
    assert exact.total_variation(10 * P) == pytest.approx(0)
    assert exact.total_variation({(1,): 4}) == pytest.approx(0.5)
    assert exact.total_variation({(1,): 1, (7, 7): 1}) == pytest.approx(0.5)
    assert exact.total_variation({(7, 7): 3}) == pytest.approx(1)


@pytest.mark.parametrize("wrong", [[1, 1], [-1, 1, 1], [0, 0, 0], {}, {(9,): -1.0}, [math.nan, 1, 1]])
def test_total_variation_refuses_what_is_no_law(wrong):
    with pytest.raises(InvalidOption, match="positive sum"):
        enumerate_iid(max_tokens=1).total_variation(wrong)


def test_wrong_inputs_are_named():
    with pytest.raises(InvalidOption, match=r"log_p_next\(\) has shape \(3,\)"):
        enumerate_iid(vocab_size=4)
    with pytest.raises(InvalidOption, match="max_tokens"):
        enumerate_iid(max_tokens=0)
    with pytest.raises(InvalidOption, match="sequences to enumerate"):
        enumerate_target(lambda x: np.zeros(2000), plain, vocab_size=2000, eos=EOS, max_tokens=2)
    with pytest.raises(InvalidWeight, match=r"log_psi\(0,\) is nan"):
        enumerate_iid(lambda x: math.nan)
    with pytest.raises(InvalidWeight, match=r"log_p_next\(\) is nan"):
        enumerate_target(lambda x: [math.nan, 0.0], plain, vocab_size=2, eos=EOS, max_tokens=1)
