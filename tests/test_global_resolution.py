"""Global Resolution: optimal where it is solved in full, exact however coarsely, and as published where that fits."""

import pytest
import torch
from coupling_cases import (
    NAMED,
    every_draft,
    linear_program_optimum,
    output_law,
    pair,
    random_pairs,
    set_law,
)

from smcdecode.errors import InvalidOption
from smcdecode.infer.coupling.drafting import INDEPENDENT
from smcdecode.infer.coupling.global_resolution import GlobalResolution
from smcdecode.infer.coupling.optimum import optimal_acceptance
from smcdecode.infer.coupling.set_softmax import SetSoftmax
from smcdecode.infer.coupling.slot_solver import System, chosen

SHAPES = [(2, 2), (2, 3), (3, 2), (3, 3), (4, 2), (4, 3), (5, 2), (5, 3)]
each_shape = pytest.mark.parametrize(("V", "n"), SHAPES)


@each_shape
def test_acceptance_is_the_linear_programs_optimum(V, n):
    """480 instances in all; the plan's own account of acceptance, optimum and gap agrees with enumeration."""
    p, q = random_pairs(V, 60, seed=40 + n)
    program = torch.tensor(
        [linear_program_optimum(p[b], set_law(INDEPENDENT, q[b], n)) for b in range(len(p))]
    ).double()
    plan = GlobalResolution().prepare(p, q, n)
    law, hit, chosen_mass = output_law(GlobalResolution(), p, q, n)
    assert (law - p).abs().max() < 1e-9
    assert (program - hit).abs().max() < 1e-6
    assert (plan.expected - chosen_mass).abs().max() < 1e-9
    assert (plan.optimum - program).abs().max() < 1e-6
    assert (plan.gap > -1e-9).all()
    assert (plan.gap < 1e-6).all()


@pytest.mark.parametrize("kind", NAMED)
def test_named_laws_reach_the_optimum(kind):
    p, q = pair(kind)
    for n in (2, 3, 4):
        plan = GlobalResolution().prepare(p[None], q[None], n)
        assert float(plan.expected) == pytest.approx(float(optimal_acceptance(p[None], q[None], n)), abs=1e-6)


GROUPED = [GlobalResolution(full=0), GlobalResolution(full=0, coarse=1, fine=2, refinements=0)]


@pytest.mark.parametrize("coupling", GROUPED, ids=["fine", "as coarse as can be"])
@pytest.mark.parametrize(("V", "n"), [(3, 2), (5, 2), (5, 3)])
def test_groups_and_unsolved_weights_cost_acceptance_not_exactness(coupling, V, n):
    p, q = random_pairs(V, 60, seed=60 + n)
    law, hit, _ = output_law(coupling, p, q, n)
    assert (law - p).abs().max() < 1e-9
    best = optimal_acceptance(p, q, n)
    plan = coupling.prepare(p, q, n)
    assert (hit <= best + 1e-9).all()
    assert (plan.optimum >= best - 1e-9).all()
    assert (plan.expected <= hit + 1e-9).all()


@pytest.mark.parametrize("kind", NAMED)
def test_groups_are_exact_on_named_laws(kind):
    p, q = pair(kind)
    for coupling in GROUPED:
        law, _, _ = output_law(coupling, p[None], q[None], 2)
        assert (law - p).abs().max() < 1e-9


@pytest.mark.parametrize("slack", [0.0, 1.0])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_masses_by_quadrature_are_those_of_enumeration(slack, n):
    """Group 0 has weight 0; σ = 0 serves only drafts with another token."""
    generator = torch.Generator().manual_seed(n)
    q = torch.rand(6, dtype=torch.float64, generator=generator)
    q = q / q.sum()
    b = -4.0 * torch.rand(5, dtype=torch.float64, generator=generator)
    one = torch.ones(1, dtype=torch.float64)
    m = chosen(System(P=q[None, 1:], Q=q[None, 1:], rest=q[:1], n=n * one, slack=slack * one), b[None])[0]
    x = every_draft(6, n)
    w = torch.cat([torch.zeros(1).double(), b.exp()])[x]
    slot = w / (slack + w.sum(-1, keepdim=True))
    picked = (q[x].prod(-1, keepdim=True) * slot.nan_to_num(nan=0.0)).flatten()
    assert (torch.zeros(6).double().index_add(0, x.flatten(), picked)[1:] - m).abs().max() < 1e-11


@pytest.mark.parametrize(("noise", "temperature"), [(1.0, 1.0), (1.0, 0.6), (0.4, 1.0)])
def test_a_large_vocabulary_comes_close_to_the_optimum(noise, temperature):
    generator = torch.Generator().manual_seed(0)
    target = -1.1 * torch.arange(1, 20_001, dtype=torch.float64).log()
    draft = target + noise * torch.randn(2, 20_000, dtype=torch.float64, generator=generator)
    p, q = (target / temperature).softmax(-1).expand(2, -1), (draft / temperature).softmax(-1)
    for n in (2, 4, 8):
        plan = GlobalResolution().prepare(p, q, n)
        best = optimal_acceptance(p, q, n)
        assert (plan.gap >= best - plan.expected - 1e-12).all()
        assert (plan.gap < 2e-3).all()


def test_a_truncated_draft_in_a_large_vocabulary():
    """What the draft never proposes stays out of reach, and the plan's optimum knows it."""
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(1, 5000, dtype=torch.float64, generator=generator).mul(3).softmax(-1) for _ in range(2))
    p = 0.8 * q + 0.2 * p
    q = q.masked_fill(q < q.topk(20).values[:, -1:], 0.0)
    q = q / q.sum(-1, keepdim=True)
    plan = GlobalResolution().prepare(p, q, 3)
    assert float(plan.optimum) == pytest.approx(float(optimal_acceptance(p, q, 3)), abs=1e-3)
    assert float(plan.optimum) < float(p[q > 0].sum()) + 1e-12
    assert float(plan.gap) < 2e-3


@each_shape
def test_the_published_form_is_optimal_where_it_leaves_nothing_out(V, n):
    p, q = random_pairs(V, 10, seed=80 + n)
    coupling = SetSoftmax(top_k=V)
    law, hit, _ = output_law(coupling, p, q, n)
    assert (law - p).abs().sum(-1).max() < 1e-6
    assert (hit - optimal_acceptance(p, q, n)).abs().max() < 1e-6
    assert coupling.prepare(p, q, n).left_out.max() < 1e-12


def test_the_published_truncation_is_approximate_within_its_bound():
    p, q = random_pairs(5, 30, seed=90)
    coupling = SetSoftmax(top_k=3, iterations=200)
    law, hit, _ = output_law(coupling, p, q, 2)
    off, left_out = (law - p).abs().sum(-1), coupling.prepare(p, q, 2).left_out
    assert (off <= 15 * left_out + 1e-6).all()
    assert (hit >= optimal_acceptance(p, q, 2) - 10 * left_out - 1e-6).all()
    assert (off > 1e-3).any()


def test_a_draft_truncated_to_the_published_tokens_is_served_in_full():
    p, q = random_pairs(5, 15, seed=91)
    q = q.scatter(-1, q.topk(2, largest=False).indices, 0.0)
    q = q / q.sum(-1, keepdim=True)
    law, _, _ = output_law(SetSoftmax(top_k=3), p, q, 3)
    assert (law - p).abs().sum(-1).max() < 1e-6


def test_too_many_sets_are_refused():
    p, q = (torch.full((1, 60), 1 / 60, dtype=torch.float64) for _ in range(2))
    with pytest.raises(InvalidOption, match="GlobalResolution"):
        SetSoftmax(top_k=50).prepare(p, q, 4)
