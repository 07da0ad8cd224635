import pytest
import torch

from smcdecode.engine import pools
from smcdecode.engine.attention import Batch, Rule
from smcdecode.engine.cache import KVStore, LayerShape, Layout, bytes_per_page
from smcdecode.engine.cascade import TorchAttention
from smcdecode.engine.dense import causal

HEADS, SCALING = 4, 0.3
LAYOUT = Layout((LayerShape(2, 8, 8), LayerShape(2, 8, 8)), torch.float32, torch.device("cpu"))


def layout(dtype=torch.float32, shape=None):
    return Layout((shape or LayerShape(2, 8, 8),) * 2, dtype, torch.device("cpu"))


def eager(query, key, value, window, softcap):
    """One sequence, the last len(query) of len(key) tokens asking, in float64."""
    q, k, v = (x.double() for x in (query, key, value))
    fold = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(fold, 1), v.repeat_interleave(fold, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALING
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at, seen = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    hidden = seen > at
    if window is not None:
        hidden |= seen <= at - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class World:
    """Sequences in groups, each with its own keys and values, run through pages step by step."""

    def __init__(
        self, prompts, members, page_size=4, dtype=torch.float32, shape=None, scatter=True, seed=0, attention=None
    ):
        self.generator = torch.Generator().manual_seed(seed)
        self.shape = shape or LayerShape(2, 8, 8)
        self.dtype, self.page_size, self.attention = dtype, page_size, attention or TorchAttention()
        per_prompt = [-(-n // page_size) for n in prompts]
        self.group = [g for g, n in enumerate(members) for _ in range(n)]
        room = sum(per_prompt) + len(self.group) * 40
        self.store = KVStore(layout(dtype, shape), room + 1, page_size)
        pages = (torch.randperm(room, generator=self.generator) if scatter else torch.arange(room)) + 1
        self.prefix_pages, at = [], 0
        for n in per_prompt:
            self.prefix_pages.append(pages[at : at + n])
            at += n
        self.own_pages = pages[at:].view(len(self.group), 40)
        self.prefix_len = list(prompts)
        self.texts = []  # per sequence: keys, values so far
        for g, n in enumerate(prompts):
            key, value = self.tokens(n)
            if n:
                slots = (self.prefix_pages[g][:, None] * page_size + torch.arange(page_size)).flatten()[:n]
                for layer in (0, 1):
                    self.store.write(layer, slots, key, value)
            self.texts += [[key, value] for member in self.group if member == g]
        self.own_len = [0] * len(self.group)

    def tokens(self, n):
        make = lambda heads, dim: torch.randn(n, heads, dim, generator=self.generator).to(self.dtype)  # noqa: E731
        return make(self.shape.kv_heads, self.shape.key_dim), make(self.shape.kv_heads, self.shape.value_dim)

    def step(self, q_len, window=None, softcap=None, only=None):
        """Feed q_len new tokens a row (0: the row sits this pass out); returns outputs and expected ones per row."""
        rows = [i for i, n in enumerate(q_len) if n and (only is None or i in only)]
        new = {i: self.tokens(q_len[i]) for i in range(len(q_len))}
        query = {
            i: torch.randn(q_len[i], HEADS, self.shape.key_dim, generator=self.generator).to(self.dtype) for i in new
        }
        for i in rows:
            self.texts[i] = [torch.cat(pair) for pair in zip(self.texts[i], new[i], strict=True)]
            self.own_len[i] += q_len[i]
        used = sorted({self.group[i] for i in rows})
        batch = Batch(
            torch.tensor([q_len[i] for i in rows]),
            self.own_pages[rows],
            torch.tensor([self.own_len[i] for i in rows]),
            torch.tensor([used.index(self.group[i]) for i in rows]),
            tuple(self.prefix_pages[g] for g in used),
            tuple(self.prefix_len[g] for g in used),
        )
        view = self.attention.plan(batch, self.store)
        packed = (torch.cat([query[i] for i in rows]), *(torch.cat([new[i][j] for i in rows]) for j in (0, 1)))
        out = [view.attend(layer, *packed, scaling=SCALING, window=window, softcap=softcap) for layer in (0, 1)]
        assert torch.equal(out[0], out[1])
        parts = out[0].split([q_len[i] for i in rows])
        expected = [eager(query[i], *self.texts[i], window, softcap) for i in rows]
        return dict(zip(rows, parts, strict=True)), dict(zip(rows, expected, strict=True))


WORLDS = {
    "one row": ([7], [1]),
    "particles of one prompt": ([13], [5]),
    "different prompts": ([3, 11, 6], [1, 1, 1]),
    "groups": ([9, 4], [3, 2]),
    "no prompt": ([0], [3]),
    "long prompt": ([150], [3]),
    "long and short": ([90, 0, 5], [2, 1, 2]),
}
STEPS = [[1, 1, 1, 1, 1], [3, 1, 2, 5, 1], [2, 0, 0, 1, 4], [1, 2, 1, 2, 1], [40, 33, 1, 2, 35]]


@pytest.mark.parametrize("apart", [False, True], ids=["together", "prompts apart"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (None, 1.5), (3, 1.5), (64, None)])
@pytest.mark.parametrize("world", WORLDS)
def test_paged_attention_equals_dense_attention(world, window, softcap, apart, monkeypatch):
    if apart:
        monkeypatch.setattr(pools, "COPY_BYTES", -1)
    prompts, members = WORLDS[world]
    w = World(prompts, members)
    for step in STEPS:
        out, expected = w.step(step[: len(w.group)], window, softcap)
        for i in out:
            torch.testing.assert_close(out[i].double(), expected[i], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [LayerShape(2, 8, 5), LayerShape(1, 8, 8), LayerShape(4, 16, 16)])
def test_head_shapes(shape):
    w = World([5], [2], shape=shape)
    for step in ([2, 1], [1, 3]):
        out, expected = w.step(step)
        for i in out:
            torch.testing.assert_close(out[i].double(), expected[i], atol=1e-5, rtol=1e-5)


def test_a_fresh_long_prompt_needs_no_prefix():
    w = World([0], [2])
    out, expected = w.step([37, 130])
    for i in out:
        torch.testing.assert_close(out[i].double(), expected[i], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5, 700])
def test_causal_blocks(window):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(600, 4, 8, generator=generator)
    key, value = (torch.randn(600, 2, 8, generator=generator) for _ in range(2))
    out, lse = causal(query, key, value, Rule(SCALING, window, None))
    torch.testing.assert_close(out.double(), eager(query, key, value, window, None), atol=1e-5, rtol=1e-5)
    assert lse.shape == (600, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "prompts apart"])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_pass(dtype, apart, monkeypatch):
    if apart:
        monkeypatch.setattr(pools, "COPY_BYTES", -1)
    prompts, members = [70, 20, 300], [3, 1, 4]
    steps = [[1] * 8, [2, 1, 3, 1, 5, 4, 5, 5], [1, 2, 1, 2, 1, 1, 1, 1]]
    together, alone = World(prompts, members, dtype=dtype), World(prompts, members, dtype=dtype)
    for step in steps:
        both = [w.step(step, only=only)[0] for w, only in ((together, None), (alone, {0, 1, 2}))]
        for i in (0, 1, 2):
            assert torch.equal(both[0][i], both[1][i])


def test_a_query_that_is_alone_in_its_call_has_the_bits_that_it_has_beside_others(monkeypatch):
    """As many heads of keys as of queries: nothing is folded, and the kernel rounds one query in a way of its own."""
    monkeypatch.setattr(pools, "COPY_BYTES", 1 << 30)
    shape = LayerShape(HEADS, 128, 128)
    together, alone = (World([300, 300], [1, 1], dtype=torch.bfloat16, shape=shape) for _ in range(2))
    for _ in range(50):
        both = [w.step([1, 3], only=only)[0] for w, only in ((together, None), (alone, {0}))]
        assert torch.equal(both[0][0], both[1][0])


def test_copied_pages_are_counted_and_equal():
    store = KVStore(LAYOUT, 6, 4)
    store.write(1, torch.tensor([4, 5]), torch.ones(2, 2, 8), torch.full((2, 2, 8), 2.0))
    store.copy_pages(torch.tensor([1]), torch.tensor([3]))
    assert torch.equal(store.keys[1][1], store.keys[1][3])
    assert torch.equal(store.values[1][1], store.values[1][3])
    assert float(store.values[1][3].sum()) == 2 * 2 * 8 * 2
    assert store.bytes_moved == bytes_per_page(LAYOUT, 4) == 2 * 4 * 2 * 16 * 4


def test_keys_and_values_side_by_side_are_written_without_a_copy():
    store = KVStore(LAYOUT, 2, 4)
    heads = torch.randn(3, 8, 8)
    store.write(0, torch.tensor([4, 5, 7]), heads[:, 4:6], heads[:, 6:])
    assert torch.equal(store.keys[0][1, :2], heads[:2, 4:6])
    assert torch.equal(store.values[0][1, 3], heads[2, 6:])
