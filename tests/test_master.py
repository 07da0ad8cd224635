"""The master test: E[Ẑ Σ_i W_i f(x_i)] = Σ_x γ(x) f(x) for every event f, whatever draws the particles.

With posterior weights W and evidence Ẑ of one run this holds exactly, for every N, K, proposal, resampling scheme,
threshold and strictness. For f = 1 it says E[Ẑ] = Z; the other events together are the posterior's frequencies.
"""

import itertools

import numpy as np
import pytest
from constraints import DeadEnds, NoStutter, log_psi
from stats import assert_mean
from table import TableLM, random_table

import smcdecode as smc
from smcdecode.infer.exact import enumerate_target
from smcdecode.infer.resampling import SCHEMES

V, EOS, CAP, PROMPT = 4, 3, 4, (0,)
RUNS, N = 800, 4
COMMON = 0.05
P = random_table(1, V, floor=0.5)

p = TableLM(P, eos=[EOS], name="p")
DRAFTS = {
    "good": (TableLM(0.8 * P + 0.2 * random_table(2, V), eos=[EOS], name="good"), {}),
    "bad": (TableLM(random_table(3, V, floor=0.5), eos=[EOS], name="bad"), {}),
    "hot": (TableLM(P, eos=[EOS], name="p again"), {"temperature": 2.0}),
    "cold": (TableLM(random_table(1, V, floor=0.6), eos=[EOS], name="flat p"), {"temperature": 0.8}),
}


def ones(x):
    return 0.7 * sum(t == 1 for t in x)


def odd(x):
    return 0.5 if sum(x) % 2 else -0.3


def vowels(text):
    return sum(map(text.count, "a")) - 0.5 * text.count("c")


def vowels_of(x):
    return vowels("".join(chr(ord("a") + t) for t in x))


TARGETS = {
    "plain": (p.as_target(), 1.0, lambda x: 0.0),
    "power 0.5": (p**0.5, 0.5, lambda x: 0.0),
    "power 2": (p**2, 2.0, lambda x: 0.0),
    "power 4": (p**4, 4.0, lambda x: 0.0),
    "reward": (p * smc.Reward(vowels, beta=0.8), 1.0, lambda x: 0.8 * vowels_of(x)),
    "twist": (p * smc.potential(ones, on="tokens"), 1.0, ones),
    "product": (
        p**2 * smc.potential(odd, on="tokens") * smc.Reward(vowels, beta=0.8, prefix=vowels),
        2.0,
        lambda x: odd(x) + 0.8 * vowels_of(x),
    ),
    "mask": (p * NoStutter(), 1.0, log_psi(NoStutter())),
    "power and mask": (
        p**2 * smc.potential(odd, on="tokens") * NoStutter(),
        2.0,
        lambda x: odd(x) + log_psi(NoStutter())(x),
    ),
    "dead ends": (p * DeadEnds(), 1.0, log_psi(DeadEnds())),
}
CONSTRAINED = ("mask", "power and mask", "dead ends")
BRIDGED = ("power 0.5", "power 4", "product", "power and mask")


def without_eos(log_psi):
    return lambda x: log_psi(x[:-1] if x[-1] == EOS else x)


def oracle(name):
    _, alpha, log_psi = TARGETS[name]
    return enumerate_target(
        p.log_p_next(PROMPT), without_eos(log_psi), vocab_size=V, eos=frozenset([EOS]), max_tokens=CAP, alpha=alpha
    )


def events(sequences):
    """(sequences, F): beginnings of one and two tokens, the last token, the length."""
    prefixes = [*itertools.product(range(V), repeat=1), *itertools.product(range(V), repeat=2)]
    rows = [
        [x[: len(u)] == u for u in prefixes] + [x[-1] == v for v in range(V)] + [len(x) == n for n in range(1, CAP + 1)]
        for x in sequences
    ]
    return np.array(rows, dtype=float)


def moments(posteriors, exact):
    """(runs, F + 1): Ẑ Σ_i W_i f(x_i) of each run, for f = 1 and for every event."""
    mass = np.zeros((len(posteriors), len(exact.sequences)))
    for row, posterior in zip(mass, posteriors, strict=True):
        for tokens, weight in zip(posterior.tokens, posterior.weights.tolist(), strict=True):
            if weight > 0:
                assert tuple(tokens) in exact.index, f"{tuple(tokens)} is no complete sequence"
                row[exact.index[tuple(tokens)]] += np.exp(posterior.log_z) * weight
    return mass @ features(exact)


def features(exact):
    """(sequences, F): 1, and the events common enough for a test of means."""
    table = np.column_stack([np.ones(len(exact.sequences)), events(exact.sequences)])
    return table[:, exact.probabilities @ table > COMMON]


def assert_unbiased(posteriors, exact):
    assert_mean(moments(posteriors, exact), np.exp(exact.log_gamma) @ features(exact))


def runs_of(target, method, seed=0, runs=RUNS):
    prompts = [list(PROMPT)] * runs
    return smc.sample(target, prompts, method=method, max_tokens=CAP, seed=seed, progress=False)


BLOCKS = [("local", 0, 0.0), *itertools.product((None,), (1,), (0.0, 0.3, 1.0))]
BLOCKS += itertools.product((None,), (3,), (0.0, 0.7, 1.0))  # at 0.7 every draft is refused at times


def cases():
    """Every target with every block and strictness; drafts, schemes and thresholds in turn.

    So every draft is met by every target, and by every block at every strictness; and so are all pairs of a scheme and
    a threshold by every draft.
    """
    others = itertools.cycle(itertools.product(SCHEMES, (0.0, 0.5, 1.0)))
    for i, target in enumerate(TARGETS):
        drafts = ("good", "hot") if target in CONSTRAINED else tuple(DRAFTS)
        for j, (local, block, strictness) in enumerate(BLOCKS):
            yield target, local or drafts[(i + j) % len(drafts)], block, strictness, *next(others)


def method_of(draft, block, strictness, scheme, threshold, particles=N, bridge=0):
    if draft == "local":
        proposal = smc.Local()
    else:
        model, options = DRAFTS[draft]
        proposal = smc.Draft(model, block=block, strictness=strictness, **options)
    return smc.SMC(proposal, particles=particles, resampling=scheme, threshold=threshold, bridge=bridge)


@pytest.mark.parametrize(("target", "draft", "block", "strictness", "scheme", "threshold"), list(cases()))
def test_evidence_and_posterior_are_unbiased(target, draft, block, strictness, scheme, threshold):
    exact = oracle(target)
    posteriors = runs_of(TARGETS[target][0], method_of(draft, block, strictness, scheme, threshold))
    assert_unbiased(posteriors, exact)


@pytest.mark.parametrize("target", ["plain", "power 2", "mask", "dead ends", "product"])
@pytest.mark.parametrize(("draft", "block", "strictness"), [("good", 3, 0.1), ("hot", 1, 0.5)])
def test_partial_strictness_is_unbiased(target, draft, block, strictness):
    method = method_of(draft, block, strictness, "systematic", 0.5)
    assert_unbiased(runs_of(TARGETS[target][0], method, seed=1), oracle(target))


@pytest.mark.parametrize(
    ("target", "draft", "block", "strictness", "bridge"),
    [
        *((target, "local", 0, 0.0, 9) for target in BRIDGED),
        *((target, "good", 1, 0.0, 2) for target in ("power 0.5", "product")),
        *((target, "hot", 2, 0.7, 1) for target in ("power 4", "power and mask")),
    ],
)
def test_a_bridge_changes_no_answer(target, draft, block, strictness, bridge):
    exact = oracle(target)
    method = method_of(draft, block, strictness, "systematic", 0.9, bridge=bridge)
    assert_unbiased(runs_of(TARGETS[target][0], method), exact)


@pytest.mark.parametrize(("target", "draft"), [("plain", "hot"), ("power 2", "bad"), ("product", "hot")])
def test_automatic_strictness_is_unbiased(target, draft):
    exact = oracle(target)
    posteriors = runs_of(TARGETS[target][0], method_of(draft, 1, "auto", "systematic", 0.5))
    assert_mean(moments(posteriors, exact), np.exp(exact.log_gamma) @ features(exact))
