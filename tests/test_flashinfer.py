"""The calls made to FlashInfer: executed by what it documents they equal dense attention, and its signatures agree."""

import inspect

import pytest
import torch
from models import tiny
from stand_in import Library
from test_attention import STEPS, WORLDS, World

import smcdecode as smc
from smcdecode.engine import flashinfer
from smcdecode.engine.attention import Batch, Frame
from smcdecode.engine.cache import KVStore, LayerShape, Layout
from smcdecode.engine.flashinfer import FlashInfer
from smcdecode.engine.load import attention_of
from smcdecode.engine.page_lists import new_slots, own_lists, prompt_lists, whole_lists
from smcdecode.engine.support import examine
from smcdecode.errors import InvalidOption

CPU = torch.device("cpu")


@pytest.fixture(params=[0, 10**6], ids=["cascade", "whole"])
def ways(request, monkeypatch):
    monkeypatch.setattr(flashinfer, "CASCADE_FROM", request.param)
    return request.param


def attention():
    return FlashInfer(Library(), CPU)


def assert_dense(world, steps, **rule):
    for step in steps:
        out, expected = world.step(step[: len(world.group)], **rule)
        for i in out:
            torch.testing.assert_close(out[i].double(), expected[i], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", [1, 4, 5])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (None, 1.5), (3, 1.5), (64, None)])
@pytest.mark.parametrize("world", WORLDS)
def test_planned_calls_equal_dense_attention(world, window, softcap, page_size, ways):
    prompts, members = WORLDS[world]
    w = World(prompts, members, page_size=page_size, attention=attention())
    assert_dense(w, STEPS[:3] if page_size > 1 else STEPS[:2], window=window, softcap=softcap)


@pytest.mark.parametrize("shape", [LayerShape(2, 64, 64), LayerShape(1, 128, 128), LayerShape(4, 256, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_sizes_and_types(shape, dtype, ways):
    w = World([5, 8], [2, 1], shape=shape, dtype=dtype, attention=attention())
    for step in ([2, 1, 1], [5, 5, 5]):
        out, expected = w.step(step)
        for i in out:
            torch.testing.assert_close(out[i].double(), expected[i], atol=0.03, rtol=0.03)


def test_a_prompt_is_listed_once_and_each_row_lists_its_own():
    batch = Batch(
        torch.tensor([2, 1, 1]), torch.tensor([[7, 8], [9, 0], [4, 0]]), torch.tensor([5, 2, 4]),
        torch.tensor([0, 0, 1]), (torch.tensor([3, 1]), torch.tensor([2])), (8, 3),
    )  # fmt: skip
    own, (prompts, tokens) = own_lists(batch, 4), prompt_lists(batch, 4)
    assert [x.tolist() for x in (own.qo_indptr, own.indptr)] == [[0, 2, 3, 4], [0, 2, 3, 4]]
    assert own.indices[:4].tolist() == [7, 8, 9, 4] and own.last_page_len.tolist() == [1, 2, 4]
    assert [x.tolist() for x in (prompts.qo_indptr, prompts.indptr)] == [[0, 3, 4], [0, 2, 3]]
    assert prompts.indices[:3].tolist() == [3, 1, 2] and prompts.last_page_len.tolist() == [4, 3]
    assert tokens.tolist() == [0, 1, 2, 3]
    assert new_slots(batch, 4).tolist() == [7 * 4 + 3, 8 * 4, 9 * 4 + 1, 4 * 4 + 3]
    assert whole_lists(batch, 4) is None  # the second prompt ends inside a page
    assert whole_lists(batch, 1) is not None


def test_layers_share_a_plan_and_rules_do_not():
    way = attention()
    w = World([9], [3], page_size=1, attention=way)
    w.step([1, 1, 1])
    names = [name for name, _, _ in way.library.calls]
    assert names.count("BatchPrefillWithPagedKVCacheWrapper.plan") == 1
    assert names.count("BatchPrefillWithPagedKVCacheWrapper.run") == 2
    w.step([1, 1, 1], window=4)
    w.step([1, 1, 1])
    names = [name for name, _, _ in way.library.calls]
    assert names.count("BatchPrefillWithPagedKVCacheWrapper.plan") == 3
    assert names.count("BatchPrefillWithPagedKVCacheWrapper.__init__") == 2


def test_calls_agree_with_the_installed_signatures(ways):
    installed = pytest.importorskip("flashinfer", reason="FlashInfer is not installed: pip install 'smcdecode[gpu]'")
    way = attention()
    for world in ("groups", "long and short"):
        prompts, members = WORLDS[world]
        w = World(prompts, members, page_size=5, attention=way)
        for window in (None, 6):
            w.step(STEPS[1][: len(w.group)], window)
    store = KVStore(Layout((LayerShape(2, 8, 8),), torch.float32, CPU), 5, 4)
    frame = Frame(torch.tensor([[1, 2], [3, 0]]).int(), torch.tensor([6, 3]), torch.ones(2, 2, dtype=torch.bool), 4)
    way.fixed(frame, store).attend(0, *(torch.zeros(4, n, 8) for n in (4, 2, 2)), scaling=1.0, window=5)
    for name, args, kwargs in way.library.calls:
        function = installed
        for part in name.split("."):
            function = getattr(function, part)
        inspect.signature(function).bind(*([None] if "." in name else []), *args, **kwargs)
    assert {"merge_state"} < {name for name, _, _ in way.library.calls}


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2"])
def test_a_whole_model_attends_alike(family):
    """The trial run of a model compares paged logits with the model's own, windows and caps included."""
    examine(tiny(family, vocab=11, seed=0), family, attention())


def test_what_cannot_be_had_is_refused_with_the_remedy(monkeypatch):
    with pytest.raises(InvalidOption, match=r'float32 on cuda.*give attention="torch"'):
        attention_of(None, torch.device("cuda"), torch.float32, "m")
    with pytest.raises(InvalidOption, match=r"on cpu, and FlashInfer attends on a GPU"):
        smc.load(tiny("llama"), attention="flashinfer")
    with pytest.raises(InvalidOption, match=r'must be "torch" or "flashinfer"'):
        attention_of("sdpa", CPU, torch.float32, "m")
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    with pytest.raises(InvalidOption, match=r"does not import .*pip install 'smcdecode\[gpu\]'"):
        attention_of(None, torch.device("cuda"), torch.bfloat16, "m")
    assert "attention by torch" in repr(smc.load(tiny("llama"), attention="torch"))
