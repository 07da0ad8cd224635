"""Stop strings: the target is p over texts cut where one is complete, whatever draws the particles."""

import codecs
import itertools
from collections import Counter

import numpy as np
import pytest
from constraints import NoStutter, log_psi
from hypothesis import given
from hypothesis import strategies as st
from stats import assert_frequencies
from table import TableLM, random_table
from test_master import CAP, EOS, PROMPT, assert_unbiased, without_eos

import smcdecode as smc
from smcdecode.infer.exact import enumerate_target
from smcdecode.potentials.stops import Stops
from smcdecode.potentials.vocabulary import Vocabulary

V, RUNS = 4, 800
SPELT = (b"a", b"ba", b"cb", b"d")  # stop strings span tokens, and end inside them
STOP = ["ab", "bb"]


def table_lm(seed, name, spelt=SPELT):
    model = TableLM(random_table(seed, V, floor=0.5), eos=[EOS], name=name)
    model.vocabulary = Vocabulary(V, frozenset([EOS]), spelt, frozenset([EOS]), name)
    return model


p, q = table_lm(1, "p"), table_lm(2, "q")


def spell(x):
    return b"".join(SPELT[t] for t in x if t != EOS).decode()


def stopped(x):
    return any(s in spell(x) for s in STOP)


def excited(text):
    return 0.6 * text.count("a") - 0.4 * text.count("bb")


def exact(psi=lambda x: 0.0, alpha=1.0, stopped=stopped):
    return enumerate_target(
        p.log_p_next(PROMPT), without_eos(psi), vocab_size=V, eos=frozenset([EOS]), max_tokens=CAP, alpha=alpha,
        stopped=stopped,
    )  # fmt: skip


TARGETS = {
    "plain": (p.as_target(), {}),
    "power": (p**2, {"alpha": 2.0}),
    "reward": (p * smc.Reward(excited), {"psi": lambda x: excited(spell(x))}),
    "twist": (p * smc.potential(excited), {"psi": lambda x: excited(spell(x))}),
    "mask": (p * NoStutter(), {"psi": log_psi(NoStutter())}),
}
PROPOSALS = {
    "local": smc.Local(),
    **{f"K={k} s={s}": smc.Draft(q, block=k, strictness=s) for k, s in itertools.product((2,), (0.0, 0.2, 1.0))},
}


def runs_of(target, proposal, stop=STOP, **options):
    method = smc.SMC(proposal, particles=4, **options)
    return smc.sample(target, [list(PROMPT)] * RUNS, method=method, max_tokens=CAP, stop=stop, seed=0, progress=False)


@pytest.mark.parametrize(  # every other pair, in the manner of a chessboard
    ("target", "proposal"),
    [(t, q) for (i, t), (j, q) in itertools.product(enumerate(TARGETS), enumerate(PROPOSALS)) if (i + j) % 2 == 0],
)
def test_evidence_and_posterior_are_those_of_the_texts_cut_at_stops(target, proposal):
    asked, law = TARGETS[target]
    assert_unbiased(runs_of(asked, PROPOSALS[proposal], threshold=0.9), exact(**law))


def test_tokens_checked_one_at_a_time_may_stop_a_text():
    even = smc.Predicate(lambda text: text.count("a") % 2 == 0, name="even")  # asked of texts that are complete
    law = exact(psi=lambda x: 0.0 if even(spell(x)) else -np.inf)
    assert_unbiased(runs_of(p * even, smc.Local(check="rejection")), law)


def test_guessed_tokens_may_stop_a_text():
    asked, law = TARGETS["mask"]
    outs = runs_of(asked, smc.Local(ahead=2))
    assert_unbiased(outs, exact(**law))
    assert outs[0].stats.acceptance > 0.3


def test_the_oracle_tells_a_cut_from_none():
    """Negative control: neither answer is the other's."""
    with pytest.raises(AssertionError):
        assert_unbiased(runs_of(p, smc.Local()), exact(stopped=lambda x: False))
    with pytest.raises(AssertionError):
        assert_unbiased(runs_of(p, smc.Local(), stop=[]), exact())


@pytest.mark.parametrize(
    "method",
    [
        smc.Autoregressive(),
        smc.Speculative(q, block=3),
        *(smc.MultiDraft(q, block=3, chains=2, coupling=c) for c in ("recursive", "greedy")),
    ],
    ids=lambda m: f"{type(m).__name__}-{getattr(m, 'coupling', '')}",
)
def test_decoders_without_weights_have_the_law_of_the_cut_texts(method):
    runs = smc.sample(p, [list(PROMPT)] * 1000, method=method, max_tokens=CAP, stop=STOP, seed=0, progress=False)
    found, law = Counter(run.tokens[0] for run in runs), exact()
    assert set(found) <= set(law.sequences)
    assert_frequencies([found[x] for x in law.sequences], law.probabilities)


def test_texts_end_before_the_stop_string_and_tokens_behind_it():
    out = runs_of(p, PROPOSALS["K=2 s=0.2"])
    pairs = {x: text for run in out for x, text in zip(run.tokens, run.texts, strict=True)}
    assert pairs[(0, 1)] == ""  # "a" + "ba"
    assert pairs[(2, 1)] == "c"  # "cb" + "ba"
    assert pairs[(1, 1)] == "b"  # "ba" + "ba": "ab" is complete inside the second token
    assert not any(s in text for text in pairs.values() for s in STOP)
    assert out[0].asked.stop == tuple(STOP)
    assert smc.Posterior.from_json(out[0].to_json()) == out[0]


def test_a_request_stops_at_its_own_strings_whatever_else_runs():
    alone = smc.sample(p, [0], max_tokens=8, seed=3, stop=STOP, progress=False)
    among = smc.sample(p, [[1], [0], [2]], max_tokens=8, seed=3, stop=STOP, progress=False)
    assert among[1].tokens == alone.tokens
    assert smc.sample(p, [0], max_tokens=8, seed=3, progress=False).tokens != alone.tokens


def test_exact_answers_stop_too():
    answer = smc.exact(p * smc.Reward(excited), [0], sweeps=3, max_tokens=8, stop="ab", seed=0, progress=False)
    assert "ab" not in answer.text
    assert all(run.asked.stop == ("ab",) for run in answer.runs)


@pytest.mark.parametrize("stop", ["", ["a", ""], [3], [None]])
def test_a_stop_that_is_no_string_is_refused(stop):
    with pytest.raises(smc.InvalidOption, match="stop must be a string or a list of strings"):
        smc.sample(p, [0], stop=stop, progress=False)


def test_stop_strings_need_a_tokenizer():
    ids = TableLM(p.table, eos=[EOS], name="ids only")
    ids.vocabulary = Vocabulary(V, frozenset([EOS]), None, frozenset(), "ids only")
    with pytest.raises(smc.PromptError, match="ids only has no tokenizer, so no stop string"):
        smc.sample(ids, [0], stop="a", progress=False)


# ---- the search itself

STRINGS = st.lists(st.text("ab¢é", min_size=1, max_size=4), min_size=1, max_size=3)


@given(STRINGS, st.lists(st.text("ab¢é", max_size=3).map(str.encode), max_size=12), st.integers(0, 3))
def test_a_stop_is_found_where_it_is_first_complete(strings, tokens, extra):
    stops = Stops(tuple(s.encode() for s in strings))
    for n, token in enumerate(tokens):
        before, now = b"".join(tokens[:n]), b"".join(tokens[: n + 1])
        tail = before[max(len(before) - stops.reach - extra, 0) :]
        hit = any(s in now for s in stops.strings)
        assert stops.completes(tail, token) == hit
        if hit:
            ends = [(end, s) for end in range(len(now) + 1) for s in stops.strings if now[:end].endswith(s)]
            end = min(end for end, _ in ends)
            longest = max(len(s) for e, s in ends if e == end)
            assert stops.cut(now) == now[: end - longest]
            break
        assert stops.cut(now) == now


@given(STRINGS, st.text("ab¢é", max_size=8), st.text("ab¢é", max_size=4))
def test_what_is_safe_to_show_is_never_cut_and_no_more_is_held_back_than_a_stop(strings, text, more):
    stops = Stops(tuple(s.encode() for s in strings))
    data = text.encode()
    if stops.cut(data) != data:
        return
    safe = stops.safe(data)
    assert stops.cut((text + more).encode()).startswith(data[:safe])
    held = data[safe:]
    assert not held or any(s.startswith(held) for s in stops.strings)
    assert codecs.utf_8_decode(held, "strict", False)
