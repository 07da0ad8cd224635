"""The plain definitions of the kernels against the functions that the CPU engine runs, and against exact laws."""

import dataclasses

import numpy as np
import pytest
import torch
from stats import assert_frequencies, assert_mean

from smcdecode.infer import resampling, weights
from smcdecode.infer.strictness import overlap
from smcdecode_kernels import groups, laws, ops, pages, reference
from smcdecode_kernels.laws import Key, Law
from smcdecode_kernels.pages import Pages

V = 700


def rows(n, seed=0, spread=3.0):
    return spread * torch.randn(n, V, generator=torch.Generator().manual_seed(seed))


def key(n, stream=0, seed=5, particle=None):
    zero = torch.zeros(n, dtype=torch.int64)
    return Key(zero + seed, torch.arange(n) if particle is None else particle, zero + 2, zero + 1, stream)


def packed(mask):
    bits = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 32)).view(len(mask), -1, 32).long()
    return (bits << torch.arange(32)).sum(-1).to(torch.int32)


def test_a_draw_is_the_cpu_engines_draw():
    logits, mask = rows(64), torch.rand(64, V, generator=torch.Generator().manual_seed(1)) < 0.5
    law = Law(logits, torch.full((64,), 1 / 0.7), words=packed(mask))
    k = key(64)
    tokens, log_r = ops.draw(law, ops.sums(law), torch.arange(64), k)
    warm = (logits / 0.7).masked_fill(~mask, -torch.inf)
    drawn, norm = reference.draw(warm, k.uniform())
    assert torch.equal(tokens, drawn)
    torch.testing.assert_close(log_r, warm.gather(-1, drawn[:, None])[:, 0].double() - norm, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("top_k", "top_p"), [(4, None), (None, 0.9), (300, 0.8), (10**6, 1.0), (1, None)])
def test_a_floor_truncates_as_the_cpu_engine_does(top_k, top_p):
    logits, inverse = rows(5).round(), torch.full((5,), 1 / 0.8)
    law = Law(logits, inverse, floor=ops.floor(logits, inverse, top_k, top_p))
    expected = reference.log_law(logits, 0.8, top_k, top_p)
    torch.testing.assert_close(laws.log_weights(law).log_softmax(-1), expected, rtol=1e-5, atol=1e-5)


def test_scores_are_log_p_to_the_alpha_and_log_z():
    logits, mask, alpha = rows(6), torch.rand(6, V, generator=torch.Generator().manual_seed(2)) < 0.5, 1 + torch.rand(6)
    law = Law(logits, torch.ones(6), alpha, None, packed(mask))
    tokens = mask.float().argmax(-1)
    log_pa, log_z = ops.score(law, ops.sums(law, base=True), tokens)
    exact = (alpha[:, None] * logits.log_softmax(-1)).double()
    torch.testing.assert_close(log_pa, exact.gather(-1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_z, exact.masked_fill(~mask, -torch.inf).logsumexp(-1), rtol=1e-5, atol=1e-5)
    plain = Law(logits, torch.ones(6))
    assert (ops.score(plain, ops.sums(plain, base=True), tokens)[1] == 0).all()


def test_draws_follow_their_law():
    n, law = 20_000, Law(rows(2, spread=1.5), torch.ones(2), torch.tensor([1.0, 2.0]))
    for row in (0, 1):
        tokens, _ = ops.draw(law, ops.sums(law), torch.full((n,), row), key(n, seed=row))
        assert_frequencies(torch.bincount(tokens, minlength=V), laws.log_weights(law)[row].double().softmax(-1))


def test_a_token_depends_on_its_own_key_and_row_alone():
    logits = rows(8)
    every = Law(logits, torch.ones(8))
    k = key(8)
    together = ops.draw(every, ops.sums(every), torch.arange(8), k)
    order = torch.tensor([5, 1, 7])
    some = Law(logits[order].clone(), torch.ones(3))
    fields = (k.seed, k.particle, k.cycle, k.place)
    alone = ops.draw(some, ops.sums(some), torch.arange(3), Key(*(x[order] for x in fields), k.stream))
    assert all(torch.equal(a[order], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("s", [0.1, 0.6, 1.0])
def test_judged_tokens_have_their_law_and_weight(s):
    """Drawn from q and judged, tokens have the law e, and weighted by r/e the law r."""
    n, cells = 20_000, 12
    q, r = rows(1, 1, 1.0)[:, :cells], rows(1, 2, 1.0)[:, :cells]
    law_q, law_r = Law(q.expand(n, -1), torch.ones(n)), Law(r, torch.ones(1))
    log_q, log_r = (x.double().log_softmax(-1) for x in (q, r))
    drafted = laws.draw(
        Law(q, torch.ones(1)), ops.sums(Law(q, torch.ones(1))), torch.zeros(n, dtype=torch.int64), key(n)
    )[0]
    accept = key(n, stream=1)
    tokens, refused, log_ratio = ops.judge(
        law_q, q.double().logsumexp(-1).expand(n), law_r, r.double().logsumexp(-1), torch.zeros(n, dtype=torch.int64),
        drafted, torch.full((n,), s, dtype=torch.float64), accept, dataclasses.replace(accept, stream=2),
    )  # fmt: skip
    both = overlap(log_q.float(), log_r.float(), torch.tensor([s], dtype=torch.float64))
    every = torch.arange(cells)
    ratios = torch.stack([both.log_ratio(t[None])[0] for t in every])
    emitted = (log_r[0] - ratios).exp()  # e, in float32
    assert_frequencies(torch.bincount(tokens, minlength=cells), emitted / emitted.sum())
    torch.testing.assert_close(log_ratio, ratios[tokens], rtol=1e-4, atol=1e-5)
    assert_mean(torch.nn.functional.one_hot(tokens, cells) * log_ratio.exp()[:, None], log_r[0].exp())
    assert_mean(refused.double(), both.refused[0])


@pytest.mark.parametrize("name", ["systematic", "stratified"])
def test_weights_and_ancestors_are_those_of_the_mathematics(name):
    generator = torch.Generator().manual_seed(0)
    log_w, increments = torch.randn(2, 50, 9, generator=generator, dtype=torch.float64)
    increments[0], increments[1, :4] = -torch.inf, -torch.inf
    log_z, k = torch.zeros(50, dtype=torch.float64), key(50, stream=4)
    carried, total = log_w.clone(), log_w + increments
    may = torch.arange(50) % 5 > 0
    out = ops.weigh(
        carried, increments, log_z, may, torch.full((50,), 0.7, dtype=torch.float64), k, name == "stratified"
    )
    u = reference.uniform(k.seed[:, None], torch.arange(9), k.cycle[:, None], k.place[:, None], k.stream)
    assert torch.equal(out.log_w, total)
    torch.testing.assert_close(out.ess, weights.ess(total))
    torch.testing.assert_close(out.log_mean, weights.log_mean_exp(total))
    low = may & (weights.ess(total) < 0.7 * 9) & (total.amax(-1) > -torch.inf)
    assert torch.equal(out.resampled, low) and low.any() and not low.all()
    expected = resampling.SCHEMES[name](weights.normalise(total), u)
    assert torch.equal(out.ancestors, torch.where(low[:, None], expected, torch.arange(9)))
    assert torch.equal(carried, total.masked_fill(low[:, None], 0.0))
    torch.testing.assert_close(log_z, out.log_mean.masked_fill(~low, 0.0))


def table(slots=3, width=6, size=20):
    return Pages.create(slots, width, size, torch.device("cpu"))


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_survivors_share_pages_and_the_dead_give_theirs_back():
    t = table()
    ops.grow(t, int32(0, 0, 0), int32(5, 3, 9), 4)
    assert t.used.tolist() == [2, 1, 3] and int(t.left) == 14
    lengths = torch.tensor([[5], [3], [9]])
    ops.select(t, torch.tensor([0, 0, 2]), int32(2, 1, 3), (lengths,))
    t.audit()
    assert torch.equal(t.rows[0], t.rows[1]) and t.counts[t.rows[0, :2].long()].tolist() == [2, 2]
    assert lengths.tolist() == [[5], [5], [9]] and int(t.left) == 15


def test_a_shared_page_is_copied_before_it_is_written_by_all_but_one():
    t = table()
    ops.grow(t, int32(0, 0, 0), int32(5, 0, 0), 4)
    ops.select(t, torch.tensor([0, 0, 0]), int32(2, 0, 0), ())
    source, copy = ops.grow(t, int32(5, 5, 5), int32(9, 9, 5), 4)
    t.audit()
    shared = int(t.rows[2, 1])
    assert source.tolist() == [shared, shared, 0]  # slot 2 does not write and holds it still
    assert copy.tolist() == [*t.rows[:2, 1].tolist(), 0] and t.used.tolist() == [3, 3, 2]
    ops.clear(t, torch.tensor([True, False, True]))
    t.audit()
    assert int(t.left) == 20 - 3


def test_pages_taken_by_the_host_come_back():
    t = table()
    prompt = pages.take(t, 4)
    t.audit(prompt)
    ops.grow(t, int32(0, 0, 0), int32(2, 2, 2), 1)
    pages.give(t, prompt)
    t.audit()
    assert prompt.tolist() == [1, 2, 3, 4] and int(t.left) == 14


def test_an_audit_finds_a_wrong_count_and_a_stale_free_list():
    t = table()
    ops.grow(t, int32(0, 0, 0), int32(2, 2, 2), 1)
    t.counts[1] += 1
    with pytest.raises(AssertionError, match="page 1 is held 1 times but counted 2"):
        t.audit()
    t.counts[1] -= 1
    t.left.add_(1)
    with pytest.raises(AssertionError, match="free list"):
        t.audit()


def test_settled_ancestors_keep_survivors_in_place():
    counts = torch.from_numpy(np.random.default_rng(0).multinomial(16, np.full(16, 1 / 16), 20))
    ancestors = groups.settle(counts)
    assert torch.equal(resampling.offspring(ancestors), counts)
    assert torch.equal(ancestors.gather(-1, ancestors), ancestors)
