"""The recorded cycle writes what the engine writes step by step, and asks nothing of the host on its way."""

import pytest
import torch
from engines import finish, lm, outcomes_of, scheduler_of
from models import tiny
from pretend import DEVICE, Pretend
from stand_in import Library
from stats import assert_mean

import smcdecode as smc
from smcdecode.engine import load
from smcdecode.engine.fixed.cycle import FixedCycle
from smcdecode.engine.fixed.group import FixedGroup
from smcdecode.engine.flashinfer import FlashInfer
from smcdecode.engine.graphs import bucket_of
from smcdecode.errors import InvalidWeight

PROMPTS = [[3, 4, 2, 6], [5, 2], [7], [5, 2]]

CASES = {
    "autoregressive": lambda p, q: (p.at(temperature=0.8), smc.Autoregressive()),
    "reweighted": lambda p, q: (p**2, smc.SMC(smc.Draft(q, block=2, strictness=0.0), particles=4)),
    "strict": lambda p, q: (p**2, smc.SMC(smc.Draft(q, block=3, strictness=0.3), particles=4)),
    "truncated draft": lambda p, q: (
        p.at(temperature=0.7),
        smc.SMC(smc.Draft(q, strictness=0.6, temperature=1.5, top_k=4), particles=3),
    ),
    "speculative": lambda p, q: (p, smc.Speculative(q)),
    "local": lambda p, q: (p**3, smc.SMC(smc.Local(), particles=5, resampling="stratified", threshold=1.0)),
    "one token": lambda p, q: (p**2, smc.SMC(smc.Draft(smc.LayerSkip(p, layers=1), block=1), particles=2)),
}


def pair(device="cpu", graphs=True, families=("llama", "qwen2")):
    modules = [tiny(family, vocab=11, seed=seed, spread=0.15).to(device) for seed, family in enumerate(families)]
    return [
        smc.load(module, name=name, attention="torch", graphs=graphs)
        for module, name in zip(modules, "pq", strict=True)
    ]


def answers(case, models, page_size=1, max_tokens=9, prompts=PROMPTS, memory=1 << 28):
    target, method = CASES[case](*models)
    return smc.sample(target, prompts, method=method, max_tokens=max_tokens, seed=2, memory=memory, page_size=page_size)


def assert_same(there, here):
    """The same tokens, weights and records, to rounding."""
    for a, b in zip(there, here, strict=True):
        assert a.tokens == b.tokens
        for field in ("log_w", "log_p", "weights"):
            torch.testing.assert_close(
                torch.tensor(getattr(a, field)), torch.tensor(getattr(b, field)), check_dtype=False,
                rtol=1e-4, atol=1e-4,
            )  # fmt: skip
        assert a.log_z == pytest.approx(b.log_z, abs=1e-4)
        assert len(a.steps) == len(b.steps)
        for s, t in zip(a.steps, b.steps, strict=True):
            assert (s.ess, s.log_z, s.chi2) == pytest.approx((t.ess, t.log_z, t.chi2), rel=1e-3, abs=1e-4)
            assert s.log_w == pytest.approx(t.log_w, abs=1e-4)
            for field in ("resampled", "survivors", "alive", "particles", "tokens", "ancestors", "counts", "written"):
                assert getattr(s, field) == getattr(t, field), field


@pytest.mark.parametrize(("case", "page_size"), [*((case, 3 if "t" in case else 1) for case in CASES), ("strict", 1)])
def test_it_writes_what_the_engine_writes_step_by_step(case, page_size):
    there, here = answers(case, pair(), page_size), answers(case, pair(graphs=False), page_size)
    assert_same(there, here)
    stats, plain = there[0].stats, here[0].stats
    assert stats.recorded == stats.cycles and not plain.recorded
    assert (stats.drafted, stats.accepted, stats.tokens) == (plain.drafted, plain.accepted, plain.tokens)
    assert page_size > 1 or not stats.bytes_moved


@pytest.mark.parametrize(("case", "page_size"), [("reweighted", 1), ("strict", 2), ("local", 1)])
def test_nothing_in_it_waits_for_the_device_or_depends_on_a_number(case, page_size, monkeypatch):
    monkeypatch.setattr(load, "DEVICES", ("cpu", DEVICE.type))
    how = {"page_size": page_size, "max_tokens": 4, "prompts": PROMPTS[:2]}
    here = answers(case, pair(graphs=False), **how)
    cycles = watched(monkeypatch)
    with Pretend() as mode:
        cycles.mode = mode
        there = answers(case, pair(DEVICE), **how)
    assert_same(there, here)
    assert cycles.count == there[0].stats.recorded + 1 > 2  # when the last is read the next has begun


class watched:  # noqa: N801
    """Makes every recorded cycle a strict one."""

    def __init__(self, monkeypatch):
        self.mode, self.count, plain = None, 0, FixedCycle.__call__

        def cycle(this, state):
            self.mode.strict, self.count = True, self.count + 1
            try:
                plain(this, state)
            finally:
                self.mode.strict = False

        monkeypatch.setattr(FixedCycle, "__call__", cycle)


def test_what_cannot_be_recorded_is_seen():
    with Pretend() as mode:
        x = torch.arange(4, device=DEVICE)
        mode.strict = True
        for bad, said in [
            (lambda: x.sum().item(), "waits"),
            (lambda: bool((x > 2).any()), "waits"),
            (lambda: x.tolist(), "waits|device|not supported"),
            (lambda: x.nonzero(), "shape"),
            (lambda: x[x > 2], "shape"),
            (lambda: torch.where(x > 2), "shape"),
            (lambda: x.unique(), "shape"),
            (lambda: x.repeat_interleave(x), "shape"),
            (lambda: x.cpu(), "one device to the other"),
            (lambda: torch.tensor([1, 2]).to(DEVICE), "one device to the other"),
        ]:
            for inference in (False, True):
                with torch.inference_mode(inference), pytest.raises(RuntimeError, match=said):
                    bad()
        assert x[torch.zeros(2, dtype=torch.int64, device=DEVICE)].shape == (2,)


def test_a_cycle_that_asks_for_a_number_is_caught(monkeypatch):
    monkeypatch.setattr(load, "DEVICES", ("cpu", DEVICE.type))
    settle = FixedCycle._settle

    def asking(this, state, bonus):
        return settle(this, state, bonus) * bonus.any().item()

    monkeypatch.setattr(FixedCycle, "_settle", asking)
    cycles = watched(monkeypatch)
    with Pretend() as mode, pytest.raises(RuntimeError, match="the host waits"):
        cycles.mode = mode
        answers("strict", pair(DEVICE), max_tokens=3, prompts=PROMPTS[:1])


def test_few_lanes_run_apart_from_the_many():
    assert [bucket_of(n, 6) for n in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    prompts = [[3 + i % 5, 2] for i in range(7)]
    p, q = pair()
    small = 3 * 4 * 12 * (p.layout.layers[0].kv_heads * 2 * 8 * 2 * 4 * 2) + 3 * 4 * 11 * 4 * 23
    there = answers("strict", (p, q), prompts=prompts, memory=small)
    assert there[0].stats.pages < 7 * 38  # so not all run at once
    assert_same(there, answers("strict", pair(graphs=False), prompts=prompts))


def test_requests_that_are_not_served_run_step_by_step():
    p, q = pair()
    calm = smc.potential(lambda tokens: -0.1 * len(tokens), on="tokens", name="calm")
    for target, method in [
        (p * calm, smc.SMC(smc.Local(), particles=3)),
        (p.at(temperature=0), smc.Autoregressive()),
        (p.at(top_k=3), smc.Autoregressive()),
        (p**2, smc.SMC(smc.Local(), particles=3, bridge=2)),
        (p, smc.SMC(smc.Draft(q, block="auto"), particles=3)),
        (p, smc.SMC(smc.Draft(q), particles="auto")),
        (p, smc.SMC(smc.Local(), particles=3, resampling="residual")),
        (p, smc.MultiDraft(q, chains=2)),
        (p, smc.SMC(smc.Draft(smc.PromptLookup(1)), particles=2)),
    ]:
        out = smc.sample(target, [5, 2], method=method, max_tokens=3, seed=1)
        assert out.stats.cycles and not out.stats.recorded


def test_mixed_requests_share_a_scheduler_and_may_be_dropped():
    p, q = pair()
    call = smc.sample.__globals__["Call"].of(
        p**2, PROMPTS * 2, method=smc.SMC(smc.Draft(q, block=2), particles=3), max_tokens=20, stop=(), seed=1,
        memory=1 << 28, page_size=2,
    )  # fmt: skip
    scheduler, done = call.scheduler, []
    for outcomes in scheduler.run():
        scheduler.audit()
        assert all(isinstance(group, FixedGroup) for group in scheduler.groups)
        for group in scheduler.groups:
            assert_lent(group)
        done += [outcome.request.index for outcome in outcomes]
        for cycle, (_, tokens) in zip(scheduler.latest(), scheduler.settled(), strict=True):
            assert len(tokens) <= cycle.tokens + 1
        scheduler.cancel(1), scheduler.cancel(6)
    assert sorted(done) == [0, 2, 3, 4, 5, 7]
    scheduler.audit()
    assert scheduler.stores.pool.used == 0 and scheduler._pages == 0


def test_recordings_outlive_the_requests_they_were_made_for():
    p, q = pair()
    method = smc.SMC(smc.Draft(q, block=2), particles=2)
    scheduler = scheduler_of(p, method, PROMPTS[:1], max_tokens=6)
    [request] = scheduler._waiting
    first = finish(scheduler)
    [group] = scheduler._rested
    scheduler.add(request)
    assert finish(scheduler)[0].tokens == first[0].tokens and scheduler._rested == [group]


def assert_lent(group):
    """Every page lent to the cycle is held, as often as counted, or on its free list."""
    pages, lent = group.state.pages, group.holders()[0]
    counts = torch.bincount(pages.rows.flatten().long(), minlength=len(pages.counts))
    assert torch.equal(counts[1:], pages.counts[1:].long())
    free = pages.free[: int(pages.left)].tolist()
    assert sorted(free + counts[1:].nonzero()[:, 0].add(1).tolist()) == sorted(lent.tolist())


def test_evidence_is_unbiased():
    (_, p), (_, q) = lm("llama", vocab=5), lm("qwen2", vocab=5, seed=1)
    p.graphs = True
    try:
        method = smc.SMC(smc.Draft(q, block=2, strictness=0.5), particles=3)
        outcomes = outcomes_of(p, method, [[2, 3]] * 300, max_tokens=5)
    finally:
        p.graphs = False
    assert_mean(torch.tensor([o.log_z for o in outcomes]).exp().numpy(), 1.0)


def test_logits_that_are_no_numbers_are_an_error():
    p, q = pair()
    weight = p._module.get_output_embeddings() if hasattr(p._module, "get_output_embeddings") else p._module.head
    plain = weight.forward
    weight.forward = lambda x: plain(x) * torch.nan
    with pytest.raises(InvalidWeight, match="p or q produced NaN"):
        answers("strict", (p, q))


@pytest.mark.parametrize(("families", "page_size"), [(("llama", "qwen2"), 1), (("gemma2", "mistral"), 3)])
def test_calls_to_flashinfer_equal_plain_attention(families, page_size, monkeypatch):
    plain = answers("strict", pair(families=families), page_size)
    monkeypatch.setattr(load, "attention_of", lambda _, device, *__: FlashInfer(Library(), device))
    assert_same(answers("strict", pair(families=families), page_size), plain)
