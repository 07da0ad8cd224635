"""The planner: its mathematics against enumeration, its advice on pairs that are made up, its run on small models."""

from collections import Counter

import numpy as np
import pytest
import torch
from engines import lm
from stats import assert_mean
from table import TableLM, random_table
from test_cli import Letters

import smcdecode as smc
from smcdecode import cli
from smcdecode.infer.exact import enumerate_target
from smcdecode.infer.forecast import Curve, PassTimes, Positions, forecast, marginal_cost, recommend
from smcdecode.infer.strictness import overlap
from smcdecode.planner import timing
from smcdecode.planner.divergence import measure_divergence, split
from smcdecode.planner.plan import LEVELS, Plan
from smcdecode.planner.show import frontier
from smcdecode.potentials.potential import Prompt

V, EOS = 4, 3
P, Q = random_table(1, V, floor=0.5), random_table(2, V, floor=0.5)
p, q = TableLM(P, eos=[EOS], name="p"), TableLM(Q, eos=[EOS], name="q")


# ---- the mathematics


def laws(P, Q, alpha, s):
    """Accepted g, redrawn e − g, local law r and norm Z, by state (V, V); written out with the shipped constants."""
    r = P**alpha
    Z = r.sum(-1)
    r, Z = r / Z[:, None], Z / np.exp(np.log(Z).mean())  # weights are compared at a common length
    log = lambda x: torch.tensor(np.log(x), dtype=torch.float32)  # noqa: E731
    both = overlap(log(Q), log(r), torch.full((V,), s, dtype=torch.float64))
    g = both.keep.numpy()[:, None] * np.minimum(Q, r / s)
    return g, np.maximum(r - Q, 0) * (both.refused / both.excess).numpy()[:, None], r, Z


def cycle(P, Q, alpha, s, K, state=0):
    """Tokens, mean weight and mean squared weight of a cycle of K drafted tokens, over all that can happen."""
    g, redrawn, r, Z = laws(P, Q, alpha, s)
    if K == 0:
        return np.array([1.0, Z[state], Z[state] ** 2])
    total = np.zeros(3)
    for v in range(V):
        w = Z[state] * r[state, v] / (g + redrawn)[state, v]
        n, mean, square = cycle(P, Q, alpha, s, K - 1, v)
        total += redrawn[state, v] * np.array([1, w, w**2]) + g[state, v] * np.array([1 + n, w * mean, w**2 * square])
    return total


@pytest.mark.parametrize("s", [0.2, 1.0])
def test_products_along_texts_of_the_target_are_chances_to_be_kept(s):
    K, n = 3, 1000
    rng = np.random.default_rng(0)
    texts = np.zeros((n, K), dtype=int)
    for k in range(K):
        before = texts[:, k - 1] if k else np.zeros(n, dtype=int)
        texts[:, k] = (rng.random(n)[:, None] > P[before].cumsum(-1)).sum(-1)
    pair = TableLM(P, name="p").as_target(), smc.Draft(TableLM(Q, name="q"))
    found = measure_divergence(*pair, [(Prompt((0,)), tuple(x)) for x in texts.tolist()], [s], lambda: None)[s]
    kept, acceptance = found.kept.reshape(n, K), found.acceptance.reshape(n, K)
    products = np.column_stack([np.ones(n), kept[:, :-1].cumprod(-1)]) * acceptance
    chances = np.diff([cycle(P, Q, 1.0, s, k)[0] for k in range(K + 1)])
    np.testing.assert_allclose(products[:, 0], chances[0], rtol=1e-5)
    assert_mean(products[:, 1:], chances[1:])


@pytest.mark.parametrize(("alpha", "s", "K"), [(1.0, 0.2, 1), (1.0, 0.5, 3), (2.0, 0.2, 2), (2.0, 1.0, 3)])
def test_weights_of_a_cycle_are_those_written_out(alpha, s, K):
    """Where laws do not depend on what was written, as the recursion takes them, it is exact."""
    P0, Q0 = np.tile(P[0], (V, 1)), np.tile(Q[0], (V, 1))
    target, draft = TableLM(P0, name="p") ** alpha, smc.Draft(TableLM(Q0, name="q"), temperature=1.0)
    found = measure_divergence(target, draft, [(Prompt((0,)), (0, 1, 2, 0, 1))], [s], lambda: None)[s]
    _, mean, square = cycle(P0, Q0, alpha, s, K)
    assert found.rho(K) == pytest.approx(square / mean**2, rel=1e-5)
    assert found.acceptance[0] == pytest.approx(cycle(P0, Q0, alpha, s, 1)[0] - 1, rel=1e-5)


def test_means_are_over_places_that_have_enough_text_behind_them():
    text = np.array([0, 0, 0, 1])
    a, half = np.array([0.8, 0.6, 0.4, 0.2]), np.full(4, 0.5)
    found = Positions(text, half, a, half, half, half, np.zeros(4))
    np.testing.assert_allclose(found.survival(2), [0.5, 0.25])  # (0.8+0.6+0.4+0.2)/4; 0.5·(0.6+0.4)/2
    assert found.longest == 3


def test_one_position_is_exact():
    """Acceptance and moments of single positions, for a power: 1 + χ² = Σ r²/e, and at s = 1 all weights are one."""
    target = p**2
    texts = [(Prompt((0,)), (1, 2, 0, 1))]
    found = measure_divergence(target, smc.Draft(q, temperature=1.0), texts, [0.0, 0.3, 1.0], lambda: None)
    r = P**2 / (P**2).sum(-1, keepdims=True)
    states = [0, 1, 2, 0]
    np.testing.assert_allclose(found[1.0].acceptance, np.minimum(r, Q).sum(-1)[states], rtol=1e-5)
    np.testing.assert_allclose(found[1.0].ended + found[1.0].went_on, 1.0, rtol=1e-5)
    np.testing.assert_allclose(found[0.0].went_on, (r**2 / Q).sum(-1)[states], rtol=1e-5)
    np.testing.assert_allclose(found[0.3].log_z, np.log((P**2).sum(-1))[states], rtol=1e-5)
    assert (found[0.3].ended + found[0.3].went_on >= 1 - 1e-6).all()


def test_the_distance_bounds_what_a_drawn_text_is_off():
    """On a small model, where the law of one drawn text can be counted; the bound takes Ẑ to be log-normal."""
    cap = 6
    exact = enumerate_target(p.log_p_next((0,)), lambda x: 0.0, vocab_size=V, eos=frozenset([EOS]), max_tokens=cap)
    made = smc.plan(p, q, [[0]] * 8, max_tokens=cap, seed=0, progress=False)

    def drawn(method, seed):
        runs = smc.sample(p, [[0]] * 3000, method=method, max_tokens=cap, seed=seed, progress=False)
        return Counter(out.sample(on="tokens") for out in runs)

    noise = exact.total_variation(drawn(smc.Autoregressive(), 0))
    off = exact.total_variation(drawn(smc.SMC(smc.Draft(q, 2, strictness=0.0), 2), 0))
    assert 0 < off - noise < made.forecast(2, 2, 0.0).distance


# ---- advice on made-up pairs


FLAT = Curve((1.0,), (0.0,))


def times(target=1.0, draft=0.1, slope=0.0):
    line = lambda seconds: Curve((1.0, 2.0), (seconds, seconds * (1 + slope)))  # noqa: E731
    return PassTimes(line(target), line(draft), FLAT, FLAT, FLAT, FLAT, 0.0)


def positions(acceptance, chi2=1.0, log_z=0.0, n=400):
    """Laws that agree with this acceptance everywhere; weights of this 1 + χ² a token."""
    full = lambda x: np.full(n, float(x))  # noqa: E731
    norm = np.random.default_rng(0).normal(0, log_z, n) if log_z else full(0)
    ended, went_on = full(chi2 * (1 - acceptance)), full(chi2 * acceptance)
    text, kept = np.zeros(n, dtype=np.int64), full(acceptance)
    return Positions(text, kept, kept, ended, went_on, kept, norm)


def made_up(times, divergence, plain=True, twist=0.0):
    return Plan("p", plain, smc.Draft(q), times, divergence, twist, 100)


def divergences(acceptance, rough, log_z=0.0):
    return {0.0: positions(1.0, rough, log_z), 0.5: positions((1 + acceptance) / 2, 1 + (rough - 1) / 50, log_z),
            1.0: positions(acceptance, 1.0, log_z)}  # fmt: skip


def test_a_slow_draft_is_no_draft():
    made = made_up(times(draft=0.9), divergences(0.6, 3.0))
    assert all(f.block == 0 for level, f in made.choices.items() if level != "fast")
    assert isinstance(made.careful, smc.Autoregressive)
    assert any("no draft is the better buy" in line for line in made.verdicts)
    power = made_up(times(draft=0.9), divergences(0.3, 50.0, log_z=0.05), plain=False)
    assert isinstance(power.balanced, smc.SMC) and isinstance(power.balanced.proposal, smc.Local)


def test_a_plain_target_with_a_good_draft_is_one_lossless_chain():
    made = made_up(times(slope=0.05), divergences(0.9, 20.0))  # time grows with the width, as on a CPU
    assert isinstance(made.careful, smc.Speculative)
    assert made.choices["careful"].exact and made.choices["careful"].distance == 0
    assert any("one lossless chain is the better buy" in line for line in made.verdicts)


def test_a_near_perfect_draft_is_carried_as_weight():
    made = made_up(times(), divergences(0.7, 1.0003))
    assert made.choices["fast"].strictness == 0 and made.choices["fast"].block > 4
    assert isinstance(made.fast, smc.SMC) and made.fast.proposal.strictness == 0


def test_a_power_is_given_particles_enough():
    made = made_up(times(), divergences(0.8, 1.5, log_z=0.1), plain=False)
    fast, careful = made.choices["fast"], made.choices["careful"]
    assert careful.particles > fast.particles or careful.strictness > fast.strictness
    assert careful.distance <= LEVELS["careful"] < LEVELS["fast"]


def test_what_cannot_be_had_is_said():
    made = made_up(times(), divergences(0.8, 1.5, log_z=1.0), plain=False, twist=1e4)
    assert made.choices["careful"].distance > LEVELS["careful"]
    assert any("no setting comes within 0.1" in line for line in made.verdicts)
    assert "nearer draft" in made.summary()
    assert "> 1e6" in made_up(times(), divergences(0.8, 1e9)).summary()


def test_speed_is_equation_7_where_every_token_is_kept():
    f = forecast(times(), positions(1.0, 1.2), particles=4, block=4, strictness=0.0, tokens=101, twist=0.0)
    assert f.speedup == pytest.approx(100 / (20 * 1.4)) and f.tokens_per_cycle == 5
    assert f.chi2 == pytest.approx(1.2**4)
    assert f.variance == pytest.approx(101 / 5 * np.log1p((1.2**4 - 1) / 4))


def test_ragged_particles_wait_for_the_last():
    one, many = (
        forecast(times(), positions(0.6), particles=N, block=4, strictness=1.0, tokens=100, twist=0.0) for N in (1, 16)
    )
    tokens = 1 + sum(0.6**k for k in range(1, 5))
    assert one.tokens_per_cycle == many.tokens_per_cycle == pytest.approx(tokens)
    assert many.tokens_per_second < one.tokens_per_second < 1.05 * tokens / 1.4


def test_of_settings_alike_in_speed_the_nearer_one_is_taken():
    base = [made_up(times(), divergences(0.8, 1.01)).forecast(N, 4, 0.0) for N in (1, 2, 4, 32)]
    assert len({f.tokens_per_second for f in base}) == 1
    assert recommend(base, 0.9).particles == 32
    assert recommend(base, 0.0) == base[-1]


def test_curves_are_linear_between_and_beyond():
    line = Curve((1.0, 4.0, 8.0), (1.0, 1.0, 3.0))
    np.testing.assert_allclose(line(np.array([0.0, 1.0, 2.0, 6.0, 10.0])), [0.0, 1.0, 1.0, 2.0, 4.0])
    assert timing.curve({4: [3.0, 1.0, 2.0], 2: [9.0], 1: [1.0, 1.0, 5.0]}) == Curve((1.0, 4.0), (1.0, 2.0))
    assert marginal_cost(times(target=2.0, draft=0.5), 4) == pytest.approx(0.25)


def test_a_frontier_is_what_nothing_beats():
    assert frontier([(1, 0.0), (2, 0.5), (2, 0.4), (1.5, 0.6), (3, 0.4)]) == [(3, 0.4), (1, 0.0)]


# ---- the whole, on small models


@pytest.fixture(autouse=True, scope="module")
def brief():
    """Few timed cycles: nothing here asks how fast it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_LEAST_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def made():
    (_, target), (_, draft) = lm("llama", vocab=16), lm("qwen2", vocab=16, seed=1)
    return smc.plan(target.at(temperature=0.8), draft, [[2, 3, 4], [5, 6]], max_tokens=24, progress=False), target


def test_a_plan_is_shown_and_decodes(made):
    plan, target = made
    assert plan.plain and "llama 0" in plan.target
    text = str(plan)
    assert all(word in text for word in ("fast", "balanced", "careful", "no draft", "acceptance", "tokens/s"))
    assert "<table" in plan._repr_html_() and plan.plot().axes
    for method in (plan.fast, plan.balanced, plan.careful):
        assert smc.sample(target.at(temperature=0.8), [2, 3], method=method, max_tokens=6, seed=0).tokens
    assert 0 < plan.cost < 10
    assert smc.Draft(plan.draft.model, "auto", cost=plan.cost).longest == 16
    assert set(plan.divergence) == {0.0, 0.1, 0.2, 0.5, 1.0}
    widths = plan.times.target.widths
    assert widths[0] == 1 and widths[-1] == 16 * 9


class NoTwo(smc.BasePotential):
    """Forbids the id 2 by its mask."""

    name = "no two"

    def start(self, vocabulary, prompt):
        return vocabulary.size

    def advance(self, state, tokens):
        return state if 2 not in tokens else -state

    def fork(self, state):
        return state

    def log_psi(self, states, complete):
        return [0.0 if state > 0 else float("-inf") for state in states]

    def mask(self, states):
        return torch.arange(abs(states[0]))[None].expand(len(states), -1) != 2


def test_masks_and_rewards_are_told_apart():
    reward = smc.Reward(lambda x: 1.0)
    base, others = split(p**2 * NoTwo() * reward)
    assert [psi.name for psi in base.potentials] == ["no two"] and base.alpha == 2
    assert others.potentials == (reward,) and others.alpha == 1


def test_powers_constraints_and_rewards_are_planned():
    def many(x):
        return 1.5 * x.count(1)

    endless = TableLM(random_table(1, V, floor=0.5), name="endless p")
    target = endless**2 * NoTwo() * smc.potential(many, on="tokens")
    plan = smc.plan(target, TableLM(Q, name="endless q"), [[0], [1]], max_tokens=12, progress=False)
    assert not plan.plain and plan.twist > 0
    exact = plan.forecast(8, 2, 1.0)
    assert exact.variance > np.log1p(plan.twist / 8) > 0  # at s = 1 the weights left are log Z and ψ
    assert all(not isinstance(m, (smc.Speculative, smc.Autoregressive)) for m in (plan.fast, plan.careful))
    assert smc.sample(target, [0], method=plan.balanced, max_tokens=12, seed=0).alive


def test_a_truncated_draft_is_planned_without_reweighting():
    plan = smc.plan(p, smc.Draft(q, top_k=2), [[0]], max_tokens=12, progress=False)
    assert 0.0 not in plan.divergence
    assert all(f.strictness > 0 for f in plan.forecasts)
    assert smc.sample(p, [0], method=plan.fast, max_tokens=6, seed=0).alive


def never(text):
    return float("-inf")


@pytest.mark.parametrize(
    ("target", "prompts", "error", "words"),
    [
        (p.at(temperature=0), [[0]], smc.UnsupportedTarget, "Speculative"),
        (p * smc.potential(never, on="final"), [[0]], smc.UnsupportedTarget, "none of the texts"),
        (p, [], smc.PromptError, "a prompt is"),
        ("p", [[0]], smc.InvalidOption, "smc.load"),
    ],
)
def test_what_cannot_be_planned_is_refused(target, prompts, error, words):
    with pytest.raises(error, match=words):
        smc.plan(target, q, prompts, progress=False)


def test_other_refusals():
    with pytest.raises(smc.InvalidOption, match="max_tokens"):
        smc.plan(p, q, [[0]], max_tokens=1)
    with pytest.raises(smc.InvalidOption, match="prompt lookup"):
        smc.plan(p, smc.Draft(smc.PromptLookup()), [[0]])
    plan = smc.plan(p, q, [[0]], max_tokens=4, progress=False)
    with pytest.raises(smc.InvalidOption, match="longer answers"):
        plan.forecast(4, 90)


def test_the_command_prints_the_table_and_draws(tmp_path, capsys, monkeypatch):
    models = {"p": p, "q": q}
    monkeypatch.setattr(cli, "load", models.__getitem__)
    for model in models.values():
        monkeypatch.setattr(model, "tokenizer", Letters())
    prompts, figure = tmp_path / "prompts.txt", tmp_path / "plan.png"
    prompts.write_text("ab\n\nca\n")
    line = f"plan --target p --draft q --prompts {prompts} --max-tokens 10 --temperature 0.9 --plot {figure}"
    assert cli.main(line.split()) == 0
    out = capsys.readouterr().out
    assert "p.at(temperature=0.9)" in out and "balanced" in out and figure.stat().st_size > 1000
    assert cli.main(["plan", "--target", "p", "--draft", "q", "--prompts", str(tmp_path / "none")]) == cli.FAILED
    assert "cannot read prompts" in capsys.readouterr().err
