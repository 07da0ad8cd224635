"""The speed formulas against each other and against direct simulation; the law σ against its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smcdecode.infer.saguaro import downweight, foreseen
from smcdecode.infer.speculation import batch_speedup, crossover, emitted, gain_bounds, speculative_speedup

rates, times = st.floats(0.05, 0.95), st.floats(0.0, 1.0)


def test_tokens_of_a_cycle():
    assert emitted(0.0, 4) == 1 and emitted(1.0, 4) == 5
    assert emitted(0.7, 4) == pytest.approx((1 - 0.7**5) / 0.3)


@given(rates, rates, times, st.integers(1, 8))
def test_without_hits_it_is_ordinary_speculation_and_with_hits_it_lies_within_the_bounds(hit, a, draft, K):
    E = emitted(a, K)
    synchronous = speculative_speedup(E, draft)
    assert batch_speedup(0.0, E, E, prepare=1.0, backup=draft) == pytest.approx(synchronous)
    assert batch_speedup(1.0, E, E, prepare=1.0, backup=draft) == pytest.approx(E)
    low, high = gain_bounds(hit, E, E, draft)
    gain = batch_speedup(hit, E, E, prepare=1.0, backup=draft) / synchronous
    assert low - 1e-12 <= gain <= high + 1e-12


@given(rates, times, st.integers(1, 12))
def test_a_batch_waits_for_its_slowest(hit, backup, b):
    every = hit**b
    seconds = every * 1.0 + (1 - every) * (1 + backup)
    assert batch_speedup(hit, 3.0, 2.0, prepare=0.5, backup=backup, batch=b) == pytest.approx(
        (hit * 3 + (1 - hit) * 2) / seconds
    )


@given(rates, st.floats(1.0, 5.0), st.floats(1.0, 5.0), st.floats(1.0, 5.0), times, times)
def test_the_crossover_is_where_the_two_backups_are_equally_fast(hit, E, first, second, t1, t2):
    slow, fast = (
        (hit * E + (1 - hit) * max(first, second), max(t1, t2)),
        (hit * E + (1 - hit) * min(first, second), min(t1, t2)),
    )
    b = crossover(hit, slow, fast)
    speed = lambda backup, n: backup[0] / (hit**n + (1 - hit**n) * (1 + backup[1]))  # noqa: E731
    if 0 < b < 1e6:
        assert speed(slow, b) == pytest.approx(speed(fast, b), rel=1e-6)
        assert speed(slow, b + 1) <= speed(fast, b + 1) + 1e-12
    if b == math.inf:
        assert all(speed(slow, n) >= speed(fast, n) - 1e-12 for n in (1, 10, 1000))


# ---- σ


def cases():
    rng = np.random.default_rng(0)
    for V in (5, 12):
        for _ in range(20):
            p, q = rng.dirichlet(np.full(V, 0.7)), rng.dirichlet(np.full(V, 0.7))
            yield (
                torch.tensor(p)[None],
                torch.tensor(q)[None],
                torch.tensor(q).topk(int(rng.integers(1, 4))).indices[None],
            )


SHARES = torch.tensor([1.0, 0.7, 0.4, 0.2, 0.05], dtype=torch.float64)


def test_sigma_by_its_definition_keeps_the_law_of_the_text():
    for p, q, top in cases():
        kept, _ = foreseen(p, q, top, SHARES)
        for i, C in enumerate(SHARES.tolist()):
            law = downweight(q.log().float(), top, C).double().softmax(-1)
            weight = q[0].clone()
            weight[top[0]] *= C
            torch.testing.assert_close(law[0], weight / weight.sum(), rtol=1e-5, atol=1e-7)
            residual = (p - law).clamp(min=0)
            out = torch.minimum(p, law) + (1 - torch.minimum(p, law).sum()) * residual / residual.sum()
            torch.testing.assert_close(out, p)
            assert float(kept[i, 0]) == pytest.approx(float(torch.minimum(p, law).sum()), abs=1e-6)


def test_refusals_become_more_foreseeable_as_c_falls():
    for p, q, top in cases():
        share = foreseen(p, q, top, SHARES)[1][:, 0]
        assert (share.diff() >= -1e-9).all()
