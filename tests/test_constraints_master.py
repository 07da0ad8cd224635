"""The master test under constraints: E[Ẑ Σ_i W_i f(x_i)] = Σ_x γ(x) f(x), with masks, without, and with products.

The tokens are "1", "2" and "12", so that one text has several tokenisations and a token can hold the end of one thing
and the beginning of another.
"""

import functools
import itertools
import json
import math
import re

import numpy as np
import pytest
from stats import assert_mean
from table import TableLM, random_table

import smcdecode as smc
from smcdecode.infer.exact import enumerate_target
from smcdecode.infer.resampling import SCHEMES
from smcdecode.potentials.grammar import Grammar
from smcdecode.potentials.potential import BasePotential
from smcdecode.potentials.predicate import Predicate
from smcdecode.potentials.regex import Regex
from smcdecode.potentials.regions import After, Between
from smcdecode.potentials.reward import Reward
from smcdecode.potentials.schema import JsonSchema
from smcdecode.potentials.vocabulary import Vocabulary

TOKENS = (b"1", b"2", b"12", b"<end>")
V, EOS, CAP, PROMPT = 4, 3, 4, (0,)
RUNS, N = 500, 4
COMMON = 0.05


def model(table, name):
    made = TableLM(table, eos=[EOS], name=name)
    made.vocabulary = Vocabulary(V, frozenset({EOS}), TOKENS, frozenset({EOS}), name)
    return made


P = random_table(1, V, floor=0.5)
p = model(P, "p")
q = model(0.6 * P + 0.4 * random_table(2, V), "q")


class Unmasked(BasePotential):
    """A constraint without its mask: it only says what a text is worth."""

    def __init__(self, psi):
        self.psi = psi
        self.name = f"{psi.name}, unmasked"
        self.start, self.advance, self.fork = psi.start, psi.advance, psi.fork

    def log_psi(self, states, complete):
        return self.psi.log_psi(states, complete)


def nested(text):
    return text == "2" or (len(text) > 2 and text[0] == "1" and text[-1] == "2" and nested(text[1:-1]))


def between(text):
    return re.fullmatch("[^1]*(1[^1]*1[^1]*)+", text) is not None and all(
        re.fullmatch("2*", inside) for inside in text.split("1")[1::2]
    )


def few(text):
    return text.count("2") <= 1


def twos(text):
    return 0.5 * text.count("2")


NUMBERS = [1, 12, 21, 112, 1212]
TARGETS = {
    "grammar": ([Grammar('start: "1" start "2" | "2"')], 1.0, lambda t: nested(t)),
    "regex": ([Regex("(1|12)*2?")], 1.0, lambda t: re.fullmatch("(1|12)*2?", t)),
    "regex, power": ([Regex("(1|12)*2?")], 2.0, lambda t: re.fullmatch("(1|12)*2?", t)),
    "schema": ([JsonSchema({"enum": NUMBERS})], 1.0, lambda t: t and json.loads(t) in NUMBERS),
    "predicate": ([Predicate(few, on="text")], 1.0, few),
    "predicate at the end": ([Predicate(lambda t: len(t) % 2 == 0)], 1.0, lambda t: len(t) % 2 == 0),
    "two grammars": (
        [Regex("1*2?1*"), Grammar('start: ONE+\nONE: "1" | "21"', parser="earley")],
        1.0,
        lambda t: re.fullmatch("1*2?1*", t) and re.fullmatch("(1|21)+", t),
    ),
    "product": (
        [Regex("1[12]*"), Predicate(few, on="text"), Reward(twos, beta=0.8)],
        1.0,
        lambda t: t[:1] == "1" and few(t),
    ),
    "after": ([After("2", Regex("1*2"))], 1.0, lambda t: re.fullmatch("1*21*2", t)),
    "between": ([Between("1", "1", Regex("2*"))], 1.0, between),
}
PROPOSALS = {
    "local": lambda: smc.Local(),
    "local, ahead": lambda: smc.Local(ahead=3),
    **{
        f"draft, block {k}, strictness {s}": lambda k=k, s=s: smc.Draft(q, block=k, strictness=s)
        for k in (1, 3)
        for s in (0.0, 0.3)
    },
}


def log_psi(name, x):
    text = b"".join(TOKENS[i] for i in x if i != EOS).decode()
    bonus = 0.8 * twos(text) if name == "product" else 0.0
    return bonus if TARGETS[name][2](text) else -math.inf


def features(exact):
    """(sequences, F): 1, and first two tokens, last token and length where they are common."""
    prefixes = [*itertools.product(range(V), repeat=1), *itertools.product(range(V), repeat=2)]
    first = [[x[: len(u)] == u for u in prefixes] for x in exact.sequences]
    last = [[True, *(x[-1] == v for v in range(V)), *(len(x) == n for n in range(1, 5))] for x in exact.sequences]
    table = np.hstack([first, last]).astype(float)
    return table[:, exact.probabilities @ table > COMMON]


DRAFTS = [name for name in PROPOSALS if name.startswith("draft")]


def cases():
    """Every target with every proposal without a draft, and with both blocks and both strictnesses of drafts.

    Those are paired one way for one target, and the other way for the next; without masks there are fewer.
    """
    schemes = itertools.cycle(itertools.product(SCHEMES, (0.5, 1.0)))
    for i, target in enumerate(TARGETS):
        pair = (DRAFTS[0], DRAFTS[3]) if i % 2 else (DRAFTS[1], DRAFTS[2])
        unmaskable = all(isinstance(psi, Predicate | Reward) for psi in TARGETS[target][0])
        for proposal, masked in [
            *((proposal, True) for proposal in ("local", "local, ahead", *pair)),
            *((proposal, False) for proposal in ("local", pair[0]) if not unmaskable),
        ]:
            yield target, proposal, masked, *next(schemes)


@pytest.mark.parametrize(("target", "proposal", "masked", "scheme", "threshold"), list(cases()))
def test_evidence_and_posterior_are_unbiased(target, proposal, masked, scheme, threshold):
    potentials, alpha, _ = TARGETS[target]
    worth = functools.partial(log_psi, target)
    eos = frozenset([EOS])
    exact = enumerate_target(p.log_p_next(PROMPT), worth, vocab_size=V, eos=eos, max_tokens=CAP, alpha=alpha)
    goal = p**alpha
    for psi in potentials:
        goal = goal * (psi if masked else Unmasked(psi))
    method = smc.SMC(PROPOSALS[proposal](), particles=N, resampling=scheme, threshold=threshold)
    posteriors = smc.sample(goal, [list(PROMPT)] * RUNS, method=method, max_tokens=CAP, seed=0, progress=False)
    mass = np.zeros((RUNS, len(exact.sequences)))
    for row, posterior in zip(mass, posteriors, strict=True):
        for tokens, weight in zip(posterior.tokens, posterior.weights.tolist(), strict=True):
            if weight > 0:
                row[exact.index[tuple(tokens)]] += np.exp(posterior.log_z) * weight
    assert not mass[:, np.isneginf(exact.log_gamma)].any(), "a finished text breaks its constraint"
    assert_mean(mass @ features(exact), np.exp(exact.log_gamma) @ features(exact))


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_every_particle_of_positive_weight_keeps_its_constraint(proposal):
    goal = p * Regex("(1|12)*2?") * Predicate(few, on="text")
    method = smc.SMC(PROPOSALS[proposal](), particles=16)
    posterior = smc.sample(goal, [list(PROMPT)], method=method, max_tokens=12, seed=1, progress=False)[0]
    good = [x for x, w in zip(posterior.tokens, posterior.weights.tolist(), strict=True) if w > 0]
    texts = [b"".join(TOKENS[i] for i in x if i != EOS).decode() for x in good]
    assert good and all(re.fullmatch("(1|12)*2?", text) and few(text) for text in texts)
