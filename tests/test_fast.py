import pytest
import torch
import transformers as tr
from hypothesis import given
from hypothesis import strategies as st
from models import tiny

from smcdecode.engine.attention import Batch
from smcdecode.engine.cuts import Rows, row_parts
from smcdecode.engine.fast import FusedLayer, FusedModel
from smcdecode.engine.load import load
from smcdecode.engine.packed import Packed, PackedLinear


def kinds(lm):
    return {type(module) for module in lm._module.modules()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "yarn"])
def test_plain_models_are_fused(family, dtype):
    lm = load(tiny(family, dtype=dtype))
    assert type(lm._module) is FusedModel
    assert all(type(layer) is FusedLayer for layer in lm._module.layers)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo2", "phi3", "mixtral"])
def test_other_models_keep_their_layers_and_get_packed_linears(family):
    found = kinds(load(tiny(family)))
    assert PackedLinear in found
    assert FusedLayer not in found


def test_layers_that_look_plain_but_are_not_stay_as_they_are():
    config = tr.GraniteConfig(
        vocab_size=16, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, residual_multiplier=0.3, embedding_multiplier=2.0, logits_scaling=3.0,
        bos_token_id=None, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    found = kinds(load(tr.AutoModelForCausalLM.from_config(config).eval()))
    assert not {FusedLayer, FusedModel} & found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear_and_what_is_folded_in(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, other = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((5, 48), (32, 48), (32,), (5, 32))
    )
    packed = Packed(weight, bias, Rows())
    y = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    close = {"atol": 0.1, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    for found, expected in (
        (packed(x), y),
        (packed(x, "swish"), torch.nn.functional.silu(y)),
        (packed(x, "add", other), y + other),
        (packed(x, "mul", other), y * other),
        (packed(x[:1], "mul", other[:1]), y[:1] * other[:1]),
    ):
        torch.testing.assert_close(found.float(), expected.float(), **close)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.sampled_from([False, True]))
def test_row_parts_cover_each_row_and_keep_the_bounds(counts, mixed):
    groups = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))] if mixed else groups
    parts = row_parts(groups)
    if parts is None:
        assert len(groups) <= 64 or len(counts) == 1
        return
    assert set(torch.cat(parts).tolist()) == set(range(len(groups)))
    size = dict(enumerate(counts))
    for part in parts:
        of = {size[int(g)] for g in groups[part]}
        small, large = max(of) <= 32, min(of) > 64
        assert (len(part) <= 32) if small else large or (min(of) > 32 and 40 <= len(part) <= 64)
        assert not large or (len(set(groups[part].tolist())) == 1 and len(part) == max(of))


def narrow(config_class, dtype):
    config = config_class(
        vocab_size=300, hidden_size=320, intermediate_size=896, num_hidden_layers=2, num_attention_heads=5,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return tr.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def run_groups(lm, groups, q_len, steps):
    """Logits of each step for groups [(prompt length, rows, seed)], each group's tokens drawn from its own seed."""
    size = 16
    generators = [torch.Generator().manual_seed(seed) for _, _, seed in groups]
    draw = lambda g, n: torch.randint(2, 300, (n,), generator=generators[g])  # noqa: E731
    need = [-(-n // size) for n, _, _ in groups]
    store = lm.store(1 + sum(need) + 4 * sum(rows for _, rows, _ in groups), size)
    pages = list(torch.arange(1, store.pages).split([*need, store.pages - 1 - sum(need)]))
    own = pages.pop().view(-1, 4)
    lengths = torch.tensor([n for n, _, _ in groups])
    nothing = tuple(pages[0][:0] for _ in groups)
    table = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
    prompt = Batch(lengths, table, lengths, torch.arange(len(groups)), nothing, (0,) * len(groups))
    tokens = torch.cat([draw(g, n) for g, (n, _, _) in enumerate(groups)])
    positions = torch.cat([torch.arange(n) for n, _, _ in groups])
    out = [[lm(tokens, positions, lm.plan(prompt, store), lengths.cumsum(0) - 1)[:1]]]
    group = torch.arange(len(groups)).repeat_interleave(torch.tensor([rows for _, rows, _ in groups]))
    for step in range(steps):
        q = torch.full((len(group),), q_len)
        batch = Batch(q, own, q * (step + 1), group, tuple(pages), tuple(n for n, _, _ in groups))
        tokens = torch.cat([draw(g, rows * q_len) for g, (_, rows, _) in enumerate(groups)])
        at = lengths[group].repeat_interleave(q_len) + torch.arange(step * q_len, (step + 1) * q_len).repeat(len(group))
        logits = lm(tokens, at, lm.plan(batch, store), torch.arange(len(tokens)))
        out.append([logits[: groups[0][1] * q_len]])
    return [logits for (logits,) in out]


@pytest.mark.parametrize(  # every shape with two of the four pairs of layers and type, neighbours with the others
    ("config_class", "dtype", "q_len", "rows"),
    [
        (config_class, (torch.float32, torch.bfloat16)[(i + j + k) % 2], q_len, rows)
        for i, config_class in enumerate((tr.LlamaConfig, tr.Olmo2Config))  # fused, and with its own layers
        for j, q_len in enumerate((1, 2, 5))
        for k, rows in enumerate((1, 7, 8, 16))
    ],
)
def test_logits_have_the_same_bits_whatever_else_is_in_the_pass(config_class, dtype, q_len, rows):
    if dtype == torch.bfloat16 and not torch.cpu._is_amx_tile_supported():
        pytest.skip("measured on AMX only; other CPUs may round otherwise")
    lm = load(narrow(config_class, dtype))
    first = (41, rows, 1)
    alone = run_groups(lm, [first], q_len, 3)
    for others in ([(20, 3, 2)], [(33, 8, 3), (70, 8, 4)], [(5, 1, 5), (90, 16, 6), (64, 7, 7)]):
        for a, b in zip(alone, run_groups(lm, [first, *others], q_len, 3), strict=True):
            assert torch.equal(a, b)


def test_batch_invariance_can_be_given_up_for_the_speed_of_large_passes():
    model = tiny("llama", dtype=torch.bfloat16)
    kept, free = load(model), load(model, batch_invariant=False)
    rows, own = 8, 12
    batch = Batch(
        torch.full((rows,), own), 1 + torch.arange(rows * own).view(rows, own), torch.full((rows,), own),
        torch.arange(rows), tuple(torch.empty(0, dtype=torch.int64) for _ in range(rows)), (0,) * rows,
    )  # fmt: skip
    tokens, places = torch.arange(rows * own) % 7, torch.arange(own).repeat(rows)
    found = []
    for lm in (kept, free):
        view = lm.plan(batch, lm.store(1 + rows * own, 1))
        found.append(lm(tokens, places, view, torch.arange(rows * own)))
    assert kept._cuts.body.parts is not None
    assert free._cuts is None
    torch.testing.assert_close(*found, atol=0.05, rtol=0.05)
