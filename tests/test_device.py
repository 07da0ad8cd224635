"""The engine on another device: every row of a vocabulary stays there, and no CPU tensor meets one that lies there."""

import pytest
import torch
from models import tiny
from pretend import DEVICE, Pretend
from stand_in import Library

import smcdecode as smc
from smcdecode.engine import flashinfer, load, memory
from smcdecode.engine.flashinfer import FlashInfer
from smcdecode.errors import InvalidOption, OutOfPages, UnsupportedModel

PROMPTS = [[3, 4, 2, 6], [5, 2]]


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setattr(load, "DEVICES", ("cpu", DEVICE.type))


def pair(device="cpu", families=("llama", "qwen2")):
    modules = [tiny(family, vocab=11, seed=seed, spread=0.15).to(device) for seed, family in enumerate(families)]
    return [smc.load(module, name=name, attention="torch") for module, name in zip(modules, "pq", strict=True)]


even = smc.potential(lambda tokens: 0.0 if tokens.count(3) < 2 else float("-inf"), on="tokens", name="even")
calm = smc.potential(lambda tokens: -0.3 * len(tokens), on="tokens", name="calm")

CASES = {
    "autoregressive": lambda p, q: (p.at(temperature=0.8), smc.Autoregressive()),
    "truncated": lambda p, q: (p.at(top_k=6, top_p=0.9), smc.Autoregressive()),
    "reweighted": lambda p, q: (p**2, smc.SMC(smc.Draft(q, strictness=0.0), particles=4)),
    "strict": lambda p, q: (p**2, smc.SMC(smc.Draft(q, block=3, strictness=0.4), particles=4)),
    "truncated draft": lambda p, q: (p, smc.SMC(smc.Draft(q, strictness=0.4, top_k=4), particles=4)),
    "tuned": lambda p, q: (p, smc.SMC(smc.Draft(q, block="auto", strictness="auto"), particles="auto")),
    # "ssp" would not do: among copies, whose weights tie, it goes by the last bit, and bits differ between devices
    "bridge": lambda p, q: (p**2, smc.SMC(smc.Local(), particles=4, bridge=3, resampling="stratified")),
    "speculative": lambda p, q: (p, smc.Speculative(q)),
    "chains": lambda p, q: (p, smc.MultiDraft(q, chains=3)),
    "lookup": lambda p, q: (p, smc.SMC(smc.Draft(smc.PromptLookup(1), strictness=0.4), particles=2)),
    "layers": lambda p, q: (p, smc.SMC(smc.Draft(smc.LayerSkip(p, layers=1), strictness=0.4), particles=2)),
    "potential": lambda p, q: (p * calm, smc.SMC(smc.Draft(q, block=2), particles=4)),
    "checked": lambda p, q: (p * even, smc.SMC(smc.Local(check="rejection"), particles=4)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_engine_writes_on_the_device_what_it_writes_on_a_cpu(case, allowed):
    assert_alike(CASES[case])


def assert_alike(ask, **how):
    """The same answers on both devices."""

    def run(models):
        target, method = ask(*models)
        return smc.sample(target, PROMPTS, method=method, max_tokens=5, seed=2, memory=1 << 28, page_size=2)

    here = run(pair(**how))
    with Pretend() as mode:
        there = run(pair(DEVICE, **how))
    assert [x.tokens for x in there] == [x.tokens for x in here]
    torch.testing.assert_close(*(torch.tensor([x.log_z for x in answers]) for answers in (there, here)))
    assert mode.syncs
    assert there[0].stats.attention == here[0].stats.attention


@pytest.mark.parametrize("cascade_from", [0, 10**6])
def test_calls_to_flashinfer_keep_to_the_device(cascade_from, allowed, monkeypatch):
    monkeypatch.setattr(flashinfer, "CASCADE_FROM", cascade_from)
    monkeypatch.setattr(load, "attention_of", lambda _, device, *__: FlashInfer(Library(), device))
    assert_alike(CASES["strict"], families=("gemma2", "mistral"))


def test_tensors_of_two_devices_do_not_meet_unseen():
    with Pretend() as mode:
        there = torch.ones(3, 2, device=DEVICE)
        with pytest.raises(RuntimeError, match=r"meets a CPU tensor of shape \(3, 2\)"):
            there + torch.ones(3, 2)
        with pytest.raises(RuntimeError, match="meets a CPU tensor"):
            there.gather(0, torch.zeros(1, 2, dtype=torch.int64))
        assert (there * 2)[torch.tensor([0])].cpu().tolist() == [[2.0, 2.0]] and not mode.syncs
        assert there.sum().item() == 6.0 and mode.syncs == 1


def test_where_a_model_may_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidOption, match=r'torch finds no CUDA GPU: give device="cpu"'):
        load._check_device(torch.device("cuda"), "m")
    with pytest.raises(UnsupportedModel, match=r"m lies on xpu, and the engine runs on cpu and cuda only"):
        load._check_device(torch.device("xpu"), "m")


def test_the_budget_is_the_devices_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 10_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    gpu = torch.device("cuda")
    assert memory.bytes_of(0.5, gpu) == 500 and memory.bytes_of(4096, gpu) == 4096
    with pytest.raises(OutOfPages, match="2,010 bytes in all, but memory= allows 500"):
        memory.plan_memory(memory.bytes_of(0.5, gpu), [20], 100, 10, page_size=1, max_tokens=4)
