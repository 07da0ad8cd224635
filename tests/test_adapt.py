"""Blocks and populations that follow a request's past: exact evidence, one answer in any company, and their rules."""

import dataclasses

import numpy as np
import pytest
import torch
from engines import finish, lm, scheduler_of
from stats import assert_mean
from table import TableLM, random_table

import smcdecode as smc
from smcdecode.infer import smc as driver
from smcdecode.infer.adapt import AUTO, FIRST, LONGEST, BlockLengths, best_block
from smcdecode.infer.exact import enumerate_target
from smcdecode.infer.resampling import SCHEMES, offspring
from smcdecode.infer.variance import rebased, relative_variance
from smcdecode.report.document import contents
from smcdecode.report.genealogy import tree

V, EOS, CAP, PROMPT = 3, 2, 8, (0,)
P = random_table(1, V, floor=0.5)
P[:, EOS] *= 0.3
P /= P.sum(-1, keepdims=True)
p = TableLM(P, eos=[EOS], name="p")
q = TableLM(random_table(3, V, floor=0.5), eos=[EOS], name="q")


def odd(x):
    return 1.2 if sum(x) % 2 else -0.3


TARGET = p**2 * smc.potential(odd, on="tokens")
EXACT = enumerate_target(
    p.log_p_next(PROMPT), lambda x: odd(x[:-1] if x[-1] == EOS else x), vocab_size=V, eos=frozenset([EOS]),
    max_tokens=CAP, alpha=2.0,
)  # fmt: skip


def events(x):
    return [1.0, x[0] == 0, x[0] == 1, x[:2] == (1, 0), len(x) == 1, len(x) == 2]


TRUTH = np.exp(EXACT.log_gamma) @ np.array([events(x) for x in EXACT.sequences], dtype=float)
assert TRUTH.min() > 0.02 * TRUTH[0], "rare events make a poor test of means"


def moments(posteriors):
    """(runs, events): Ẑ Σ_i W_i f(x_i)."""
    return np.array([np.exp(o.log_z) * (o.weights @ np.array([events(x) for x in o.tokens])) for o in posteriors])


def runs_of(proposal, scheme="systematic", runs=300, seed=0, particles="auto"):
    method = smc.SMC(proposal, particles=particles, resampling=scheme, threshold=0.9)
    return smc.sample(TARGET, [list(PROMPT)] * runs, method=method, max_tokens=CAP, seed=seed, progress=False)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_evidence_and_posterior_are_unbiased_while_particles_come_and_go(scheme):
    out = runs_of(smc.Local(), scheme)
    assert sum(len({step.particles for step in o.steps}) > 2 for o in out) > len(out) / 2, "N hardly moved"
    assert_mean(moments(out), TRUTH)


@pytest.mark.parametrize("strictness", [0.0, 0.5, "auto"])
@pytest.mark.parametrize("particles", [4, "auto"])
def test_evidence_and_posterior_are_unbiased_while_blocks_change(strictness, particles, monkeypatch):
    monkeypatch.setattr("smcdecode.engine.tuning.FIRST", 1)  # so that short texts see several lengths
    lengths = []
    learn = BlockLengths.learn

    def watched(self, *args):
        lengths.append(learn(self, *args))
        return lengths[-1]

    monkeypatch.setattr(BlockLengths, "learn", watched)
    out = runs_of(smc.Draft(q, "auto", strictness=strictness), particles=particles)
    assert len(torch.cat(lengths).unique()) > 2, "K hardly moved"
    assert_mean(moments(out), TRUTH)


def test_a_wrong_number_of_particles_is_seen(monkeypatch):
    after = driver._State.after
    monkeypatch.setattr(
        driver._State, "after", lambda self, *args: dataclasses.replace(after(self, *args), count=self.count)
    )
    with pytest.raises(AssertionError, match="differs from"):
        assert_mean(moments(runs_of(smc.Local())), TRUTH)


# ---- the real engine


def test_one_seed_gives_one_answer_in_any_company():
    (_, target), (_, draft) = lm("llama", vocab=16), lm("qwen2", vocab=16, seed=1)
    method = smc.SMC(smc.Draft(draft, "auto", strictness=0.3), particles="auto", threshold=0.9)
    prompts = [[2, 3, 4], [5, 6], [7, 8, 9, 10]]
    together = finish(scheduler_of(target**2, method, prompts, max_tokens=24, page_size=3))  # audits the pages
    assert len({cycle.particles for outcome in together for cycle in outcome.cycles}) > 3
    for prompt, outcome in zip(prompts, together, strict=True):
        [alone] = finish(scheduler_of(target**2, method, [prompt], max_tokens=24, page_size=3))
        assert alone.tokens == outcome.tokens and alone.log_z == outcome.log_z
        assert alone.cycles == outcome.cycles


def test_a_posterior_holds_the_particles_there_are():
    out = runs_of(smc.Draft(q, "auto", strictness="auto"), runs=20)
    for o in out:
        assert len(o.tokens) == len(o.weights) == o.steps[-1].particles
        assert all(AUTO.least <= step.particles <= AUTO.most for step in o.steps)
        assert all(sum(a >= 0 for a in step.ancestors) == after.particles
                   for step, after in zip(o.steps, o.steps[1:], strict=False) if step.resampled)  # fmt: skip
        assert o.log_z_variance <= 1 and max(o.origin) < o.N
        assert "particles='auto'" in o.summary()
        assert smc.Posterior.from_json(o.to_json()) == o
    assert out[0].plot() is not None and "particles over" in out[0]._repr_html_()
    assert contents(out[0])["particles"] == max(step.particles for step in out[0].steps)


def test_the_genealogy_holds_every_particle_of_every_cycle():
    for o in runs_of(smc.Local(), runs=20):
        nodes = tree(o)
        for c, step in enumerate(o.steps):
            here = [(n.particles[c - n.first], n.weight[c - n.first]) for n in nodes if n.first <= c <= n.last]
            assert sum(count for count, _ in here) == step.particles
            assert sum(weight for _, weight in here) == pytest.approx(1.0)


# ---- the rules


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("M", [1, 3, 6, 8])
def test_a_scheme_draws_as_many_offspring_as_asked(scheme, M):
    W = torch.tensor([[0.4, 0.0, 0.25, 0.05, 0.3, 0.0, 0.0, 0.0]], dtype=torch.float64).expand(4000, 8)
    u = torch.rand(W.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(M))
    ancestors = SCHEMES[scheme](W, u, torch.full((4000,), M))
    counts = offspring(ancestors)
    assert (counts.sum(-1) == M).all() and ((ancestors >= 0).sum(-1) == M).all()
    slots = torch.arange(8)
    assert ((counts == 0) | (ancestors == slots)).all(), "a survivor left its slot"
    assert_mean(counts.double().numpy(), M * W[0].numpy())


def test_a_population_holds_the_effective_particles():
    ess, count = torch.tensor([8.0, 4.0, 2.0, 0.5, 32.0, 0.0], dtype=torch.float64), torch.tensor([8, 8, 8, 8, 32, 8])
    assert AUTO.following(ess, count).tolist() == [4, 8, 16, AUTO.most, AUTO.least, AUTO.most]


def test_variance_counts_a_changing_population():
    """Multinomial resampling at fixed times to fixed numbers: E[Ẑ² (1 − V)] = Z², for 4, then 7, then 3 particles."""
    runs, sizes, slots = 40_000, (4, 7, 3), 7
    g = torch.Generator().manual_seed(0)
    origin = torch.arange(slots).expand(runs, slots)
    held = (torch.arange(slots) < sizes[0]).expand(runs, slots)
    z, r = torch.ones(runs, dtype=torch.float64), 0.0
    for size, following in zip(sizes, (*sizes[1:], None), strict=True):
        w = (1 + 2 * torch.randint(2, (runs, slots), generator=g)).double() * held
        z = z * w.sum(-1) / size
        W = w / w.sum(-1, keepdim=True)
        if following is None:
            break
        u = torch.rand(runs, slots, dtype=torch.float64, generator=g)
        ancestors = SCHEMES["multinomial"](W, u, torch.full((runs,), following))
        r += np.log(following / (following - 1)) / np.log(slots / (slots - 1))
        held, origin = ancestors >= 0, origin.gather(-1, ancestors.clamp(min=0))
    total = torch.full((runs,), rebased(r, slots, sizes[0], slots), dtype=torch.float64)
    assert_mean((z**2 * (1 - relative_variance(W, origin, total))).numpy(), 2.0 ** (2 * len(sizes)))


@pytest.mark.parametrize(
    ("acceptance", "cost", "loss", "K"),
    [
        (0.0, 0.2, 0.0, 1),  # nothing is kept: as short as can be
        (0.8, 0.2, 0.0, 4),  # the worth of K is 1.8/1.2, 2.44/1.4, 2.952/1.6, 3.362/1.8, 3.689/2: the fourth
        (0.999, 0.01, 0.0, LONGEST),
        (0.999, 0.01, 0.1, 5),  # e^(−0.1·6) is the last above a half
        (0.999, 0.01, 9.0, 1),  # rough weights: short blocks, but never none
        (0.5, 2.0, 0.0, 1),
    ],
)
def test_the_best_block(acceptance, cost, loss, K):
    at = lambda x: torch.tensor([x], dtype=torch.float64)  # noqa: E731
    assert best_block(at(acceptance), cost, at(loss)).item() == K


def test_a_lane_learns_from_its_own_past_and_forgets_it():
    lengths, lanes = BlockLengths.start(2, cost=0.1), torch.tensor([0, 1])
    f = lambda *x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    for _ in range(30):
        K = lengths.learn(lanes, f(32, 8), f(0, 6), f(0.98, 1.0), f(4, 1))
    assert K[0] > FIRST > K[1]
    lengths.forget(torch.tensor([1]))
    fresh = BlockLengths.start(1, cost=0.1).learn(torch.tensor([0]), f(8), f(1), f(1.0), f(1))
    assert lengths.learn(torch.tensor([1]), f(8), f(1), f(1.0), f(1)) == fresh


def test_what_auto_cannot_serve_is_refused(monkeypatch):
    monkeypatch.setitem(SCHEMES, "plain", lambda W, u: SCHEMES["systematic"](W, u))
    with pytest.raises(smc.InvalidOption, match="takes \\(W, u, M\\)"):
        smc.SMC(particles="auto", resampling="plain")
    with pytest.raises(smc.InvalidOption, match='or "auto"'):
        smc.SMC(particles="many")
    with pytest.raises(smc.InvalidOption, match='or "auto"'):
        smc.Draft(q, block="long")
    with pytest.raises(smc.InvalidOption, match='serves block="auto" only'):
        smc.Draft(q, 4, cost=0.3)
    with pytest.raises(smc.InvalidOption, match="positive ratio"):
        smc.Draft(q, "auto", cost=0.0)
