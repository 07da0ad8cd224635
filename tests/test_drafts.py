"""Drafts without a second model: prompt lookup, and the target's own first layers."""

import itertools
from collections import Counter

import numpy as np
import pytest
import test_engine
import torch
from engines import exact_answer, lm, outcomes_of
from models import SUPPORTED, tiny
from stats import assert_frequencies, assert_mean
from table import TableLM, random_table
from test_master import CAP, PROMPT, RUNS, TARGETS, N, V, assert_unbiased, oracle, p
from test_model_families import PAGE, prefill, reference
from test_negative_controls import scale_log_q

import smcdecode as smc
from smcdecode.engine.layers import keep_layers
from smcdecode.infer.lookup import recurrences
from smcdecode.infer.resampling import SCHEMES

REPETITIVE = (0, 1, 2, 1, 0, 2, 1, 2, *PROMPT)  # p looks at the last token only, so the answers are those of PROMPT
LOOKUPS = [(1, 1, 0.3), (1, 3, 0.0), (2, 3, 0.7), (1, 2, 1.0)]  # ngram, block, strictness


def lookup(ngram, block, strictness):
    return smc.Draft(smc.PromptLookup(ngram, floor=0.5), block=block, strictness=strictness)


def runs_of(target, method, runs=RUNS):
    return smc.sample(target, [list(REPETITIVE)] * runs, method=method, max_tokens=CAP, seed=0, progress=False)


def cases():
    others = itertools.cycle(itertools.product(SCHEMES, (0.0, 0.5, 1.0)))
    for i, target in enumerate(TARGETS):  # each with two of the lookups, neighbours with the others
        for draft in LOOKUPS[i % 2 :: 2]:
            yield target, draft, *next(others)


@pytest.mark.parametrize(("target", "draft", "scheme", "threshold"), list(cases()))
def test_evidence_and_posterior_are_unbiased_under_prompt_lookup(target, draft, scheme, threshold):
    method = smc.SMC(lookup(*draft), particles=N, resampling=scheme, threshold=threshold)
    posteriors = runs_of(TARGETS[target][0], method)
    assert posteriors[0].stats.draft_passes == 0
    assert_unbiased(posteriors, oracle(target))


def test_a_wrong_density_of_looked_up_tokens_is_seen(monkeypatch):
    scale_log_q(monkeypatch)
    with pytest.raises(AssertionError, match="differs from"):
        assert_unbiased(runs_of(p, smc.SMC(lookup(1, 3, 0.0), particles=N)), oracle("plain"))


@pytest.mark.parametrize("method", [smc.Speculative, smc.MultiDraft])
def test_verified_lookups_have_the_targets_law(method):
    exact = oracle("plain")
    decoder = method(smc.PromptLookup(1), block=3)
    found = Counter(run.sample(on="tokens") for run in runs_of(p, decoder, runs=1000))
    assert_frequencies([found[x] for x in exact.sequences], exact.probabilities)


def test_the_law_of_a_lookup_is_the_one_it_declares():
    text = torch.tensor([[-1, 1, 2, 3, 1, 2, 0, 1, 2, 3, 1, 2], [-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 2]])
    assert recurrences(text, 2)[0].nonzero()[:, 0].tolist() == [3, 6, 9]  # behind "1 2": 3, 0 and 3
    assert recurrences(text, 5)[0].nonzero()[:, 0].tolist() == [6]  # behind "1 2 3 1 2": 0
    assert not recurrences(text, 1)[1].any() and not recurrences(text, 2)[1].any() and not recurrences(text, 30).any()


def test_nothing_is_drafted_where_nothing_recurs():
    q = smc.PromptLookup(3)
    once = smc.sample(p, [0, 1, 2], method=smc.Speculative(q), max_tokens=1, seed=0, progress=False)
    assert once.stats.drafted == 0
    cycle = TableLM(np.roll(np.eye(V), 1, axis=1) * 0.96 + 0.01, name="round and round")
    again = smc.sample(cycle, [0, 1, 2, 3] * 3, method=smc.Speculative(q, 7), max_tokens=64, seed=0, progress=False)
    assert again.stats.acceptance > 0.8 and again.stats.target_passes < 24


def test_a_greedy_target_copies_by_lookup_what_it_writes_itself():
    target = TableLM(random_table(5, V), name="greedy").at(temperature=0)
    plain = smc.sample(target, [0], max_tokens=24, seed=0, progress=False)
    copied = smc.sample(target, [0], method=smc.Speculative(smc.PromptLookup(2)), max_tokens=24, seed=1, progress=False)
    assert copied.tokens == plain.tokens and copied.stats.target_passes < plain.stats.target_passes


@pytest.mark.parametrize(("ngram", "floor"), [(0, 0.1), (2.0, 0.1), (2, 0.0), (2, 1.5)])
def test_a_lookup_that_means_nothing_is_refused(ngram, floor):
    with pytest.raises(smc.InvalidOption, match=r"ngram|floor"):
        smc.PromptLookup(ngram, floor=floor)


def test_a_lookup_has_no_process_to_write_ahead_in_and_no_passes_to_time():
    with pytest.raises(smc.InvalidOption, match="writes beside the target"):
        smc.SMC(smc.Draft(smc.PromptLookup(2)), overlap=True)
    with pytest.raises(smc.InvalidOption, match="compares the laws of two models"):
        smc.plan(p, smc.Draft(smc.PromptLookup(2)), [[0]])


# ---- the target's own first layers


@pytest.mark.parametrize(("target", "strictness", "page_size"), [("plain", 0.0, 3), ("product", 0.5, 1)])
def test_evidence_and_posterior_are_unbiased_under_layer_skip(target, strictness, page_size):
    module, model = lm("llama")
    make, law, psi = test_engine.TARGETS[target]
    width, cap, prompt, runs = test_engine.V, test_engine.CAP, test_engine.PROMPT, test_engine.RUNS
    exact = exact_answer(module, prompt, psi, vocab=width, max_tokens=cap, **law)
    table = np.array([test_engine.events(x) for x in exact.sequences], dtype=float)
    table = table[:, exact.probabilities @ table > test_engine.COMMON]
    draft = smc.Draft(smc.LayerSkip(model, layers=1), block=2, strictness=strictness)
    method = smc.SMC(draft, particles=4, threshold=0.8)
    outcomes = outcomes_of(make(model), method, [prompt] * runs, max_tokens=cap, page_size=page_size)
    mass = np.zeros((runs, len(exact.sequences)))
    for row, outcome in zip(mass, outcomes, strict=True):
        log_w = outcome.log_w - outcome.log_w.logsumexp(0) + outcome.log_z
        for tokens, weight in zip(outcome.tokens, log_w.exp().nan_to_num().tolist(), strict=True):
            if weight > 0:
                row[exact.index[tuple(tokens)]] += weight
    assert_mean(mass @ table, np.exp(exact.log_gamma) @ table)


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_skipping_model_is_the_model_without_its_last_layers(family):
    model = tiny(family)
    model.set_attn_implementation("eager")
    whole = smc.load(model)
    draft = smc.LayerSkip(whole, layers=1)
    prompt = [5, 9, 2, 7, 3, 11, 4]
    expected = reference(keep_layers(model, [0]), prompt)[-1]
    assert len(draft.layout.layers) == 1
    for _ in range(2):  # the whole model beside it is not disturbed
        torch.testing.assert_close(
            prefill(draft, draft.store(8, PAGE), prompt, [1, 2])[0], expected, atol=2e-4, rtol=1e-3
        )
        torch.testing.assert_close(
            prefill(whole, whole.store(8, PAGE), prompt, [1, 2])[0], reference(model, prompt)[-1], atol=2e-4, rtol=1e-3
        )


def test_layers_that_are_not_there_are_refused():
    _, model = lm("llama")
    for layers in (0, 2, 1.0):
        with pytest.raises(smc.InvalidOption, match="from 1 to 1"):
            smc.LayerSkip(model, layers=layers)
    with pytest.raises(smc.InvalidOption, match=r"smc\.load"):
        smc.LayerSkip("llama", layers=1)
