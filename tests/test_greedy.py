"""Greedy decoding is transformers' own greedy generate, token for token, by every decoder of plain targets."""

import pytest
import torch
from models import SUPPORTED, tiny
from transformers import AutoModelForCausalLM

import smcdecode as smc
from smcdecode.engine.demo import demo_folder

PROMPTS = [[2, 3, 4, 5, 6, 7, 8], [9, 3], [21, 4, 11, 13], [15]]
LENGTH = 16


def methods(draft):
    return [
        smc.Autoregressive(),
        smc.Speculative(draft, block=3),
        smc.MultiDraft(draft, block=3, chains=3),
        smc.MultiDraft(draft, block=3, chains=2, coupling="greedy", temperature=1.0),
        smc.SMC(smc.Draft(draft, block=2, strictness=0.5), particles=2),
    ]


def by_transformers(model, prompt, length):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length, pad_token_id=0
    )
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("family", SUPPORTED)
def test_tiny_models_of_every_family(family):
    model = tiny(family, vocab=24)
    model.set_attn_implementation("eager")  # the definition: some versions' sdpa drops the softcap
    expected = [by_transformers(model, prompt, LENGTH) for prompt in PROMPTS]
    assert len({token for x in expected for token in x}) > 4
    p, q = smc.load(model).at(temperature=0), smc.load(tiny("llama", vocab=24, seed=5))
    for method in methods(q):
        found = smc.sample(p, PROMPTS, method=method, max_tokens=LENGTH, seed=0, progress=False)
        assert [out.sample(on="tokens") for out in found] == expected, method


def test_a_real_model():
    """In float32, where no two logits are equal; in bfloat16 ties are common, and rounding decides them."""
    try:
        draft = smc.load("demo")
    except smc.UnsupportedModel as error:
        pytest.skip(f"needs the demo model: {error}")
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()
    prompts = [list(draft.tokenizer(text)["input_ids"]) for text in ("The three primary colours are", "def fib(n):\n")]
    expected = [by_transformers(model, prompt, 64) for prompt in prompts]
    p = smc.load(model).at(temperature=0)
    for method in (smc.Autoregressive(), smc.Speculative(draft, block=8)):
        found = smc.sample(p, prompts, method=method, max_tokens=64, seed=0, progress=False)
        assert [out.tokens[0] for out in found] == expected
