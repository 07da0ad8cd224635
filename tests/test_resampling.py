"""What every resampling scheme promises: unbiased counts, their bounds, no dead parent, survivors in place."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stats import assert_frequencies, assert_mean

from smcdecode.infer.resampling import SCHEMES, keep_in_place, multinomial, offspring, residual, ssp, systematic
from smcdecode_kernels.reference import uniform

HIGHEST = 1 - 2.0**-53
GROUPS = 20_000

every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)

weight_rows = st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1.0)), min_size=1, max_size=17).filter(any)
uniforms = st.one_of(st.sampled_from([2.0**-53, 0.5, HIGHEST]), st.floats(2.0**-53, HIGHEST))


def unit(values: list[float]) -> torch.Tensor:
    W = torch.tensor(values, dtype=torch.float64)
    return W / W.sum()


def random_uniforms(groups: int, N: int, seed: int = 0) -> torch.Tensor:
    one = torch.tensor(0)
    return uniform(torch.tensor(seed), torch.arange(groups)[:, None], torch.arange(N), one, 0)


WEIGHTS = {
    "even": unit([1.0] * 6),
    "halves": unit([3.0, 1.0, 0.0, 3.0, 1.0, 0.0, 0.0, 0.0]),
    "uneven": unit([0.31, 0.02, 0.0, 0.17, 0.24, 0.08, 0.18]),
    "one": unit([1.0]),
    "heavy": unit([100.0, 1.0, 2.0, 3.0, 4.0]),
}


@every_scheme
@pytest.mark.parametrize("W", WEIGHTS.values(), ids=WEIGHTS)
def test_offspring_are_unbiased(scheme, W):
    N = len(W)
    counts = offspring(scheme(W.expand(GROUPS, N), random_uniforms(GROUPS, N)))
    assert (counts.sum(-1) == N).all()
    assert_mean(counts, N * W)


@pytest.mark.parametrize("scheme", [systematic, residual, ssp])
@settings(deadline=None)
@given(row=weight_rows, u=uniforms)
def test_offspring_stay_within_their_bounds(scheme, row, u):
    W = unit(row)
    N = len(row)
    counts = offspring(scheme(W[None], torch.full((1, N), u, dtype=torch.float64)))[0]
    rounding = 1e-12  # N W is only as whole as a float
    assert (counts >= torch.floor(N * W - rounding)).all()
    if scheme is not residual:
        assert (counts <= torch.ceil(N * W + rounding)).all()


@every_scheme
@settings(deadline=None)
@given(row=weight_rows, u=st.lists(uniforms, min_size=17, max_size=17))
def test_a_particle_of_weight_zero_has_no_offspring(scheme, row, u):
    W = unit(row)
    ancestors = scheme(W[None], torch.tensor([u[: len(row)]], dtype=torch.float64))
    assert (W[ancestors[0]] > 0).all()


@every_scheme
def test_groups_do_not_touch_each_other(scheme):
    u = random_uniforms(50, 7, seed=3)
    W = torch.stack([WEIGHTS["uneven"].roll(k) for k in range(50)])
    together = scheme(W, u)
    alone = torch.cat([scheme(W[g : g + 1], u[g : g + 1]) for g in range(50)])
    assert torch.equal(together, alone)
    assert torch.equal(together, scheme(W, u))


@every_scheme
def test_a_dead_group_keeps_everyone(scheme):
    W = torch.stack([torch.zeros(7, dtype=torch.float64), WEIGHTS["uneven"]])
    assert scheme(W, random_uniforms(2, 7))[0].tolist() == list(range(7))


@every_scheme
def test_survivors_stay_in_place(scheme):
    ancestors = scheme(WEIGHTS["uneven"].expand(300, 7), random_uniforms(300, 7))
    assert torch.equal(ancestors, keep_in_place(ancestors))
    alive = offspring(ancestors) > 0
    assert (ancestors == torch.arange(7))[alive].all()


@settings(deadline=None)
@given(st.lists(st.integers(0, 8), min_size=9, max_size=9))
def test_keep_in_place_permutes(row):
    given_row = torch.tensor([row])
    kept = keep_in_place(given_row)
    assert sorted(kept[0].tolist()) == sorted(row)
    assert all(kept[0, i] == i for i in row)
    assert torch.equal(kept, keep_in_place(kept))


def test_multinomial_counts_are_binomial():
    W = WEIGHTS["uneven"]
    counts = offspring(multinomial(W.expand(GROUPS, 7), random_uniforms(GROUPS, 7)))[:, 0]
    p = W[0].item()
    law = [np.prod([(7 - j) / (j + 1) for j in range(k)]) * p**k * (1 - p) ** (7 - k) for k in range(8)]
    assert_frequencies(torch.bincount(counts, minlength=8), law)


def test_ssp_settles_each_meeting_pair_as_evenly_as_it_can():
    """The source of negative association: the first round's pairs (i, i + 4) get their expected sum, to a whole."""
    W = unit([0.3, 0.1, 0.9, 0.4, 0.2, 0.35, 0.5, 0.0])
    counts = offspring(ssp(W.expand(2000, 8), random_uniforms(2000, 8)))
    pairs, shares = counts[:, :4] + counts[:, 4:], 8 * (W[:4] + W[4:])
    assert (pairs >= shares.floor()).all()
    assert (pairs <= shares.ceil()).all()
