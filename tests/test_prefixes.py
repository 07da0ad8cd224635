"""Prompts that begin alike share pages: the same answers, bit by bit, and every page accounted for."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from constraints import NoStutter
from engines import assert_empty
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from models import COMMON, tiny

import smcdecode as smc
from smcdecode.engine.memory import Budget
from smcdecode.engine.pages import PagePool
from smcdecode.engine.prefixes import Prefixes, piece_ends
from smcdecode.engine.request import Request
from smcdecode.engine.scheduler import Scheduler
from smcdecode.engine.stats import Stats
from smcdecode.errors import OutOfPages
from smcdecode.potentials.text import Prompt

# ---- pages alone


def test_pieces_end_at_the_same_places_in_every_prompt_and_at_the_end_of_pages():
    assert piece_ends(63, 1) == []
    assert piece_ends(400, 1) == piece_ends(400, 16) == [64, 128, 256, 384]
    assert piece_ends(400, 5) == [65, 130, 260, 385]
    assert piece_ends(400, 100) == [100, 200, 300, 400]
    for page_size in (1, 3, 16, 200):
        ends = piece_ends(2000, page_size)
        assert all(end % page_size == 0 for end in ends)
        assert all(piece_ends(n, page_size) == [end for end in ends if end <= n] for n in range(0, 2000, 37))


PAGES, PAGE_SIZE = 120, 3
BASES = [tuple(np.random.default_rng(seed).integers(0, 9, 300).tolist()) for seed in range(3)]
prompts = st.builds(
    lambda base, cut, tail: (*BASES[base][:cut], *tail),
    st.integers(0, 2), st.sampled_from([1, 50, 66, 67, 129, 140, 260]), st.lists(st.integers(10, 11), max_size=2),
)  # fmt: skip


class Shared(RuleBasedStateMachine):
    """``memory[model][page]`` is the text up to the end of the page, written when the model is told to read it."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES)
        self.prefixes = Prefixes(self.pool, PAGE_SIZE)
        self.memory = {"p": {}, "q": {}}
        self.opened, self.reserved = [], 0

    @rule(tokens=prompts, models=st.sampled_from([("p",), ("p", "q")]))
    def open(self, tokens, models):
        cost = self.prefixes.cost(tokens)
        if self.reserved + cost > PAGES:
            return
        self.reserved += self.prefixes.reserve(tokens)
        pages, known = self.prefixes.open(tokens, models)  # what is reserved is there, whatever is kept
        assert len(pages) == len(set(pages.tolist())) == -(-len(tokens) // PAGE_SIZE)
        for model, n in zip(models, known, strict=True):
            assert n < len(tokens) and n in (0, *piece_ends(len(tokens), PAGE_SIZE))
            for place, page in enumerate(pages.tolist()):
                text = tokens[: (place + 1) * PAGE_SIZE]
                if (place + 1) * PAGE_SIZE <= n:
                    assert self.memory[model][page] == text
                self.memory[model][page] = text
        self.opened.append((tokens, pages))

    @rule(which=st.integers(0, 20))
    def close(self, which):
        if self.opened:
            tokens, pages = self.opened.pop(which % len(self.opened))
            self.pool.release(pages)
            self.reserved -= self.prefixes.settle(tokens)

    @rule(n=st.integers(0, PAGES))
    def take_own(self, n):
        if n > self.pool.free:
            with pytest.raises(OutOfPages):
                self.pool.take(n)
            return
        pages = self.pool.take(n)
        self.prefixes.audit()
        for model in self.memory.values():
            model.update(dict.fromkeys(pages.tolist(), "own"))
        self.pool.release(pages)

    @rule()
    def fail(self):
        self.prefixes.clear()
        while self.opened:
            self.close(0)
        assert self.prefixes.idle == 0

    @invariant()
    def every_page_is_free_kept_or_held(self):
        self.prefixes.audit()
        self.pool.audit([pages for _, pages in self.opened])
        held = {page for _, pages in self.opened for page in pages.tolist()}
        assert self.pool.used == len(held) <= self.reserved <= PAGES
        blank = int((~self.pool.kept[1:] & (self.pool.counts[1:] == 0)).sum())
        assert blank + self.prefixes.idle + len(held) == PAGES


TestShared = Shared.TestCase
TestShared.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_the_least_recently_used_ending_goes_first():
    pool = PagePool(400)
    prefixes = Prefixes(pool, 1)
    long, other = BASES[0][:140], BASES[1][:70]
    for tokens in (other, long, BASES[0][:100]):
        pool.release(prefixes.open(tokens, ["p"])[0])
    assert prefixes.idle == 128 + 64
    pool.release(pool.take(400 - 128))
    assert prefixes.open(other, ["p"])[1] == [0], "the oldest was to go"
    assert prefixes.open(long, ["p"])[1] == [128]
    pool.take(pool.free - 100)
    assert prefixes.open((*long[:128], 5), ["p"])[1] == [128], "what is held stays"


def test_a_model_that_has_not_read_the_pages_reads_them():
    prefixes = Prefixes(PagePool(400), 1)
    first, read = prefixes.open(BASES[0][:140], ["p"])
    second, both = prefixes.open(BASES[0][:150], ["p", "q"])
    assert (read, both) == ([0], [128, 0])
    assert torch.equal(first[:128], second[:128])
    assert prefixes.open(BASES[0][:128], ["p", "q"])[1] == [64, 64], "a token is left to read"


# ---- the engine


V, CAP, CONTEXT = 30, 10, 256


def load(family, seed):
    with pytest.MonkeyPatch.context() as patch:  # whole vectors, as in real models: their tails are rounded otherwise
        patch.setitem(COMMON, "intermediate_size", 64)
        model = tiny(family, vocab=V, seed=seed, spread=0.12)
    return smc.load(model, name=f"{family} {seed}")


def methods(q):
    return (
        smc.SMC(smc.Draft(q, block=3, strictness=0.3), particles=4, threshold=0.9),
        smc.SMC(smc.Local(), particles=3),
        smc.SMC(smc.Local(ahead=4), particles=3),
        smc.Speculative(q, block=3),
        smc.MultiDraft(q, block=2, chains=3, coupling="recursive"),
        smc.Autoregressive(2),
        smc.SMC(smc.Draft(smc.PromptLookup(), block=3), particles=2),
    )


def stream(p, q, n, seed=0):
    """Requests whose prompts begin alike, of lengths at, before and behind the ends of pieces."""
    rng = np.random.default_rng(seed)
    bases = rng.integers(2, V, (3, CONTEXT - CAP))
    cuts = [3, 64, 65, 100, 128, 129, 200]
    kinds = itertools.cycle((method, target) for method in methods(q) for target in (p.as_target(), p**2 * NoStutter()))
    found = []
    while len(found) < n:
        method, target = next(kinds)
        try:
            method.check(target)
        except smc.UnsupportedTarget:
            continue
        cut, tail = rng.choice(cuts), rng.integers(2, V, rng.integers(0, 4))
        prompt = Prompt((*bases[rng.integers(3), :cut].tolist(), *tail.tolist()))
        found.append(Request(len(found), prompt, target, method, len(found), int(rng.integers(3, CAP + 1))))
    return [found[i] for i in rng.permutation(n)]


def scheduler(p, q, *, lanes=3, pages=4000, page_size=1):
    return Scheduler(p, [q], Budget(lanes, pages, 1 << 20, page_size, CAP), Stats())


def told(outcome):
    """Everything an outcome says, to the last bit."""
    return (
        outcome.tokens, outcome.log_w.tolist(), outcome.log_p.tolist(), outcome.log_z,
        [dataclasses.astuple(cycle) for cycle in outcome.cycles],
    )  # fmt: skip


def alone(p, q, request, page_size):
    here = scheduler(p, q, page_size=page_size)
    here.add(request)
    [outcome] = [outcome for done in here.run() for outcome in done]
    assert here.stats.prompt_tokens_read == here.stats.prompt_tokens
    return told(outcome)


@pytest.mark.parametrize(
    ("family", "page_size", "pages"), [("llama", 4, 200), ("gemma3", 3, 4000), ("mistral", 1, 700)]
)
def test_answers_are_the_same_bit_by_bit_with_shared_pages_and_without(family, page_size, pages):
    p, q = load(family, 0), load("qwen2", 1)
    every = stream(p, q, 28)
    here, outcomes, coming, cancelled = scheduler(p, q, pages=pages, page_size=page_size), {}, list(every), set()
    here.add(coming.pop())
    rng = np.random.default_rng(1)
    for done in here.run():
        here.audit()
        outcomes |= {outcome.request.index: outcome for outcome in done}
        running = [request.index for group in here.groups for request in group.requests]
        if running and rng.random() < 0.05:
            assert here.cancel(int(rng.choice(running)))
            here.audit()
            cancelled |= set(running) - {request.index for group in here.groups for request in group.requests}
        for request in (coming.pop() for _ in range(min(2, len(coming)))):
            here.add(request)
    assert_empty(here)
    assert set(outcomes) == {request.index for request in every} - cancelled
    assert here.stats.prompt_tokens_read < 0.8 * here.stats.prompt_tokens
    for request in every:
        if request.index in outcomes:
            assert told(outcomes[request.index]) == alone(p, q, request, page_size), request


class Barrier(NoStutter):
    """Raises when it is asked for a mask: after prompts have got their pages, before they are read."""

    def mask(self, states):
        raise ValueError("barred")


def test_prompts_that_an_error_left_unread_are_read_by_those_that_come_after():
    p, q = load("llama", 0), load("qwen2", 1)
    prompt, method = Prompt(tuple(range(2, 30)) * 4), smc.SMC(smc.Local(ahead=4), particles=3)
    barred, free = (Request(i, prompt, p * psi, method, 3, CAP) for i, psi in enumerate([Barrier(), NoStutter()]))
    here = scheduler(p, q)
    here.add(barred)
    with pytest.raises(smc.PotentialError, match="barred"):
        list(here.run())
    assert_empty(here)
    here.add(free)
    [outcome] = [outcome for done in here.run() for outcome in done]
    assert told(outcome) == alone(p, q, free, 1)


def test_taking_another_prompts_pages_for_ones_own_would_be_noticed(monkeypatch):
    p, q = load("llama", 0), load("qwen2", 1)
    first, second = (
        Request(i, Prompt((*range(2, 30), *range(2, 30), *[i + 2] * 20)), p.as_target(), smc.SMC(), 0, CAP)
        for i in range(2)
    )
    keys = Prefixes._keys
    for wrong in (False, True):
        if wrong:
            monkeypatch.setattr(Prefixes, "_keys", lambda self, tokens: keys(self, [7] * len(tokens)))
        here = scheduler(p, q)
        here.add(first)
        here.add(second)
        outcomes = {outcome.request.index: outcome for done in here.run() for outcome in done}
        assert (told(outcomes[1]) == alone(p, q, second, 1)) is not wrong


def test_prompts_that_share_pages_run_together_where_their_sum_would_not_fit():
    p, q = load("llama", 0), load("qwen2", 1)
    every = [Request(i, Prompt((*[5] * 128, i)), p.as_target(), smc.Autoregressive(1), i, CAP) for i in range(4)]
    here = scheduler(p, q, lanes=4, pages=128 + 4 * (1 + CAP))
    for request in every:
        here.add(request)
    run = here.run()
    next(run)
    assert here.running == 4 and here.stats.prompt_tokens_read == 128 + 4
    run.close()
    assert_empty(here)


def test_what_is_kept_makes_no_request_wait():
    p, q = load("llama", 0), load("qwen2", 1)
    pages = 129 + CAP
    here = scheduler(p, q, lanes=4, pages=pages)
    for i in range(3):
        here.add(Request(i, Prompt((i + 2,) * 129), p.as_target(), smc.Autoregressive(1), i, CAP))
        list(here.run())
        assert here.stores.prefixes.idle == 128
        assert here.stores.pool.free == pages
    assert_empty(here)
