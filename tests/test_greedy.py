"""Greedy decoding is transformers' own greedy generate, token for token, by every decoder of plain targets."""

import pytest
import torch
from models import SUPPORTED, tiny
from transformers import AutoModelForCausalLM

import smcdecode as smc
from smcdecode.engine.demo import demo_folder

PROMPTS = [[2, 3, 4, 5, 6, 7, 8], [9, 3], [21, 4, 11, 13], [15]]
LENGTH = 12


def by_transformers(model, prompts, length):
    """One batch, padded on the left."""
    most = max(map(len, prompts))
    ids = torch.tensor([[0] * (most - len(x)) + x for x in prompts])
    mask = torch.tensor([[0] * (most - len(x)) + [1] * len(x) for x in prompts])
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=length, pad_token_id=0)
    eos = model.generation_config.eos_token_id
    return [tuple(x[: x.index(eos) + 1] if eos in x else x) for x in out[:, most:].tolist()]


@pytest.mark.parametrize("family", SUPPORTED)
def test_tiny_models_of_every_family(family):
    model = tiny(family, vocab=24)
    model.set_attn_implementation("eager")  # the definition: some versions' sdpa drops the softcap
    expected = by_transformers(model, PROMPTS, LENGTH)
    assert len({token for x in expected for token in x}) > 4
    p, q = smc.load(model).at(temperature=0), smc.load(tiny("llama", vocab=24, seed=5))
    for method in (smc.Autoregressive(), smc.Speculative(q, block=3), smc.MultiDraft(q, block=3, chains=3)):
        found = smc.sample(p, PROMPTS, method=method, max_tokens=LENGTH, seed=0, progress=False)
        assert [out.sample(on="tokens") for out in found] == expected, method


def test_a_real_model(demo_model):
    """In float32, where no two logits are equal; in bfloat16 ties are common, and rounding decides them."""
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()
    prompts = [
        list(demo_model.tokenizer(text)["input_ids"]) for text in ("The three primary colours are", "def fib(n):\n")
    ]
    expected = by_transformers(model, prompts, 20)
    p = smc.load(model).at(temperature=0)
    for method, length in ((smc.Speculative(demo_model, block=6), 20), (smc.Autoregressive(), 8)):
        found = smc.sample(p, prompts, method=method, max_tokens=length, seed=0, progress=False)
        assert [out.tokens[0] for out in found] == [x[:length] for x in expected]
