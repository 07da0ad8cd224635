"""What happens when something is wrong, impossible or at an edge: values, errors and the remedies they name."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from constraints import NoStutter, log_psi
from table import TableLM, random_table
from test_master import CAP, EOS, PROMPT, assert_unbiased, events, p, without_eos

import smcdecode as smc
from smcdecode.infer.exact import enumerate_target
from smcdecode.potentials.vocabulary import Vocabulary

V = 4
q = TableLM(random_table(2, V, floor=0.5), eos=[EOS], name="q")
NEVER = smc.potential(lambda text: -math.inf, name="never")


def draft(model=q, **options):
    return smc.SMC(smc.Draft(model, **{"block": 2, "strictness": 0.0, **options}), particles=4)


def sample(target, method=None, prompts=PROMPT, **options):
    return smc.sample(
        target, list(prompts), method=method, **{"max_tokens": CAP, "seed": 1, "progress": False, **options}
    )


def logits_of(model, change):
    """The same model with changed logits."""
    other = TableLM(model.table, eos=[EOS], name="broken")
    change(other.logits)
    return other


# ---- deaths


@pytest.mark.parametrize("method", [None, draft(), draft(strictness=1.0)])
def test_a_run_in_which_all_die_has_evidence_zero_and_says_who_did_it(method):
    out = sample(p * NEVER, method)
    assert out.log_z == -math.inf
    assert not any(out.weights)
    assert {death.cause for death in out.deaths} == {"never"}
    assert len(out.deaths) == out.N
    with pytest.raises(smc.NoSurvivors, match="never"):
        _ = out.text


def test_the_dead_do_not_touch_their_neighbours():
    pick = smc.potential(lambda x, prompt: -math.inf if prompt == (1,) else 0.0, on="tokens", name="not after 1")
    together = smc.sample(p * pick, [[0], [1], [2]], max_tokens=6, seed=3, progress=False)
    assert [out.log_z for out in together] == [0.0, -math.inf, 0.0]
    assert together[2].tokens == sample(p * pick, prompts=[2], max_tokens=6, seed=3).tokens


class NothingAllowed(smc.BasePotential):
    """A mask that leaves no token once a continuation has ``after`` of them."""

    def __init__(self, after):
        self.after = after

    def log_psi(self, states, complete):
        return [-math.inf if len(ids) > self.after else 0.0 for ids in states]

    def mask(self, states):
        return torch.tensor([[len(ids) < self.after] * V for ids in states])


@pytest.mark.parametrize("method", [smc.SMC(), draft(block=3), draft(block=3, strictness=0.5)])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_mask_that_leaves_nothing_kills(after, method):
    endless = TableLM(p.table, name="endless")
    out = sample(endless * NothingAllowed(after), method)
    assert out.log_z == -math.inf
    assert all("masks" in death.cause for death in out.deaths)


def test_a_constraint_not_met_at_the_cap_kills():
    needs = smc.potential(lambda text: 0.0 if "aaa" in text else -math.inf, on="final", name="three a")
    runs = smc.sample(p * needs, [list(PROMPT)] * 50, max_tokens=CAP, seed=0, progress=False)
    survivors = [t for out in runs for t, w in zip(out.tokens, out.weights, strict=True) if w > 0]
    assert survivors
    assert all("aaa" in "".join("abcd"[t] for t in x) for x in survivors)
    at_cap = [death for out in runs for death in out.deaths if len(death.tokens) == CAP and death.tokens[-1] != EOS]
    assert at_cap
    assert {death.cause for out in runs for death in out.deaths} == {"three a"}


# ---- broken parts


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_potential_that_is_no_number_is_named(value):
    with pytest.raises(smc.InvalidWeight, match=r"'odd one' gave log ψ = (nan|inf)"):
        sample(p * smc.potential(lambda text: value, name="odd one"), draft())


@pytest.mark.parametrize("law", [{}, {"temperature": 0}, {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_name_the_target(value, law):
    broken = logits_of(p, lambda logits: logits[:, 2].fill_(value))
    if law == {"temperature": 0} and value == math.inf:
        pytest.skip("+inf is the largest logit: its argmax is well defined")
    with pytest.raises(smc.InvalidWeight, match="broken produced NaN or infinite logits: check"):
        sample(broken.at(**law))


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.5}])
def test_logits_that_are_not_numbers_name_the_draft(options):
    broken = logits_of(q, lambda logits: logits[:, 1].fill_(math.nan))
    with pytest.raises(smc.InvalidWeight, match="broken produced NaN or infinite logits: check"):
        sample(p, draft(broken, strictness=0.5, **options))


@pytest.mark.parametrize("verb", ["start", "advance", "fork", "log_psi", "mask"])
def test_an_error_in_any_method_of_a_potential_names_it(verb):
    class Faulty(NoStutter):
        name = "faulty"

    def fail(self, *args):
        raise LookupError("lost it")

    setattr(Faulty, verb, fail)
    with pytest.raises(smc.PotentialError, match=r"'faulty' raised LookupError.*lost it"):
        sample(p * Faulty(), smc.SMC(smc.Draft(q, block=2, strictness=0.5), threshold=1.0))


def test_an_interrupt_passes_through():
    def stop(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(p * smc.potential(stop))


# ---- prompts


@pytest.mark.parametrize("prompts", ["", [], [[]], [[0], []], ["", ""]])
def test_an_empty_prompt_is_refused(prompts):
    with pytest.raises(smc.PromptError, match=r"empty: give at least one token|a prompt is a string"):
        smc.sample(p, prompts, progress=False)


@pytest.mark.parametrize("prompts", [3, None, [1.5], [[0], 3], {0: 1}])
def test_a_prompt_of_another_kind_is_refused(prompts):
    with pytest.raises(smc.PromptError, match="a prompt is a string, "):
        smc.sample(p, prompts, progress=False)


@pytest.mark.parametrize("prompt", [[0, V], [-1]])
def test_ids_outside_the_vocabulary_are_refused(prompt):
    with pytest.raises(smc.PromptError, match="outside p's vocabulary of 4"):
        smc.sample(p, prompt, progress=False)


def test_text_needs_a_tokenizer():
    with pytest.raises(smc.PromptError, match=r"no tokenizer: give token ids, or smc.load"):
        smc.sample(p, "abc", progress=False)


@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_prompt_longer_than_the_context_is_refused(which):
    short = TableLM(p.table, eos=[EOS], name="short")
    short.context = 6
    target, method = (short, None) if which == "target" else (p, draft(short))
    sample(target, method, [0, 1])
    with pytest.raises(smc.PromptError, match=r"3 prompt tokens and max_tokens=4 make 7, more than the 6 .* of short"):
        sample(target, method, [0, 1, 2])


def test_a_budget_that_can_never_do_gives_the_numbers():
    with pytest.raises(
        smc.OutOfPages, match=r"may need 33 pages of 1 bytes .* allows 100: raise memory=, or lower max_"
    ):
        sample(p, smc.SMC(particles=8), memory=100)


# ---- models that do not fit


def test_vocabularies_that_disagree_are_refused():
    other = TableLM(q.table, eos=[EOS], name="other")
    other.vocabulary = Vocabulary(V, frozenset([EOS]), (b"a", b"x", b"c", b"d"), frozenset(), "other")
    with pytest.raises(smc.VocabularyMismatch, match=r"(?s)b'b'.*b'x'|'b'.*'x'"):
        sample(p, draft(other))


def zero_draft():
    table = q.table.copy()
    table[:, 1] = 0.0
    return TableLM(table / table.sum(1, keepdims=True), eos=[EOS], name="never b")


def test_a_draft_with_zeros_is_refused_where_weights_alone_must_mend_it():
    with pytest.raises(smc.SupportError, match=r"never b gives probability zero .* set strictness > 0"):
        smc.sample(p, [list(PROMPT)] * 20, method=draft(zero_draft()), max_tokens=CAP, seed=0, progress=False)


SMALL = TableLM(q.table[:3, :3] / q.table[:3, :3].sum(1, keepdims=True), name="small")
WIDE = TableLM(p.table, eos=[0], name="wide")
WIDE.vocabulary = dataclasses.replace(WIDE.vocabulary, special=frozenset([3]))


def test_a_draft_that_lacks_ids_is_refused_where_weights_alone_must_mend_it():
    with pytest.raises(smc.SupportError, match=r"small lacks ids 3 to 3 of wide .* set strictness > 0"):
        sample(WIDE, draft(SMALL))


def exact(prompt=PROMPT, psi=lambda x: 0.0, eos=(EOS,)):
    return enumerate_target(p.log_p_next(prompt), psi, vocab_size=V, eos=frozenset(eos), max_tokens=CAP)


MISSING = [{}, {"temperature": 0}, {"top_k": 1}, {"top_p": 0.6}]


@pytest.mark.parametrize(
    ("options", "strictness"),
    [*((options, s) for options, s in zip(MISSING, (0.1, 0.5, 1.0, 0.1), strict=True)), ({"top_k": 1}, 0.1)],
)
def test_what_a_draft_misses_strictness_redraws(options, strictness):
    method = draft(zero_draft(), strictness=strictness, block=3, **options)
    runs = smc.sample(p, [list(PROMPT)] * 1000, method=method, max_tokens=CAP, seed=0, progress=False)
    assert_unbiased(runs, exact())


@pytest.mark.parametrize("strictness", [0.1, 1.0])
def test_a_draft_may_lack_ids_even_those_of_the_prompt(strictness):
    method = draft(SMALL, strictness=strictness, block=3)
    runs = smc.sample(WIDE, [[3]] * 1000, method=method, max_tokens=CAP, seed=0, progress=False)
    assert_unbiased(runs, exact(prompt=(3,), eos=[0]))


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_truncated_draft_is_refused_without_strictness(options):
    with pytest.raises(smc.SupportError, match=r"truncated or greedy draft .* set strictness > 0"):
        sample(p, draft(**options))


# ---- targets that a method cannot serve


@pytest.mark.parametrize("target", [p**2, p * NEVER])
def test_autoregressive_refuses_what_needs_weights(target):
    with pytest.raises(smc.UnsupportedTarget, match=r"need weights. Use smc.SMC"):
        sample(target, smc.Autoregressive())


def test_a_greedy_power_is_refused():
    with pytest.raises(smc.UnsupportedTarget, match="one text"):
        sample(p.at(temperature=0) ** 2)


# ---- options


@pytest.mark.parametrize(
    "call",
    [
        lambda: smc.SMC(particle=3),
        lambda: smc.SMC(smc.Local(), 8, "ssp"),
        lambda: smc.Draft(q, blocks=3),
        lambda: smc.Autoregressive(particles=3),
        lambda: smc.sample(p, [0], temperature=1.0),
        lambda: p.at(topk=3),
        lambda: p.at(0.5),
    ],
)
def test_an_unknown_option_is_an_error(call):
    with pytest.raises(TypeError):
        call()


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda: smc.SMC(particles=0), "particles must be an integer ≥ 1"),
        (lambda: smc.SMC(particles=2.0), "particles must be an integer ≥ 1"),
        (lambda: smc.SMC(resampling="sytematic"), "one of multinomial, stratified"),
        (lambda: smc.SMC(threshold=2), r"threshold must lie in \[0, 1\]"),
        (lambda: smc.SMC(threshold=math.nan), r"threshold must lie in \[0, 1\]"),
        (lambda: smc.SMC(bridge=-1), "bridge must be"),
        (lambda: smc.SMC(q), "smc.Draft"),
        (lambda: smc.Draft(q, block=0), r"without a draft use Local\(\)"),
        (lambda: smc.Draft(q, strictness=1.5), r"strictness must lie in \[0, 1\]"),
        (lambda: smc.Draft(q, strictness=math.nan), r"strictness must lie in \[0, 1\]"),
        (lambda: smc.Draft("gpt2"), "smc.load"),
        (lambda: smc.Draft(q, temperature=-1), "temperature must be a finite number"),
        (lambda: smc.Draft(q, top_k=0), "top_k must be an integer ≥ 1"),
        (lambda: smc.Draft(q, top_p=0.0), r"top_p must lie in \(0, 1\]"),
        (lambda: p**0, "finite alpha > 0"),
        (lambda: p**math.inf, "finite alpha > 0"),
        (lambda: p * (lambda text: 0.0), r"smc.potential\(fn\)"),
        (lambda: (p * NEVER) ** 2, r"p \*\* alpha \* psi"),
        (lambda: (p**2).at(temperature=0.5), "temper the model before"),
        (lambda: sample("gpt2"), "smc.load"),
        (lambda: sample(p, "smc"), r"smc.SMC\("),
        (lambda: sample(p, max_tokens=0), "max_tokens must be an integer ≥ 1"),
        (lambda: sample(p, page_size=0), "page_size must be an integer ≥ 1"),
        (lambda: sample(p, seed="x"), "seed must be an integer"),
        (lambda: sample(p, memory=0), "memory must be a fraction"),
        (lambda: smc.Autoregressive(samples=0), "samples must be an integer ≥ 1"),
    ],
)
def test_a_value_that_means_nothing_names_those_that_do(call, remedy):
    with pytest.raises(smc.InvalidOption, match=remedy):
        call()


# ---- seeds and endings


def test_the_same_seed_gives_the_same_answer_and_none_draws_one():
    run = lambda seed: sample(p, draft(), max_tokens=8, seed=seed)  # noqa: E731
    assert run(7).tokens == run(7).tokens
    assert run(7).tokens != run(8).tokens
    assert len({run(None).tokens for _ in range(5)}) > 1
    assert run(-(2**70)).tokens == run(-(2**70)).tokens


def test_nothing_global_is_drawn_from():
    states = lambda: (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()))  # noqa: E731, NPY002
    before = states()
    sample(p, draft())
    assert states() == before


@pytest.mark.parametrize("method", [smc.Autoregressive(samples=4), draft(block=3), draft(block=3, strictness=0.7)])
def test_every_eos_id_ends_a_text_wherever_it_falls_in_a_block(method):
    two = TableLM(p.table, eos=[2, 3], name="two ends")
    guess = TableLM(q.table, eos=[2, 3], name="guess")
    if isinstance(method, smc.SMC):
        method = draft(guess, block=3, strictness=method.proposal.strictness)
    runs = smc.sample(two, [list(PROMPT)] * 1000, method=method, max_tokens=CAP, seed=0, progress=False)
    texts = [x for out in runs for x in out.tokens]
    assert all(not {2, 3} & set(x[:-1]) for x in texts)
    assert all(x[-1] in (2, 3) or len(x) == CAP for x in texts)
    assert {(x[-1], len(x)) for x in texts} >= {(e, n) for e in (2, 3) for n in range(1, CAP + 1)}
    assert_unbiased(runs, exact(eos=(2, 3)))


class LateMask(NoStutter):
    """Its mask begins with the second token: inside the first drafted block."""

    def mask(self, states):
        return None if all(len(ids) < 2 for ids in states) else super().mask(states)


@pytest.mark.parametrize("method", [smc.SMC(particles=4), draft(block=3), draft(block=3, strictness=0.7)])
def test_a_mask_may_begin_inside_a_block(method):
    runs = smc.sample(p * LateMask(), [list(PROMPT)] * 1000, method=method, max_tokens=CAP, seed=0, progress=False)
    assert_unbiased(runs, exact(psi=without_eos(log_psi(LateMask()))))


def test_one_token_is_a_text():
    runs = smc.sample(p, [list(PROMPT)] * 1000, method=draft(block=5), max_tokens=1, seed=0, progress=False)
    assert {len(x) for out in runs for x in out.tokens} == {1}
    assert all(out.log_z == 0.0 for out in runs)
    assert len(events([x for out in runs for x in out.tokens])) == 4000


def test_a_death_is_told_in_the_words_of_the_constraint():
    out = smc.sample(
        p * smc.Regex("ab*c"), list(PROMPT), method=smc.SMC(particles=4), max_tokens=2, seed=0, progress=False
    )
    assert out.log_z == -math.inf or out.deaths
    assert all(death.why for death in out.deaths if death.cause.startswith("Regex"))
    assert any(death.why for death in out.deaths)
