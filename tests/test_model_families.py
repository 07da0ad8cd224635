import pytest
import torch
from models import REFUSED, SUPPORTED, tiny

from smcdecode.engine.attention import Batch
from smcdecode.engine.load import load
from smcdecode.errors import UnsupportedModel

PAGE = 4


def batch(q_len, own_pages, own_len, group, prefix_pages, prefix_len):
    as_tensor = torch.tensor
    width = max(map(len, own_pages))
    table = as_tensor([[*pages, *[0] * (width - len(pages))] for pages in own_pages])
    prefixes = tuple(as_tensor(p, dtype=torch.int64) for p in prefix_pages)
    return Batch(as_tensor(q_len), table, as_tensor(own_len), as_tensor(group), prefixes, tuple(prefix_len))


def prefill(lm, store, prompt, pages):
    n = len(prompt)
    b = batch([n], [pages], [n], [0], [[]], [0])
    return lm(torch.tensor(prompt), torch.arange(n), lm.plan(b, store), torch.tensor([n - 1]))


def reference(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize("family", SUPPORTED)
def test_paged_passes_equal_the_models_own_logits(family):
    model = tiny(family)
    model.set_attn_implementation("eager")  # the definition: some versions' sdpa drops the softcap
    lm = load(model)
    store = lm.store(40, PAGE)
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(2, 16, (n,), generator=generator).tolist()  # noqa: E731
    prompts = [draw(11), draw(6)]
    prompt_pages = [[1, 2, 3], [9, 7]]
    for prompt, pages in zip(prompts, prompt_pages, strict=True):
        torch.testing.assert_close(
            prefill(lm, store, prompt, pages)[0], reference(model, prompt)[-1], atol=2e-4, rtol=1e-3
        )
    # two particles of prompt 0, one of prompt 1; ragged blocks, then more tokens on top
    rows = [(0, draw(8), [11, 12, 19]), (0, draw(7), [13, 14]), (1, draw(6), [15, 16])]
    for done, q_len in ([0, 0, 0], [1, 3, 2]), ([1, 3, 2], [2, 1, 4]), ([3, 4, 6], [5, 3, 0]):
        alive = [i for i in range(3) if q_len[i]]
        tokens, positions = [], []
        for i in alive:
            g, suffix, _ = rows[i]
            tokens += suffix[done[i] : done[i] + q_len[i]]
            positions += range(len(prompts[g]) + done[i], len(prompts[g]) + done[i] + q_len[i])
        b = batch(
            [q_len[i] for i in alive],
            [rows[i][2] for i in alive],
            [done[i] + q_len[i] for i in alive],
            [rows[i][0] for i in alive],
            prompt_pages,
            [len(p) for p in prompts],
        )
        logits = lm(torch.tensor(tokens), torch.tensor(positions), lm.plan(b, store), torch.arange(len(tokens)))
        start = 0
        for i in alive:
            g, suffix, _ = rows[i]
            n = done[i] + q_len[i]
            expected = reference(model, prompts[g] + suffix[:n])[-q_len[i] :]
            torch.testing.assert_close(logits[start : start + q_len[i]], expected, atol=2e-4, rtol=1e-3)
            start += q_len[i]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_users_model_is_left_as_it_was(family):
    model = tiny(family)
    before = model.config._attn_implementation
    expected = reference(model, [2, 3, 4])
    lm = load(model)
    assert model.config._attn_implementation == before
    assert torch.equal(reference(model, [2, 3, 4]), expected)
    store = lm.store(4, PAGE)
    embedding = model.get_input_embeddings().weight
    assert any(p is embedding for p in lm._module.parameters())
    assert store.pages == 4


@pytest.mark.parametrize("family", REFUSED)
def test_other_architectures_are_refused_by_name(family):
    with pytest.raises(UnsupportedModel, match=r"\w"):
        load(tiny(family), name="that one")


def test_long_contexts_stop_at_the_short_factors_of_longrope():
    assert load(tiny("longrope")).context == 64
    assert load(tiny("llama")).context == 256


def test_wide_logits_are_cut_and_rows_chosen():
    lm = load(tiny("llama"))
    store = lm.store(4, PAGE)
    n = 3
    view = lm.plan(batch([n], [[1]], [n], [0], [[]], [0]), store)
    assert lm(torch.tensor([2, 3, 4]), torch.arange(n), view, torch.tensor([], dtype=torch.int64)).shape == (0, 16)
    assert lm(torch.tensor([2, 3, 4]), torch.arange(n), view, torch.tensor([2, 0])).dtype == torch.float32
