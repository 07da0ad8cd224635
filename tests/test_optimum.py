"""The best acceptance: sorted prefixes against all subsets and against the linear program."""

import pytest
import torch
from coupling_cases import NAMED, brute_force_optimum, linear_program_optimum, pair, random_pairs, set_law

from smcdecode.infer.coupling.drafting import INDEPENDENT, TOP_PLUS_ONE, WITHOUT_REPLACEMENT
from smcdecode.infer.coupling.optimum import optimal_acceptance

every_drafting = pytest.mark.parametrize(
    "drafting", [INDEPENDENT, TOP_PLUS_ONE, WITHOUT_REPLACEMENT], ids=lambda d: d.name
)


@every_drafting
@pytest.mark.parametrize(("V", "n"), [(2, 2), (3, 2), (4, 2), (4, 3), (5, 2), (5, 3)])
def test_prefixes_reach_the_minimum_over_all_subsets(drafting, V, n):
    p, q = random_pairs(V, 60, seed=20 + n)
    best = optimal_acceptance(p, q, n, drafting)
    brute = [brute_force_optimum(p[b], set_law(drafting, q[b], n)) for b in range(60)]
    assert (best - torch.tensor(brute, dtype=torch.float64)).abs().max() < 1e-10


@every_drafting
@pytest.mark.parametrize("kind", NAMED)
def test_named_laws_reach_the_linear_programs_optimum(drafting, kind):
    p, q = pair(kind)
    if drafting is not INDEPENDENT and (q > 0).sum() < 2:
        pytest.skip("fewer tokens than drafts: what fills up is not drawn from q")
    program = linear_program_optimum(p, set_law(drafting, q, 2))
    assert float(optimal_acceptance(p[None], q[None], 2, drafting)) == pytest.approx(program, abs=1e-9)


def test_one_draft_overlaps_as_much_as_two_laws_do():
    p, q = random_pairs(5, 50, seed=1)
    for drafting in (INDEPENDENT, TOP_PLUS_ONE, WITHOUT_REPLACEMENT):
        assert (optimal_acceptance(p, q, 1, drafting) - torch.minimum(p, q).sum(-1)).abs().max() < 1e-10
    mixed = optimal_acceptance(p, q, torch.arange(50) % 3 + 1)
    alone = torch.cat([optimal_acceptance(p[b : b + 1], q[b : b + 1], b % 3 + 1) for b in range(50)])
    assert torch.equal(mixed, alone)
