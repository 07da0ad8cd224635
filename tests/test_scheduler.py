"""Requests that come and go: each gets the answer it gets alone, and what it held is free when it is over."""

import dataclasses
import math

import numpy as np
import pytest
from constraints import NoStutter
from engines import assert_empty, lm
from table import TableLM, random_table

import smcdecode as smc
from smcdecode.engine import model
from smcdecode.engine.cache import KVStore
from smcdecode.engine.memory import Budget
from smcdecode.engine.request import Request
from smcdecode.engine.scheduler import Scheduler
from smcdecode.engine.stats import Stats
from smcdecode.potentials.text import Prompt

V, EOS, CAP = 5, 1, 12


def table(seed, name):
    return TableLM(random_table(seed, V, floor=0.3), eos=[EOS], name=name)


PAIRS = {"tables": (table(1, "p"), table(2, "q")), "transformers": (lm("llama")[1], lm("qwen2", seed=1)[1])}
DIGITS = {"tables": 12, "transformers": 4}  # a pass over more rows may sum in another order


class Short(smc.BasePotential):
    """Fewer than six tokens; it has no mask, so ``Local()`` checks tokens as it draws them."""

    hard = True

    def log_psi(self, states, complete):
        return [0.0 if len(ids) < 6 else -math.inf for ids in states]


def targets(p):
    return (
        p.as_target(),
        p * NoStutter(),
        p.at(temperature=0.7, top_k=3) ** 2,
        p * smc.potential(lambda x: -0.5 * len(x), on="tokens", name="brief"),
        p.at(temperature=0),
        p**1.5 * NoStutter(3) * Short(),
        p.at(top_p=0.8),
    )


def methods(q):
    return (
        smc.SMC(smc.Draft(q, block=3, strictness=0.3), particles=4, threshold=0.9),
        smc.SMC(smc.Local(), particles=3),
        smc.SMC(smc.Draft(q, block=2, strictness="auto"), particles=4, threshold=1.0, bridge=2),
        smc.SMC(smc.Draft(q, block="auto", strictness=0.5), particles="auto", threshold=0.8),
        smc.Speculative(q, block=3),
        smc.MultiDraft(q, block=2, chains=3, coupling="recursive"),
        smc.Autoregressive(2),
    )


def requests(p, q):
    """Every target with every method that serves it, each with a prompt and a seed of its own."""
    rng = np.random.default_rng(0)
    found = []
    for method in methods(q):
        for target in targets(p):
            try:
                method.check(target)
            except smc.UnsupportedTarget:
                continue
            prompt = Prompt(tuple(rng.integers(2, V, rng.integers(1, 9)).tolist()))
            found.append(Request(len(found), prompt, target, method, 7 * len(found), int(rng.integers(3, CAP + 1))))
    return [found[i] for i in rng.permutation(len(found))]


def scheduler(p, q, *, lanes=4, pages=300, page_size=3, workspace=1 << 20):
    return Scheduler(p, [q], Budget(lanes, pages, workspace, page_size, CAP), Stats())


def told(outcome, digits):
    """Everything an outcome says, weights rounded."""
    numbers = lambda x: [round(float(y), digits) for y in x]  # noqa: E731
    cycles = [dataclasses.astuple(dataclasses.replace(c, ess=0, log_z=0, chi2=0, log_w=[])) for c in outcome.cycles]
    return (
        outcome.tokens, numbers(outcome.log_w), numbers(outcome.log_p), numbers([outcome.log_z]), cycles,
        [death.tokens for death in outcome.deaths],
    )  # fmt: skip


def alone(p, q, request):
    here = scheduler(p, q)
    here.add(request)
    [outcome] = [outcome for done in here.run() for outcome in done]
    return outcome


@pytest.mark.parametrize("pair", PAIRS)
def test_requests_that_join_late_get_the_answers_they_get_alone(pair):
    p, q = PAIRS[pair]
    every, digits = requests(p, q), DIGITS[pair]
    here, outcomes, coming, mixed = scheduler(p, q), {}, list(every), 0
    here.add(coming.pop())
    for done in here.run():
        here.audit()
        mixed = max(mixed, len(here.groups))
        outcomes |= {outcome.request.index: outcome for outcome in done}
        if coming:
            here.add(coming.pop())
    assert_empty(here)
    assert mixed >= 3 and len(outcomes) == len(every)
    for request in every:
        assert told(outcomes[request.index], digits) == told(alone(p, q, request), digits), request


def test_cancelled_requests_free_their_pages_at_once_and_disturb_nobody():
    p, q = PAIRS["tables"]
    every = requests(p, q)
    here = scheduler(p, q, lanes=3, pages=200)
    for request in every:
        here.add(request)
    outcomes, cancelled, freed, rng = {}, set(), 0, np.random.default_rng(1)
    for done in here.run():
        outcomes |= {outcome.request.index: outcome for outcome in done}
        running = [request.index for group in here.groups for request in group.requests]
        for index in [*rng.permutation(running)[:1].tolist(), *[r.index for r in here._waiting][:1]]:
            if rng.random() < 0.3:
                pages = here.stores.pool.used
                assert here.cancel(index) and not here.cancel(index)
                freed += here.stores.pool.used < pages  # not where it waited, or had not begun to read its prompt
                cancelled.add(index)
                here.audit()
    assert_empty(here)
    assert freed > 5 and not cancelled & set(outcomes)
    assert cancelled | set(outcomes) == {request.index for request in every}
    for request in every:
        if request.index in outcomes:
            assert told(outcomes[request.index], 12) == told(alone(p, q, request), 12)


def test_when_all_are_cancelled_the_run_ends_and_another_may_begin():
    p, q = PAIRS["tables"]
    first, second, third = requests(p, q)[:3]
    here = scheduler(p, q)
    here.add(first)
    here.add(second)
    run = here.run()
    next(run)
    assert here.cancel(first.index) and here.cancel(second.index)
    assert here.stores.pool.used == 0
    assert list(run) == []
    here.add(third)
    [outcome] = [outcome for done in here.run() for outcome in done]
    assert told(outcome, 12) == told(alone(p, q, third), 12)
    assert_empty(here)


def test_what_can_never_fit_or_run_is_refused_with_the_numbers():
    p, q = PAIRS["tables"]
    plain = Request(0, Prompt((2, 3)), p.as_target(), smc.SMC(smc.Draft(q), 8), 0, CAP)
    with pytest.raises(smc.OutOfPages, match=r"may need 33 pages .* but there are 32 pages .* lower max_tokens"):
        scheduler(p, q, pages=32).add(plain)
    with pytest.raises(smc.OutOfPages, match=r"bytes of logits, but there are 300 pages and 100 bytes"):
        scheduler(p, q, workspace=100).add(plain)
    with pytest.raises(smc.InvalidOption, match="max_tokens is at most 12 here; got 13"):
        scheduler(p, q).add(dataclasses.replace(plain, max_tokens=13))
    with pytest.raises(smc.InvalidOption, match="runs p with q; got p and other"):
        scheduler(p, q).add(dataclasses.replace(plain, method=smc.SMC(smc.Draft(table(3, "other")))))


def test_a_call_that_is_over_holds_no_keys_and_values(monkeypatch):
    """At once, not when Python next looks for circles of objects: the next call counts what is free."""
    made = []

    class Watched(KVStore):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(model, "KVStore", Watched)
    (_, p), (_, q) = lm("llama"), lm("llama", seed=1)
    method = smc.SMC(smc.Draft(q, block=2), 2)
    smc.sample(p, [2, 3], method=method, max_tokens=4, seed=0)
    list(smc.stream(p, [2, 3], on="tokens", method=method, max_tokens=4, seed=0))
    with smc.stream(p, [2, 3], on="tokens", method=method, max_tokens=4, seed=0) as pieces:
        next(pieces)
    assert len(made) == 6
    assert not any(store.keys or store.values or store._rows for store in made)
