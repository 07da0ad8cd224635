"""Every coupling emits exactly the target's law, whatever the drafts' law; each accepts as often as it says."""

import pytest
import torch
from coupling_cases import NAMED, output_law, pair, random_pairs, tiled
from stats import assert_frequencies

from smcdecode.errors import InvalidOption
from smcdecode.infer.coupling.catalogue import COUPLINGS, Preference
from smcdecode.infer.coupling.drafting import TOP_PLUS_ONE, WITHOUT_REPLACEMENT
from smcdecode.infer.coupling.global_resolution import GlobalResolution
from smcdecode.infer.coupling.greedy import Greedy
from smcdecode.infer.coupling.kseq import KSeq
from smcdecode.infer.coupling.recursive import RecursiveRejection, RecursiveRejectionWithoutReplacement
from smcdecode_kernels.reference import uniform

EXACT = [RecursiveRejection(), RecursiveRejectionWithoutReplacement(), KSeq(), Greedy(), GlobalResolution()]
DRAWS = 40_000

every_coupling = pytest.mark.parametrize("coupling", EXACT, ids=[c.name for c in EXACT])


def uniforms(rows: int, columns: int, seed: int) -> torch.Tensor:
    one = torch.tensor(0)
    return uniform(torch.tensor(seed), torch.arange(rows)[:, None], torch.arange(columns), one, 0)


@every_coupling
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kind", NAMED)
def test_the_token_has_the_law_of_the_target(coupling, n, kind):
    p, q = pair(kind)
    if n > len(p) and coupling.drafting is not EXACT[0].drafting:
        pytest.skip("more distinct drafts than tokens")
    law, _, _ = output_law(coupling, p[None], q[None], n)
    assert (law - p).abs().max() < 1e-9


@every_coupling
@pytest.mark.parametrize(("V", "n"), [(2, 2), (3, 2), (4, 3), (5, 2), (5, 3)])
def test_random_laws(coupling, V, n):
    p, q = random_pairs(V, 200, seed=n)
    law, hit, chosen = output_law(coupling, p, q, n)
    assert (law - p).abs().max() < 1e-9
    assert (hit >= chosen - 1e-12).all()
    expected = coupling.prepare(p, q, n).expected
    if expected is not None:
        assert (expected - chosen).abs().max() < 1e-9


@every_coupling
@pytest.mark.parametrize("kind", ["ties", "draft has zeros", "target is a point"])
def test_drawn_drafts_and_tokens_have_their_laws(coupling, kind):
    p, q = pair(kind)
    n, V = 2, len(p)
    rows = q.expand(DRAWS, -1)
    drafts = coupling.drafting.draw(rows, uniforms(DRAWS, n, seed=1))
    cells = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    chance = coupling.drafting.probability(q.expand(len(cells), -1), cells)
    assert_frequencies(torch.bincount(drafts[:, 0] * V + drafts[:, 1], minlength=V * V), chance)
    alive = torch.ones_like(drafts, dtype=torch.bool)
    out = tiled(coupling.prepare(p[None], q[None], n), DRAWS).resolve(drafts, alive, uniforms(DRAWS, 2, seed=2))
    assert_frequencies(torch.bincount(out.token, minlength=V), p)
    survives = out.branch >= 0
    assert torch.equal(out.survivors, drafts == out.token[:, None])
    assert (drafts[survives].gather(-1, out.branch[survives, None])[:, 0] == out.token[survives]).all()


@every_coupling
def test_rows_with_different_numbers_alive(coupling):
    """Each row with its own n and its drafts in any of the slots equals the row alone."""
    p, q = random_pairs(5, 60, seed=9)
    alive = torch.tensor([[True, True, True], [False, True, True], [True, False, True], [False, True, False]]).repeat(
        15, 1
    )
    u, v = uniforms(60, 3, seed=3), uniforms(60, 2, seed=4)
    drafts = torch.zeros(60, 3, dtype=torch.int64)
    tokens = []
    for b in range(60):
        n = int(alive[b].sum())
        row = coupling.drafting.draw(q[b : b + 1], u[b : b + 1, :n])
        drafts[b, alive[b]] = row[0]
        whole = torch.ones(1, n, dtype=torch.bool)
        tokens.append(coupling.prepare(p[b : b + 1], q[b : b + 1], n).resolve(row, whole, v[b : b + 1]).token)
    together = coupling.prepare(p, q, alive.sum(-1)).resolve(drafts, alive, v)
    assert torch.equal(together.token, torch.cat(tokens))
    assert not (together.survivors & ~alive).any()


@every_coupling
def test_nothing_to_couple_is_refused(coupling):
    p, q = random_pairs(3, 2, seed=0)
    with pytest.raises(InvalidOption, match="n ≥ 1"):
        coupling.prepare(p, q, torch.tensor([2, 0]))


@pytest.mark.parametrize("drafting", [TOP_PLUS_ONE, WITHOUT_REPLACEMENT], ids=lambda d: d.name)
def test_more_distinct_drafts_than_tokens_are_refused(drafting):
    with pytest.raises(InvalidOption, match="draft fewer chains"):
        drafting.draw(torch.full((1, 2), 0.5, dtype=torch.float64), torch.full((1, 3), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("kind", [k for k in NAMED if len(pair(k)[0]) > 2])
def test_greedy_acceptance_is_that_of_its_formula(kind):
    p, q = pair(kind)
    _, hit, _ = output_law(Greedy(), p[None], q[None], 2)
    top = int(q.argmax())
    rest = q.clone()
    rest[top] = 0.0
    rest = rest / rest.sum() if rest.sum() > 0 else (torch.arange(len(q)) != top).double() / (len(q) - 1)
    assert float(hit) == pytest.approx(float(p[top] + torch.minimum(p, rest).sum()), abs=1e-12)


def test_every_exact_coupling_is_in_the_catalogue():
    assert sorted(COUPLINGS) == sorted(coupling.name for coupling in EXACT)


FLAT = [torch.softmax(torch.tensor(x * 8).double(), -1) for x in ([0.0, 0.5, 1.0, 0.2], [1.0, 0.0, 0.3, 0.8])]
PEAKED = [torch.tensor([a, b] + [(1 - a - b) / 30] * 30).double() for a, b in ((0.5, 0.4), (0.9, 0.0034))]


def test_the_preference_follows_the_laws_of_each_request():
    """The optimal coupling serves flat laws best, greedy drafts a draft sure of itself; the past is forgotten."""
    p, q = (torch.stack([flat, peaked]) for flat, peaked in zip(FLAT, PEAKED, strict=True))
    seen = Preference.start(2)
    assert seen.choice.tolist() == [0, 0]
    for _ in range(20):
        seen = seen.observe(torch.tensor([0, 1]), p, q, 3)
    assert [Preference.CHOICES[i] for i in seen.choice] == ["global resolution", "greedy"]
    for _ in range(60):
        seen = seen.observe(torch.tensor([0]), p[1:], q[1:], torch.tensor([3]))
    assert [Preference.CHOICES[i] for i in seen.choice] == ["greedy", "greedy"]


def test_the_preference_weighs_what_each_choice_accepts():
    p, q = random_pairs(5, 400, seed=12)
    rows = torch.arange(400)
    seen = Preference.start(400).observe(rows, p, q, 2).seen
    _, independent, _ = output_law(GlobalResolution(), p, q, 2)
    _, greedy, _ = output_law(Greedy(), p, q, 2)
    assert (seen[:, 1] - greedy).abs().max() < 1e-9
    assert (seen[:, 0] - independent).min() > -1e-6
    assert (seen[:, 0] - independent).max() < 0.01  # groups of ratios beyond 2^20 are joined
