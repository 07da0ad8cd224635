"""The strict step: its law, written out, and the bounds of its weights, for every pair of laws."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smcdecode.engine.judging import _Pairs
from smcdecode.infer.strictness import overlap, retune

V = 5


@st.composite
def laws(draw):
    """A law over V tokens, zeros included."""
    mass = np.array(draw(st.lists(st.sampled_from([0.0, 1e-4, 0.1, 0.5, 1.0, 3.0]), min_size=V, max_size=V)))
    mass[draw(st.integers(0, V - 1))] += 1.0
    return mass / mass.sum()


def emitted(q, r, s):
    """Acceptance a (V,), law of the emitted token e (V,), and the weights r/e (V,) as the overlap gives them."""
    with np.errstate(divide="ignore"):
        log_q, log_r = (torch.tensor(np.log(law), dtype=torch.float32)[None].expand(V, V) for law in (q, r))
    both = overlap(log_q, log_r, torch.full((len(log_q),), s, dtype=torch.float64))
    every = torch.arange(V)
    accept = np.where(q > 0, np.nan_to_num(both.acceptance(every).numpy()), 0.0)
    redraw = both.redraw_log_weights(every)[0].double().exp().numpy()
    refused = 1.0 - (q * accept).sum()
    e = q * accept + (refused * redraw / redraw.sum() if redraw.sum() > 0 else refused * q)
    return accept, e, both.log_ratio(every).exp().numpy()


@given(laws(), laws(), st.sampled_from([0.01, 0.2, 0.5, 0.9, 1.0]))
def test_weights_are_r_over_e_and_lie_between_s_and_its_inverse(q, r, s):
    accept, e, weight = emitted(q, r, s)
    assert ((accept >= 0) & (accept <= 1)).all()
    assert (e[r > 0] > 0).all(), "a token that the target writes is never emitted"
    possible = (r > 0) & (e > 0)
    np.testing.assert_allclose(weight[possible], (r / np.where(possible, e, 1.0))[possible], rtol=1e-4)
    assert (weight[possible] >= s * (1 - 1e-4)).all()
    assert (weight[possible] <= (1 + 1e-4) / s).all()


@given(laws(), laws())
def test_strictness_one_is_lossless(q, r):
    _, e, weight = emitted(q, r, 1.0)
    np.testing.assert_allclose(e, r, atol=1e-6)
    assert (weight == 1.0).all()


@pytest.mark.parametrize("s", [0.1, 0.5, 1.0])
def test_a_draft_that_is_the_target_is_never_refused(s):
    law = np.full(V, 1 / V)
    accept, _, weight = emitted(law, law, s)
    np.testing.assert_allclose(accept, 1.0, atol=1e-6)
    np.testing.assert_allclose(weight, 1.0, atol=1e-6)


def test_automatic_strictness_rises_after_uneven_weights_and_stays_in_bounds():
    s = torch.tensor([0.2, 0.2, 1.0, 0.02], dtype=torch.float64)
    efficiency = torch.tensor([0.3, 0.95, 0.1, 1.0], dtype=torch.float64)
    moved = retune(s, efficiency)
    assert moved[0] > 0.2 > moved[1]
    assert moved[2] == 1.0 and moved[3] == 0.02


def test_a_token_judged_at_strictness_1_has_one_chance_whatever_is_judged_beside_it():
    """It is min(1, r/q) of two numbers, and the overlap's c min(1, r/q) to rounding."""
    m, rng = 200, torch.Generator().manual_seed(0)
    law, log_q = (torch.randn(m, 40, generator=rng).log_softmax(-1) for _ in range(2))
    tokens, rows, zero = torch.randint(40, (m,), generator=rng), torch.arange(m), torch.zeros(m, dtype=torch.int64)
    block = SimpleNamespace(laws=log_q[:, None], columns=None)

    def chance(strictness):
        s = torch.full((m,), 1.0, dtype=torch.float64).index_fill(0, rows[m // 2 :], strictness)
        return _Pairs(block, law, rows, torch.zeros(m, dtype=torch.float64), s, rows, zero).compare(tokens)[0]

    alone, beside = chance(1.0), chance(0.3)
    assert torch.equal(alone[: m // 2], beside[: m // 2]) and not torch.equal(alone, beside)
    both = overlap(log_q, law, torch.ones(m, dtype=torch.float64))
    torch.testing.assert_close(alone, both.acceptance(tokens), atol=1e-6, rtol=1e-6)
