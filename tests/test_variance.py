"""The single-run variance estimate against the variance it estimates, on a chain whose Z is known."""

import math

import pytest
import torch
from stats import assert_mean

from smcdecode.infer import resampling, weights
from smcdecode.infer.variance import lineages, multinomial_equivalents, relative_variance, saturated
from smcdecode_kernels.reference import draw, uniform

TRANSITION = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)
WEIGHT = torch.tensor([1.0, 0.6, 0.3], dtype=torch.float64)  # of standing in a state, at every time: bounded


def exact_z(steps: int) -> float:
    mass = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    for _ in range(steps):
        mass = mass @ TRANSITION * WEIGHT
    return mass.sum().item()


def run(scheme, *, runs: int, N: int, steps: int, resample_at: set[int]):
    """Bootstrap particle filters, all runs at once: Ẑ, final weights, first ancestors, multinomial equivalents."""
    state, origin = torch.zeros(runs, N, dtype=torch.int64), torch.arange(N).repeat(runs, 1)
    log_w, log_z = torch.zeros(runs, N, dtype=torch.float64), torch.zeros(runs, dtype=torch.float64)
    equivalents = torch.zeros_like(log_z)
    seed, each, particle = torch.tensor(11), torch.arange(runs)[:, None], torch.arange(N)
    for t in range(steps):
        if t in resample_at:
            log_z += weights.log_mean_exp(log_w)
            W = weights.normalise(log_w)
            ancestors = scheme(W, uniform(seed, each, particle, torch.tensor(t), 0))
            equivalents += multinomial_equivalents(W, ancestors)
            state, origin = state.gather(1, ancestors), origin.gather(1, ancestors)
            log_w = torch.zeros_like(log_w)
        u = uniform(seed, each, particle, torch.tensor(t), 1)
        state = draw(TRANSITION.log()[state.flatten()], u.flatten())[0].view(runs, N)
        log_w = log_w + WEIGHT.log()[state]
    z = (log_z + weights.log_mean_exp(log_w)).exp()
    return z, weights.normalise(log_w), origin, equivalents


@pytest.mark.parametrize("N", [2, 5])
@pytest.mark.parametrize("resample_at", [set(), {1}, {1, 2, 3}], ids=["never", "once", "always"])
def test_expectation_is_the_variance_of_the_evidence(N, resample_at):
    """E[Ẑ² V] = Var Ẑ = E[Ẑ²] − Z², so E[Ẑ² (1 − V)] = Z² (Lee & Whiteley 2018, theorem 1)."""
    z, W, origin, _ = run(resampling.multinomial, runs=40_000, N=N, steps=4, resample_at=resample_at)
    r = torch.full((40_000,), len(resample_at))
    Z = exact_z(4)
    assert_mean(z, Z)
    assert_mean(z**2 * (1 - relative_variance(W, origin, r)), Z**2)


@pytest.mark.parametrize("scheme", resampling.SCHEMES.values(), ids=resampling.SCHEMES)
def test_evidence_is_unbiased_under_every_scheme(scheme):
    z, *_ = run(scheme, runs=20_000, N=5, steps=4, resample_at={1, 3})
    assert_mean(z, exact_z(4))


@pytest.mark.parametrize("scheme", resampling.SCHEMES.values(), ids=resampling.SCHEMES)
def test_equivalents_serve_every_scheme(scheme):
    """The stated approximation: the right size under any scheme, where counting resamplings gives a negative one."""
    z, W, origin, equivalents = run(scheme, runs=40_000, N=8, steps=6, resample_at={3})
    relative = z / exact_z(6)
    estimate = (relative**2 * relative_variance(W, origin, equivalents)).mean()
    assert abs(estimate / relative.var() - 1) < 0.15


def test_a_multinomial_resampling_is_one_equivalent():
    """In the scale it is made for: 1 − Σ(O/N)² is on average (1 − 1/N)(1 − ΣW²)."""
    W = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2], dtype=torch.float64).expand(40_000, 5)
    u = uniform(torch.tensor(1), torch.arange(40_000)[:, None], torch.arange(5), torch.tensor(0), 0)
    equivalents = multinomial_equivalents(W, resampling.multinomial(W, u))
    assert_mean((4 / 5) ** equivalents, (4 / 5))


def test_equivalents_at_the_edges():
    W = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.9, 0.1]], dtype=torch.float64)
    ancestors = torch.tensor([[0, 0], [0, 1], [0, 0]])
    equivalents = multinomial_equivalents(W, ancestors)
    assert equivalents[1] == 0
    assert (relative_variance(W, ancestors, equivalents)[[0, 2]] == 1).all()
    assert multinomial_equivalents(W[:, :1], ancestors[:, :1]).tolist() == [0, 0, 0]


def test_without_resampling_it_is_importance_samplings_own():
    W = weights.normalise(torch.tensor([[0.3, -1.0, 0.0, 2.0]], dtype=torch.float64))
    expected = (4 * W[0]).var(unbiased=True) / 4
    torch.testing.assert_close(relative_variance(W, torch.arange(4)[None], torch.tensor([0]))[0], expected)


def test_one_lineage_says_at_least():
    W = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.0, 0.0]], dtype=torch.float64)
    origin = torch.tensor([[2, 2, 1], [0, 0, 1], [0, 1, 2]])
    assert lineages(W, origin).tolist() == [1, 2, 0]
    assert saturated(W, origin).tolist() == [True, False, True]
    V = relative_variance(W, origin, torch.tensor([9, 1, 1]))
    assert V[0] == 1
    torch.testing.assert_close(V[1].item(), 1 - 1.5**2 * (1 - 0.75**2 - 0.25**2))
    assert V[2].isnan()


def test_a_single_particle_is_saturated():
    one = torch.ones(1, 1, dtype=torch.float64)
    origin = torch.zeros(1, 1, dtype=torch.int64)
    assert saturated(one, origin).item()
    assert relative_variance(one, origin, torch.tensor([3])).item() == 1
    assert not math.isnan(relative_variance(one, origin, torch.tensor([0])).item())
