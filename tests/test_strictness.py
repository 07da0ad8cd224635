"""The strict step: its law, written out, and the bounds of its weights, for every pair of laws."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
