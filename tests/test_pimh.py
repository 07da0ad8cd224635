"""Metropolis–Hastings over runs: the right law if E[Ẑ] = Z, the wrong one if not, and how far it has got."""

import math

import numpy as np
import pytest
import torch
from stats import assert_frequencies

from smcdecode.infer.pimh import Chain, accept, remaining_bias

Q = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64)  # proposal of one particle
GAMMA = torch.tensor([0.1, 0.6, 0.0, 0.3, 0.0], dtype=torch.float64)
CHAINS, SWEEPS, PARTICLES = 20_000, 40, 2


def runs(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """CHAINS importance-sampling runs of two particles: log Ẑ and an answer drawn in proportion to the weights."""
    x = torch.multinomial(Q, CHAINS * PARTICLES, replacement=True, generator=generator).view(CHAINS, PARTICLES)
    w = GAMMA[x] / Q[x]
    pick = torch.multinomial(w + (w.sum(-1, keepdim=True) == 0), 1, generator=generator)
    return w.mean(-1).log(), x.gather(-1, pick)[:, 0]


def answers(distort) -> torch.Tensor:
    """Counts of the chains' states when log Ẑ is reported as distort(log Ẑ)."""
    generator = torch.Generator().manual_seed(5)
    log_z, state = runs(generator)
    log_z = distort(log_z)
    for _ in range(SWEEPS):
        proposed, other = runs(generator)
        proposed = distort(proposed)
        moves = accept(log_z, proposed, torch.rand(CHAINS, dtype=torch.float64, generator=generator))
        log_z, state = torch.where(moves, proposed, log_z), torch.where(moves, other, state)
    return torch.bincount(state, minlength=5)


def test_the_answers_have_the_law_of_the_target():
    assert_frequencies(answers(lambda log_z: log_z), GAMMA / GAMMA.sum())


def test_a_wrong_evidence_is_noticed():
    with pytest.raises(AssertionError, match="diverge"):
        assert_frequencies(answers(lambda log_z: 0.5 * log_z), GAMMA / GAMMA.sum())


def test_dead_runs_are_left_and_never_entered():
    dead, alive, u = (torch.tensor(x, dtype=torch.float64) for x in (-math.inf, -3.0, 0.5))
    assert accept(dead, alive, u)
    assert accept(dead, dead, u)
    assert not accept(alive, dead, u)


def test_a_chain_counts_its_moves():
    chain = Chain.start(0.0, "a")
    assert math.isnan(chain.acceptance)
    assert chain.remaining_bias == 1.0
    moved = chain.step(math.log(2), "b", 0.9)
    stayed = moved.step(0.0, "c", 0.6)
    assert (chain.state, moved.state, stayed.state) == ("a", "b", "b")
    assert stayed.runs == (0.0, math.log(2), 0.0)
    assert stayed.acceptance == 0.5
    assert stayed.proposals == 2


WEIGHTS = np.array([0.0, 0.5, 0.5, 1.0, 2.0, 4.0, 8.0, 0.25])  # of eight equally likely runs


def _kernel(w: np.ndarray) -> np.ndarray:
    """Transition matrix of the chain over the eight runs."""
    moves = np.minimum(1.0, np.divide(w, w[:, None], out=np.full((8, 8), np.inf), where=w[:, None] > 0)) / 8
    return moves + np.diag(1 - moves.sum(1))


@pytest.mark.parametrize("k", [1, 2, 5, 20])
def test_remaining_bias_is_the_chance_not_to_have_met_and_bounds_the_distance(k):
    pi = WEIGHTS / WEIGHTS.sum()
    far = 0.5 * np.abs(np.full(8, 1 / 8) @ np.linalg.matrix_power(_kernel(WEIGHTS), k) - pi).sum()
    stay = np.array([np.mean(np.maximum(0.0, 1 - WEIGHTS / w)) if w > 0 else 0.0 for w in WEIGHTS])
    apart = sum(pi[y] / 8 * max(stay[x], stay[y]) ** k for x in range(8) for y in range(8))
    bound = remaining_bias(np.log(WEIGHTS, out=np.full(8, -np.inf), where=WEIGHTS > 0).tolist(), k)
    assert bound == pytest.approx(apart, abs=1e-12)
    assert far <= bound + 1e-12


def test_bias_of_even_weights_is_none_and_of_dead_runs_all():
    assert remaining_bias([-2.0] * 5, 1) == 0.0
    assert remaining_bias([-math.inf] * 3, 2) == 1.0
    assert remaining_bias([-1.0, -2.0], 0) == 1.0
