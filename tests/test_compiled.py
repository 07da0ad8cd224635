"""Compiled passes write what uncompiled ones write, as one graph a shape, and never anything else in silence."""

import pytest
import torch
from models import tiny
from stand_in import Library
from test_fixed import PROMPTS, assert_same

import smcdecode as smc
from smcdecode.engine import compiled, load
from smcdecode.engine.fixed_view import FixedView
from smcdecode.engine.flashinfer import FlashInfer
from smcdecode.errors import InvalidOption, UnsupportedModel


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """Graphs run as dynamo found them."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")


def model(family, seed=0, **options):
    module = tiny(family, vocab=11, seed=seed, spread=0.15)
    module.config.eos_token_id = module.generation_config.eos_token_id = None  # texts are as long as they may be
    return smc.load(module, name=f"the {family}", graphs=True, **options)


def alone(p, prompts=PROMPTS[:1], max_tokens=9):
    return smc.sample(p, prompts, method=smc.Autoregressive(), max_tokens=max_tokens, seed=2)


def drafted(p, q, max_tokens=15):
    method = smc.SMC(smc.Draft(q, block=2, strictness=0.3), particles=3)
    return smc.sample(p**2, PROMPTS[:1], method=method, max_tokens=max_tokens, seed=2)


def test_a_compiled_pair_writes_what_it_writes_uncompiled_and_compiles_each_shape_once():
    p, q = model("llama", compile=True), model("qwen2", 1, compile=True)
    there, here = drafted(p, q), drafted(model("llama"), model("qwen2", 1))
    assert_same(there, here)
    cycles = there[0].stats.recorded + 1  # when the last is read the next has begun
    assert cycles > 4
    assert (p.compiled.graphs, p.compiled.runs) == (1, cycles)  # 3 tokens a row
    assert (q.compiled.graphs, q.compiled.runs) == (2, 2 * cycles)  # 2 tokens a row, then 1
    again = drafted(p, q, max_tokens=20)  # other buffers, longer page tables
    assert (p.compiled.graphs, q.compiled.graphs) == (1, 2) and p.compiled.runs > cycles
    assert_same(again, drafted(model("llama"), model("qwen2", 1), max_tokens=20))


@pytest.mark.parametrize(("family", "way"), [("gemma3", "torch"), ("gemma2", "flashinfer")])
def test_layers_with_windows_and_caps_compile(family, way, monkeypatch):
    plain = alone(model(family))
    if way == "flashinfer":
        monkeypatch.setattr(load, "attention_of", lambda _, device, *__: FlashInfer(Library(), device))
    assert_same(alone(model(family, compile=True)), plain)


def test_more_shapes_than_dynamo_would_compile():
    p = model("llama", compile=True)
    with torch._dynamo.config.patch(recompile_limit=1):
        for n in (1, 2):
            alone(p, PROMPTS[:n], max_tokens=2)
    assert p.compiled.graphs == 2


def test_layers_of_a_compiled_model_are_compiled_too():
    p = model("llama", compile=True)
    assert smc.LayerSkip(p, layers=1).compiled is not None and smc.LayerSkip(model("llama"), layers=1).compiled is None
    assert "compiled in recorded cycles" in repr(p) and "compiled" not in repr(model("llama"))


def test_a_model_that_breaks_the_graph_is_refused():
    p = model("llama", compile=True)
    norm = next(m for m in p._module.modules() if "Norm" in type(m).__name__)
    plain = norm.forward
    norm.forward = lambda x: plain(x) if x.sum() > 0 else -plain(x)  # the host decides, by a number
    with pytest.raises(UnsupportedModel, match="the llama cannot be compiled as one graph"):
        alone(p)


def test_a_pass_that_was_not_compiled_is_an_error(monkeypatch):
    p = model("llama", compile=True)
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)  # as its switches in the environment do
    monkeypatch.setattr(p, "compiled", compiled.Compiled(p._module, p.name))
    with pytest.raises(UnsupportedModel, match="the llama: a pass of 1 tokens compiled 0 graphs and ran 0, where 1 an"):
        alone(p)


def test_a_shape_that_compiles_again_is_an_error():
    p = model("llama", compile=True)
    alone(p, max_tokens=2)
    p._module.model.layers[0].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(UnsupportedModel, match="compiled 1 graphs and ran 1, where 0 and 1 were due"):
        alone(p, max_tokens=2)


def test_a_pass_that_failed_may_be_made_again(monkeypatch):
    p, failures = model("llama", compile=True), [MemoryError("no room")]
    attend = FixedView.attend

    def once(*args, **kwargs):
        if failures:
            raise failures.pop()
        return attend(*args, **kwargs)

    monkeypatch.setattr(FixedView, "attend", once)
    with pytest.raises(MemoryError, match="no room"):
        alone(p, max_tokens=2)
    assert alone(p, max_tokens=2) and p.compiled.graphs == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"graphs": False}, "graphs=False"),
        ({"graphs": True, "parallel": True}, "parallel=True"),
        ({}, "the llama on cpu records none by default"),
    ],
)
def test_it_is_refused_where_no_cycle_is_recorded(options, said):
    with pytest.raises(InvalidOption, match=said):
        smc.load(tiny("llama", vocab=11), name="the llama", compile=True, **options)
