"""Exact answers from repeated runs: the chain's law against enumeration, where single runs are visibly wrong."""

from collections import Counter

import pytest
from stats import assert_frequencies
from table import TableLM, random_table

import smcdecode as smc
from smcdecode.infer.exact import enumerate_target
from smcdecode.report.chain import chain_of

V, EOS, CAP = 3, 2, 3
CHAINS, SWEEPS = 600, 8
p = TableLM(random_table(4, V, floor=0.4), eos=[EOS], name="p")


def vowels(text):
    return 1.2 * text.count("a")


target = p * smc.Reward(vowels, beta=1.0)
exact = enumerate_target(
    p.log_p_next((0,)),
    lambda x: 1.2 * sum(t == 0 for t in x),
    vocab_size=V,
    eos=frozenset([EOS]),
    max_tokens=CAP,
)


@pytest.fixture(scope="module")
def runs():
    prompts = [[0]] * (CHAINS * (SWEEPS + 1))
    return smc.sample(target, prompts, method=smc.SMC(particles=1), max_tokens=CAP, seed=2, progress=False)


def counts(answers):
    found = Counter(answers)
    assert set(found) <= set(exact.sequences)
    return [found[x] for x in exact.sequences]


def chains(runs):
    width = SWEEPS + 1
    return [chain_of(runs[i * width : (i + 1) * width]) for i in range(CHAINS)]


def test_the_chain_has_the_targets_law(runs):
    assert_frequencies(counts(chain.tokens for chain in chains(runs)), exact.probabilities)


def test_single_runs_do_not(runs):
    with pytest.raises(AssertionError, match="diverge"):
        assert_frequencies(counts(run.sample(on="tokens") for run in runs), exact.probabilities)


def test_nor_does_a_chain_with_a_wrong_evidence(runs, monkeypatch):
    monkeypatch.setattr(smc.Posterior, "log_z", property(lambda self: 0.0), raising=False)
    with pytest.raises(AssertionError, match="diverge"):
        assert_frequencies(counts(chain.tokens for chain in chains(runs)), exact.probabilities)


def test_exact_reports_how_it_went():
    answer = smc.exact(target, [0], method=smc.SMC(particles=4), sweeps=8, max_tokens=CAP, seed=1, progress=False)
    assert len(answer.runs) == len(answer.held) == 9
    assert answer.text == answer.posterior.text
    assert 0 < answer.acceptance <= 1 and 0 <= answer.remaining_bias <= 1
    assert "9 runs" in answer.summary()


def test_exact_refuses_what_it_cannot_do():
    with pytest.raises(smc.InvalidOption, match="sweeps"):
        smc.exact(target, [0], sweeps=0)
    with pytest.raises(smc.PromptError, match="one prompt"):
        smc.exact(target, [[0], [1]])
