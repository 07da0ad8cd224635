"""Decoders that verify: the text's law is p, for one chain and many, for every coupling, through the real engine."""

from collections import Counter

import pytest
from stats import assert_frequencies
from table import TableLM, random_table

import smcdecode as smc
from smcdecode.infer.coupling.catalogue import COUPLINGS
from smcdecode.infer.coupling.set_softmax import SetSoftmax
from smcdecode.infer.exact import enumerate_target

V, EOS, CAP, RUNS = 4, 3, 4, 2500
p = TableLM(random_table(1, V, floor=0.3), eos=[EOS], name="p")
q = TableLM(random_table(7, V, floor=0.2), eos=[EOS], name="q")
exact = enumerate_target(p.log_p_next((0,)), lambda x: 0.0, vocab_size=V, eos=frozenset([EOS]), max_tokens=CAP)
METHODS = [
    *(smc.Speculative(q, block=k) for k in (1, 3)),
    *(smc.MultiDraft(q, block=2, chains=2, coupling=c) for c in ("auto", *COUPLINGS)),
    *(smc.MultiDraft(q, block=3, chains=3, coupling=c) for c in ("recursive", "global resolution")),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{type(m).__name__}-{m.block}-{getattr(m, 'coupling', '')}")
def test_the_joint_law_is_the_targets(method):
    runs = smc.sample(p, [[0]] * RUNS, method=method, max_tokens=CAP, seed=3, progress=False)
    found = Counter(run.tokens[0] for run in runs)
    assert set(found) <= set(exact.sequences)
    assert_frequencies([found[x] for x in exact.sequences], exact.probabilities)
    assert all(run.log_z == 0 and len(run.tokens) == 1 for run in runs)
    log_p = dict(zip(exact.sequences, exact.log_gamma, strict=True))
    assert all(run.log_p[0] == pytest.approx(log_p[run.tokens[0]], abs=1e-4) for run in runs)


def test_the_published_set_softmax_is_exact_where_nothing_is_truncated():
    method = smc.MultiDraft(q, block=2, chains=2, coupling=SetSoftmax(top_k=V))
    runs = smc.sample(p, [[0]] * 400, method=method, max_tokens=CAP, seed=4, progress=False)
    found = Counter(run.tokens[0] for run in runs)
    assert_frequencies([found[x] for x in exact.sequences], exact.probabilities)


def test_more_chains_keep_more_tokens():
    def acceptance(n):
        method = smc.MultiDraft(q, block=3, chains=n, coupling="global resolution")
        return smc.sample(p, [[0]] * 300, method=method, max_tokens=CAP, seed=3, progress=False)[0].stats.acceptance

    assert acceptance(1) < acceptance(2) < acceptance(4)


@pytest.mark.parametrize("method", [smc.Speculative(q), smc.MultiDraft(q)])
def test_targets_that_verification_cannot_serve_are_refused(method):
    for target in (p**2, p * smc.Reward(len, beta=0.1)):
        with pytest.raises(smc.UnsupportedTarget, match=r"smc\.SMC\(smc\.Draft\(…, strictness=1\)\)"):
            smc.sample(target, [0], method=method, max_tokens=CAP)


def test_a_prompt_draws_the_same_alone_and_among_others():
    method = smc.MultiDraft(q, block=2, chains=3)
    alone = smc.sample(p, [0, 1], method=method, max_tokens=CAP, seed=5, progress=False)
    among = smc.sample(p, [[0], [0, 1], [2]], method=method, max_tokens=CAP, seed=5, progress=False)
    assert among[1].tokens == alone.tokens


@pytest.mark.parametrize(
    ("options", "match"),
    [({"chains": 0}, "chains"), ({"coupling": "best"}, "coupling must be"), ({"coupling": 3}, "coupling must be")],
)
def test_options_that_mean_nothing_are_refused(options, match):
    with pytest.raises(smc.InvalidOption, match=match):
        smc.MultiDraft(q, **options)


def test_a_lane_used_again_has_forgotten_the_request_before():
    method = smc.MultiDraft(q, block=2, chains=3)
    prompts = [[i % V] for i in range(40)]
    roomy = smc.sample(p, prompts, method=method, max_tokens=CAP, seed=5, progress=False)
    tight = smc.sample(p, prompts, method=method, max_tokens=CAP, seed=5, progress=False, memory=4000)
    assert [r.tokens for r in roomy] == [t.tokens for t in tight]
