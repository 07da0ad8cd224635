"""Adaptive weighted rejection: E[W 1{token = x}] = p(x) ok(x), as a law of its own and inside the engine."""

import itertools

import numpy as np
import pytest
import torch
from constraints import DeadEnds, NoStutter, log_psi
from stats import assert_mean
from table import TableLM, random_table
from test_master import CAP, PROMPT, assert_unbiased, runs_of, without_eos

import smcdecode as smc
from smcdecode.engine import checking
from smcdecode.infer.awrs import draw_checked
from smcdecode.infer.exact import enumerate_target
from smcdecode.infer.resampling import SCHEMES
from smcdecode.potentials.potential import BasePotential
from smcdecode.potentials.predicate import Predicate
from smcdecode_kernels import reference

V = 5
LAW = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
SUBSETS = np.array(list(itertools.product([False, True], repeat=V)))


def orders(law):
    """Every order of drawing without replacement, its probability, and uniforms that lead to it: n rows."""
    perms = np.array(list(itertools.permutations(range(len(law)))))
    probability, u = np.ones(len(perms)), np.zeros(perms.shape)
    for i, perm in enumerate(perms):
        left = law.copy()
        for j, x in enumerate(perm):
            share = left / left.sum()
            u[i, j] = share[:x].sum() + share[x] / 2
            probability[i] *= share[x]
            left[x] = 0
    return probability, torch.from_numpy(u)


@pytest.mark.parametrize("most", range(1, V + 2))
@pytest.mark.parametrize("law", [LAW, np.array([1 - 1e-9, 0.6e-9, 0.4e-9])], ids=["spread", "peaked"])
def test_recursive_is_exact_over_all_orders_and_all_checks(law, most):
    probability, u = orders(law)
    n, V = u.shape
    subsets = np.array(list(itertools.product([False, True], repeat=V)))
    ok = torch.from_numpy(subsets).repeat_interleave(n, 0)  # subsets × orders
    log_weights = torch.from_numpy(np.log(3 * law)).expand(len(ok), V)
    tokens, log_w = draw_checked(
        log_weights, lambda rows, draw, kind: u[rows % n, draw], lambda rows, x: ok[rows, x], most=most
    )
    weighed = probability[:, None] * (log_w.exp()[:, None] * torch.eye(V)[tokens]).numpy().reshape(-1, n, V)
    np.testing.assert_allclose(weighed.sum(1), law * subsets, rtol=1e-9, atol=1e-15)


def uniforms(seed):
    """Draws of a row depend on its number alone."""
    return lambda rows, draw, kind: reference.uniform(torch.tensor(seed), rows, torch.tensor(draw), rows, kind)


@pytest.mark.parametrize("most", [1, 2, 4, 50])
@pytest.mark.parametrize("acceptances", [1, 2, 3, 8])
@pytest.mark.parametrize("ok", [[0, 1, 1, 0, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1], [1, 0, 1, 1, 1]], ids=str)
def test_weights_are_unbiased(ok, acceptances, most):
    n, ok = 20_000, torch.tensor(ok, dtype=torch.bool)
    law = torch.from_numpy(np.log(LAW)).expand(n, V)
    tokens, log_w = draw_checked(law, uniforms(7), lambda rows, x: ok[x], most=most, acceptances=acceptances)
    assert_mean(log_w.exp()[:, None] * torch.eye(V)[tokens], LAW * ok.numpy())


def test_more_acceptances_weigh_more_evenly():
    n, ok = 20_000, torch.tensor([False, True, True, False, True])
    law = torch.from_numpy(np.log(LAW)).expand(n, V)
    spread = [
        float(draw_checked(law, uniforms(1), lambda rows, x: ok[x], most=50, acceptances=A)[1].exp().var())
        for A in (2, 4, 16)
    ]
    assert spread == sorted(spread, reverse=True)


@pytest.mark.parametrize("acceptances", [1, 3])
def test_only_drawn_tokens_are_checked_and_each_refused_one_once(acceptances):
    asked = []

    def check(rows, tokens):
        asked.extend(zip(rows.tolist(), tokens.tolist(), strict=True))
        return tokens >= 900

    log_weights = torch.linspace(1, 0, 1000).log_softmax(-1).expand(64, -1)
    tokens, log_w = draw_checked(log_weights, uniforms(3), check, most=1000, acceptances=acceptances)
    assert (tokens >= 900).all() and torch.isfinite(log_w).all()
    refused = [pair for pair in asked if pair[1] < 900]
    assert len(set(refused)) == len(refused) < 64 * 60


@pytest.mark.parametrize("acceptances", [1, 2])
def test_impossible_rows_have_weight_zero_and_leave_the_others_alone(acceptances):
    log_weights = torch.full((3, V), -torch.inf)
    log_weights[1, 2] = -5.0
    log_weights[2] = torch.from_numpy(np.log(LAW))
    tokens, log_w = draw_checked(log_weights, uniforms(0), lambda rows, x: rows == 1, most=100, acceptances=acceptances)
    assert tokens[1] == 2 and log_w.tolist() == [-np.inf, 0.0, -np.inf]


# ---- through the engine


TABLE = random_table(1, 4, floor=0.5)
p = TableLM(TABLE, eos=[3], name="p")


class Forbidding(NoStutter):
    """The same constraint without a mask; it says that it forbids."""

    hard = True
    mask = BasePotential.mask


class Late(DeadEnds):
    """Forbids what cannot be mended, and says so."""

    hard = True


def no_bb(text):
    return "bb" not in text


def letters(x):
    return "".join(chr(ord("a") + t) for t in x)


@smc.potential(on="tokens")
def odd(x):
    return 0.5 if sum(x) % 2 else -0.3


def vowels(text):
    return text.count("a") - 0.5 * text.count("c")


def hard_log(good):
    return lambda x: 0.0 if good(x) else -np.inf


TARGETS = {
    "no mask": (p * Forbidding(), 1.0, log_psi(NoStutter())),
    "mask ignored": (p * NoStutter(), 1.0, log_psi(NoStutter())),
    "late": (p * Late(), 1.0, log_psi(DeadEnds())),
    "predicate": (p * Predicate(no_bb, on="text"), 1.0, hard_log(lambda x: no_bb(letters(x)))),
    "final predicate": (
        p * Predicate(lambda text: len(text) != 2), 1.0, hard_log(lambda x: len(x) != 2)
    ),
    "mask and predicate": (
        p * NoStutter() * Predicate(no_bb, on="text") * Late(),
        1.0,
        lambda x: log_psi(NoStutter())(x) + log_psi(DeadEnds())(x),
    ),
    "power and reward": (
        p**2 * odd * Forbidding() * smc.Reward(vowels, beta=0.8),
        2.0,
        lambda x: odd(x) + log_psi(NoStutter())(x) + 0.8 * vowels(letters(x)),
    ),
    "truncated": (p.at(top_k=3, temperature=1.3) * Forbidding(), 1.0, log_psi(NoStutter())),
}  # fmt: skip


def oracle_of(name):
    target, alpha, log_psi = TARGETS[name]
    law = p.log_p_next(PROMPT)
    if target.top_k is not None:
        rows = torch.from_numpy(np.log(TABLE))
        truncated = reference.log_law(rows, target.temperature, target.top_k, target.top_p).double().numpy()
        law = lambda x: truncated[(*PROMPT, *x)[-1]]  # noqa: E731
    return enumerate_target(
        law, without_eos(log_psi), vocab_size=4, eos=frozenset([3]), max_tokens=CAP, alpha=alpha
    )  # fmt: skip


def cases():
    ways = [("rejection", 1, 1024), ("rejection", 3, 1024), ("rejection", 1, 2), ("auto", 1, 1024)]
    others = itertools.cycle(itertools.product(SCHEMES, (0.0, 0.5, 1.0)))
    for i, target in enumerate(TARGETS):  # each with two of the ways, neighbours with the others
        for way in ways[i % 2 :: 2]:
            yield (target, *way, *next(others))


@pytest.mark.parametrize(("target", "check", "acceptances", "rejections", "scheme", "threshold"), list(cases()))
def test_evidence_and_posterior_are_unbiased(target, check, acceptances, rejections, scheme, threshold):
    proposal = smc.Local(check=check, acceptances=acceptances, rejections=rejections)
    method = smc.SMC(proposal, particles=4, resampling=scheme, threshold=threshold)
    assert_unbiased(runs_of(TARGETS[target][0], method), oracle_of(target))


@pytest.mark.parametrize("target", ["power and reward"])
def test_a_bridge_changes_no_answer(target):
    method = smc.SMC(smc.Local(check="rejection"), particles=4, threshold=0.9, bridge=3)
    assert_unbiased(runs_of(TARGETS[target][0], method), oracle_of(target))


def even(law, *args, **options):
    """The same draws with the weights forgotten."""
    tokens, log_w = draw_checked(law, *args, **options)
    return tokens, torch.where(torch.isneginf(log_w), log_w, 0.0)


def test_forgotten_weights_are_seen(monkeypatch):
    method = smc.SMC(smc.Local(check="rejection"), particles=4)
    monkeypatch.setattr(checking, "draw_checked", even)
    with pytest.raises(AssertionError, match="differs from"):
        assert_unbiased(runs_of(TARGETS["no mask"][0], method), oracle_of("no mask"))


def test_rejection_asks_for_no_mask_and_writes_no_forbidden_token():
    psi = NoStutter()
    out = smc.sample(p * psi, [0], method=smc.SMC(smc.Local(check="rejection"), particles=8), max_tokens=12, seed=1)
    assert psi.given == 0 and not out.deaths
    assert all(psi.good([t for t in x if t != 3], True) for x in out.tokens)


def test_without_a_mask_particles_die_where_no_check_looks_ahead():
    method = smc.SMC(smc.Local(check="mask"), particles=8)
    assert smc.sample(p * Forbidding(), [0], method=method, max_tokens=12, seed=1).deaths


def test_a_particle_that_is_refused_everything_names_who_refused():
    never = Predicate(lambda text: len(text) < 2, on="text", name="short")
    endless = TableLM(random_table(2, 4), name="endless")
    method = smc.SMC(smc.Local(check="rejection", rejections=3), particles=2)
    out = smc.sample(endless * never, [0], method=method, max_tokens=5, seed=0)
    assert out.log_z == -np.inf
    assert [(death.cause, len(death.tokens)) for death in out.deaths] == [("short", 1)] * 2


def test_draws_depend_on_the_request_alone():
    method = smc.SMC(smc.Local(check="rejection"), particles=3)
    target = TARGETS["mask and predicate"][0]
    alone = smc.sample(target, [1], method=method, max_tokens=6, seed=5)
    for prompts in ([[0], [1], [2]], [[1], [0]]):
        other = smc.sample(target, prompts, method=method, max_tokens=6, seed=5)[prompts.index([1])]
        assert other.tokens == alone.tokens and other.log_z == alone.log_z


def test_soft_targets_draw_as_without_checks():
    runs = [
        smc.sample(p * odd, [0], method=smc.SMC(smc.Local(check=check), particles=4), max_tokens=8, seed=2)
        for check in ("auto", "mask")
    ]
    assert runs[0].tokens == runs[1].tokens and runs[0].log_z == runs[1].log_z


@pytest.mark.parametrize("options", [{"check": "always"}, {"rejections": 0}, {"acceptances": 1.5}])
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(smc.InvalidOption, match=f"{next(iter(options))} must be"):
        smc.Local(**options)
