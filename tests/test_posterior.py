"""What a posterior answers, how honest it is about itself, and that nothing is lost on the way to a file."""

import dataclasses
import io
import json
import math
import pickle
import sys
import time

import numpy as np
import pytest
from stats import assert_frequencies, assert_mean
from table import TableLM, random_table

import smcdecode as smc
from smcdecode.engine.stats import Stats
from smcdecode.infer.exact import enumerate_target
from smcdecode.report.record import Obituary

V, EOS = 4, 3
p = TableLM(random_table(1, V, floor=0.5), eos=[EOS], name="p")
q = TableLM(random_table(2, V, floor=0.5), eos=[EOS], name="q")


def run(target=p, method=None, seed=0, max_tokens=6, prompt=(0,)):
    return smc.sample(target, list(prompt), method=method, max_tokens=max_tokens, seed=seed, progress=False)


@pytest.fixture(scope="module")
def rough():
    """A run that resampled: 16 particles of a power target behind a poor draft."""
    out = run(p**3, smc.SMC(smc.Draft(q, block=2, strictness=0.0), particles=16), max_tokens=12)
    assert any(step.resampled for step in out.steps)
    return out


def doomed(text):
    return -math.inf if len(text) > 1 else 0.0


@pytest.fixture(scope="module")
def dead():
    """A run in which every particle died."""
    no_end = smc.potential(lambda text: -math.inf, on="final", name="no end")
    out = run(p * smc.potential(doomed) * no_end, smc.SMC(particles=4))
    assert out.log_z == -math.inf
    return out


def forged(base, continuations, log_w, origin=None):
    """A posterior with given particles."""
    return dataclasses.replace(
        base,
        tokens=tuple(continuations),
        decoded=tuple("".join(chr(ord("a") + t) for t in x if t != EOS) for x in continuations),
        log_w=tuple(log_w),
        origin=tuple(origin or range(len(log_w))),
    )


# ---- answers


def test_texts_are_the_tokens_without_eos(rough):
    assert rough.texts == ["".join("abc"[t] for t in x if t != EOS) for x in rough.tokens]


def test_weights_are_normalised_float64_and_cannot_be_changed(rough):
    assert rough.weights.dtype == np.float64 and rough.weights.shape == (16,)
    np.testing.assert_allclose(rough.weights, np.exp(rough.log_w) / np.exp(rough.log_w).sum())
    with pytest.raises(ValueError, match="read-only"):
        rough.weights[0] = 1.0


def test_equal_texts_are_merged_heaviest_first(rough):
    out = forged(rough, [(0, EOS), (1, 2), (0, EOS), (2,)], np.log([0.3, 0.4, 0.3, 1e-300]).tolist())
    assert list(out.distribution()) == ["a", "bc", "c"]
    assert out.distribution()["a"] == pytest.approx(0.6)
    assert out.best() == "a" and out.best(on="tokens") == (0, EOS)
    assert out.distribution(on="tokens")[(1, 2)] == pytest.approx(0.4)


def test_expect_is_the_weighted_mean_and_asks_once(rough):
    out = forged(rough, [(0,), (1, 2), (0,)], np.log([0.25, 0.5, 0.25]).tolist())
    asked = []
    assert out.expect(lambda text: asked.append(text) or len(text)) == pytest.approx(1.5)
    assert sorted(asked) == ["a", "bc"]
    assert out.expect(sum, on="tokens") == pytest.approx(1.5)


def test_draws_follow_the_weights_and_their_seeds(rough):
    out = forged(rough, [(0,), (1,), (2,), (2, 2)], [0.0, math.log(2), math.log(3), -math.inf])
    drawn = out.sample(20_000, seed=5)
    assert_frequencies([drawn.count(x) for x in ("a", "b", "c", "cc")], [1 / 6, 2 / 6, 3 / 6, 0])
    assert drawn == out.sample(20_000, seed=5) != out.sample(20_000, seed=6)
    assert out.text == out.sample() == out.sample(3)[0]
    assert out.sample(on="tokens") in out.tokens


def test_the_text_of_many_runs_follows_the_target():
    """With Local and a plain target every draw of an answer is a draw of p."""
    exact = enumerate_target(
        p.log_p_next((0,)), lambda x: 0.0, vocab_size=V, eos=frozenset([EOS]), max_tokens=3, alpha=1.0
    )
    runs = smc.sample(p, [[0]] * 2000, method=smc.SMC(particles=3), max_tokens=3, seed=1, progress=False)
    counts = np.zeros(len(exact.sequences))
    for out in runs:
        counts[exact.index[out.sample(on="tokens")]] += 1
    assert_frequencies(counts, exact.probabilities)


def test_the_same_seed_gives_the_same_text_in_any_company():
    alone = run(p**2, seed=7)
    among = smc.sample(p**2, [[1], [0], [2]], max_tokens=6, seed=7, progress=False)
    assert isinstance(among, list) and among[1].text == alone.text
    assert among[1].tokens == alone.tokens and among[1].log_z == alone.log_z


def test_a_model_without_a_tokenizer_has_ids_only():
    bare = TableLM(random_table(1, V), eos=[EOS], name="bare")
    bare.vocabulary = dataclasses.replace(bare.vocabulary, tokens=None)
    out = run(bare**2, smc.SMC(particles=4))
    for ask in (lambda: out.text, lambda: out.texts, out.best, out.distribution, lambda: out.expect(len)):
        with pytest.raises(smc.PromptError, match=r"\.tokens"):
            ask()
    assert out.sample(on="tokens") in out.tokens and out.best(on="tokens") in out.tokens
    assert "distinct" in out.summary() and str(list(out.tokens[0])) in out._repr_html_()
    assert smc.Posterior.from_json(out.to_json()) == out


def test_continuations_are_read_as_text_or_tokens(rough):
    with pytest.raises(smc.InvalidOption, match="on='tokens'"):
        rough.best(on="bytes")


# ---- all dead


def test_a_dead_run_is_a_value_until_a_text_is_asked_of_it(dead):
    assert dead.ess == 0 and not dead.weights.any() and dead.distribution() == {} and dead.unique_ancestors == 0
    assert math.isnan(dead.log_z_variance)
    for ask in (lambda: dead.text, dead.sample, dead.best, lambda: dead.expect(len)):
        with pytest.raises(smc.NoSurvivors, match="all 4 particles died"):
            ask()


def test_no_survivors_says_what_died_where(dead):
    with pytest.raises(smc.NoSurvivors) as caught:
        _ = dead.text
    message = str(caught.value)
    for death in dead.deaths:
        assert death.cause in message
    assert "cycle" in message and "more particles" in message
    assert dead.deaths[-1].last in message
    assert "-∞" in dead.summary() and "deaths" in dead.summary() and "all 4 particles died" in dead._repr_html_()


def test_particles_that_all_die_after_one_text_are_not_told_to_be_more(dead):
    def told(*deaths):
        with pytest.raises(smc.NoSurvivors) as caught:
            _ = dataclasses.replace(dead, deaths=deaths).text
        return str(caught.value)

    here = Obituary(0, 0, "the masks", (1,), "b")
    same = dataclasses.replace(here, particle=1)
    assert "exclude each other" in told(here, same) and "Try more particles" not in told(here, same)
    full = dataclasses.replace(here, tokens=(1,) * dead.asked.max_tokens)
    for deaths in ((here,), (here, dataclasses.replace(same, tokens=(2,))), (full, full)):
        assert "Try more particles" in told(*deaths)


def test_deaths_are_grouped_by_cause_and_their_texts_shortened(dead):
    long = Obituary(8, 0, "a cause", (0,) * 200, "…" + "a" * 80)
    out = dataclasses.replace(dead, deaths=(long, dataclasses.replace(long, cycle=2), *dead.deaths))
    with pytest.raises(smc.NoSurvivors, match="a cause: 2 died in cycles 9 to 3"):
        _ = out.text


# ---- how good


def test_ess_counts_copies_once(rough):
    """Eight equal weights, but seven particles are copies of one: an ESS of 8 would flatter."""
    copies = forged(rough, [(0,)] * 7 + [(1,)], [0.0] * 8, origin=[2] * 7 + [5])
    assert copies.ess == pytest.approx(1 / (49 / 64 + 1 / 64))
    independent = forged(rough, [(0,)] * 7 + [(1,)], [0.0] * 8)
    assert independent.ess == pytest.approx(8)


def test_ess_without_resampling_is_that_of_the_weights():
    out = run(p**2, smc.SMC(smc.Draft(q), particles=8, threshold=0.0))
    assert out.ess == pytest.approx(out.steps[-1].ess)
    assert out.unique_ancestors == 8


def test_ess_reports_stand_before_resampling(rough):
    for step in rough.steps:
        w = np.exp(np.array(step.log_w) - max(step.log_w))
        assert step.ess == pytest.approx(w.sum() ** 2 / (w**2).sum())
        assert step.resampled == (step.ess < 8 and step is not rough.steps[-1])
    assert rough.ess_lowest == min(rough.ess, *(step.ess for step in rough.steps)) < 8


def test_unique_ancestors_count_living_lineages(rough):
    assert rough.unique_ancestors == len({o for o, w in zip(rough.origin, rough.weights, strict=True) if w > 0})


def test_single_run_variance_is_the_variance_over_runs():
    """Without resampling E[Ẑ² V] = Var Ẑ exactly."""
    method = smc.SMC(smc.Draft(q, block=2, strictness=0.5), particles=4, threshold=0.0)
    runs = smc.sample(p, [[0]] * 4000, method=method, max_tokens=3, seed=2, progress=False)
    z = np.exp([out.log_z for out in runs])
    claimed = z**2 * np.array([out.log_z_variance for out in runs])
    assert_mean(claimed - (z - 1) ** 2, 0.0)


def test_saturated_variance_is_reported_as_a_lower_bound(rough):
    one = forged(rough, [(0,), (1,)] * 8, [0.0] * 16, origin=[1] * 16)
    assert one.saturated and one.log_z_variance == 1.0
    assert "at least 1" in one.summary()


def test_one_particle_knows_no_error():
    out = run(p**2, smc.SMC(particles=1))
    assert math.isnan(out.log_z_variance) and "no estimate of its error" in out.summary()


def test_summary_says_what_a_plain_target_should_give():
    plain = run(p, smc.SMC(smc.Draft(q, strictness=0.0), particles=8))
    assert "the truth is 0" in plain.summary()
    assert "the truth is 0" not in run(p**2).summary()
    assert "no weight ever moved" in run(p, smc.Autoregressive(3)).summary()


def test_summary_gives_advice_only_where_a_cycle_was_rough(rough):
    tips = ("raise strictness (now 0)", "shorter block (now 2)", "more particles (now 16)")
    worst = max(range(len(rough.steps)), key=lambda c: rough.steps[c].chi2)
    harsh = dataclasses.replace(rough.steps[worst], chi2=5.0)
    bad = dataclasses.replace(rough, steps=(*rough.steps[:worst], harsh, *rough.steps[worst + 1 :]))
    assert all(tip in bad.summary() for tip in tips)
    calm = dataclasses.replace(rough, steps=tuple(dataclasses.replace(s, chi2=1.1) for s in rough.steps))
    assert "calm" in calm.summary() and "raise" not in calm.summary()


def test_summary_names_target_method_and_cost(rough):
    summary = rough.summary()
    for fact in ("p ** 3", "Draft(model=q, block=2", "particles=16", "first particles", "tokens/s", "target passes"):
        assert fact in summary
    assert rough.asked.prompt == "a" and rough.asked.prompt_tokens == (0,)


def test_a_run_without_cycles_has_less_to_say(rough):
    out = dataclasses.replace(rough, steps=())
    assert out.ess_lowest == out.ess
    assert "at its lowest" not in out.summary() and "χ²" not in out.summary() and "<svg" not in out._repr_html_()


def replayed(out):
    """The particles' continuations after every cycle, from what each cycle says was written."""
    texts = [()] * out.N
    for step in out.steps:
        ends = np.cumsum(step.counts)
        texts = [x + tuple(step.written[e - n : e]) for x, e, n in zip(texts, ends, step.counts, strict=True)]
        yield texts
        texts = [texts[a] for a in step.ancestors[: out.N]]


@pytest.mark.parametrize(
    "method",
    [
        smc.SMC(smc.Draft(q, block=2, strictness=0.0), particles=16),
        smc.SMC(smc.Draft(q, block=3, strictness=0.5), particles=8, threshold=1.0),
        smc.SMC(smc.Local(check="rejection"), particles=8),
        smc.Speculative(q, block=3),
        smc.MultiDraft(q, block=3, chains=3),
    ],
    ids=["reweighting", "strict", "checked", "speculative", "chains"],
)
def test_cycles_tell_every_token_that_was_written(method):
    """Replayed, they give the answers, and the texts of particles that died on the way."""
    odd = smc.potential(lambda text: -math.inf if text.startswith("ab") else -float(text.count("a")), name="odd")
    target = p if isinstance(method, smc.MultiDraft | smc.Speculative) else p**2 * odd
    for out in smc.sample(target, [[0], [1], [2]], method=method, max_tokens=12, seed=3, progress=False):
        history = list(replayed(out))
        assert tuple(history[-1]) == out.tokens
        for death in out.deaths:
            assert history[death.cycle][death.particle] == death.tokens
        assert out.spelling.keys() == {i for step in out.steps for i in step.written}
        assert all(out.spelling[i] == (b"" if i == EOS else b"abc"[i : i + 1]) for i in out.spelling)


# ---- to and from files


@pytest.mark.parametrize("name", ["rough", "dead"])
def test_json_round_trip_is_exact(name, request, tmp_path):
    out = request.getfixturevalue(name)
    assert smc.Posterior.from_json(out.to_json()) == out
    out.save(tmp_path / "run.json")
    again = smc.Posterior.load(tmp_path / "run.json")
    assert again == out and again.to_json() == out.to_json()
    assert again.summary() == out.summary() and again.log_z == out.log_z


def test_json_is_strict_json_and_says_its_version(dead):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    held = json.loads(dead.to_json(), parse_constant=refuse)
    assert (held["format"], held["version"]) == ("smcdecode.posterior", 2)
    assert held["posterior"]["log_z"] == "-inf"


def test_json_keeps_every_bit(rough):
    strange = (5e-324, -0.0, 1 / 3, 1.7976931348623157e308, *rough.log_w[4:])
    out = dataclasses.replace(rough, log_w=strange)
    back = smc.Posterior.from_json(out.to_json())
    assert np.array(back.log_w).tobytes() == np.array(strange).tobytes()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other", "version": 1}', '{"format": 1}'])
def test_other_files_are_refused(text):
    with pytest.raises(smc.InvalidOption, match="no JSON of a posterior"):
        smc.Posterior.from_json(text)


def test_other_versions_are_refused_by_number(rough):
    held = json.loads(rough.to_json()) | {"version": 99}
    with pytest.raises(smc.InvalidOption, match="version 99"):
        smc.Posterior.from_json(json.dumps(held))


def test_damaged_files_are_refused(rough):
    held = json.loads(rough.to_json())
    held["posterior"]["log_z"] = "high"
    with pytest.raises(smc.InvalidOption, match="high"):
        smc.Posterior.from_json(json.dumps(held))


def test_a_posterior_can_be_pickled_and_holds_no_model(rough):
    data = pickle.dumps(rough)
    assert pickle.loads(data) == rough
    assert b"TableLM" not in data


# ---- to look at


def test_html_shows_texts_escaped(rough):
    out = dataclasses.replace(rough, decoded=("<b>&",) * 16)
    page = out._repr_html_()
    assert "&lt;b&gt;&amp;" in page and "<b>" not in page and "<svg" in page and "<script" not in page


def test_html_lists_the_heaviest_and_counts_the_rest(rough):
    out = forged(rough, [(0,) * n for n in range(1, 17)], [-float(n) for n in range(16)])
    page = out._repr_html_()
    assert page.count("<tr><td") >= 10 and "and 6 more" in page


@pytest.mark.parametrize("name", ["rough", "dead"])
def test_plot_draws_ess_and_weights(name, request, tmp_path):
    pytest.importorskip("matplotlib", reason="plots come with the extra plot")
    out = request.getfixturevalue(name)
    figure = out.plot()
    ess, weights = figure.axes
    np.testing.assert_allclose(ess.lines[0].get_ydata(), [step.ess for step in out.steps])
    assert weights.get_xlabel() == "cycle"
    figure.savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_plot_without_matplotlib_names_the_extra(rough, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"smcdecode\[plot\]"):
        rough.plot()


def test_repr_is_short(rough):
    assert len(repr(rough)) < 120 and "16 particles" in repr(rough)


# ---- cost and progress


def test_stats_tell_what_the_run_did(rough):
    stats = rough.stats
    assert isinstance(stats, Stats)
    assert stats.cycles == len(rough.steps) and stats.target_passes > 0 and stats.draft_passes > stats.target_passes
    assert 0 < stats.pages_peak <= stats.pages and stats.bytes_moved == 0
    assert {"prefill", "draft", "score", "resampling", "total"} <= stats.seconds.keys()
    assert stats.tokens == max(map(len, rough.tokens)) and stats.tokens_per_second > 0


def test_progress_is_shown_on_demand_only(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    for progress in (False, None):
        smc.sample(p, [0], max_tokens=4, seed=0, progress=progress)
    assert terminal.getvalue() == ""
    slow = smc.potential(lambda text: time.sleep(0.05) or 0.0)  # so that the bar, drawn ten times a second, moves
    smc.sample(p**2 * slow, [[0], [1]], max_tokens=4, seed=0, progress=True)
    assert "tok" in terminal.getvalue() and "ESS" in terminal.getvalue()


def test_progress_waits_two_seconds_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    smc.sample(p, [0], max_tokens=4, seed=0)
    assert terminal.getvalue() == ""
