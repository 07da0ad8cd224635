"""Weights, evidence and ancestors against their plain definition."""

import torch
from cases import generator, key_of, moved
from hypothesis import example, given
from hypothesis import strategies as st

from smcdecode_kernels import groups, triton_kernels


@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(1, 40), st.booleans())
@example(1, 3, 1024, True)
@example(2, 3, 1024, False)
@example(3, 2, 1000, False)
@example(4, 2, 1, True)
def check_weights_and_ancestors(seed, G, N, stratified):
    g = generator(seed)
    log_w = torch.randn(G, N, generator=g, dtype=torch.float64)
    increments = 2 * torch.randn(G, N, generator=g, dtype=torch.float64)
    increments[torch.rand(G, N, generator=g) < 0.3] = -torch.inf
    if G > 1:
        increments[1] = -torch.inf  # nobody lives
        log_w[0] = increments[0] = 0.0  # equal weights
    if G > 2:
        increments[2, N // 2] = torch.nan
    log_z, threshold = torch.randn(2, G, generator=g, dtype=torch.float64)
    may, key = torch.rand(G, generator=g) < 0.8, key_of(g, G, stream=4)
    threshold = threshold.abs() + 0.5
    ours, theirs = [(log_w.clone(), log_z.clone()), (moved(log_w.clone()), moved(log_z.clone()))]
    plain = groups.weigh(ours[0], increments, ours[1], may, threshold, key, stratified)
    found = triton_kernels.weigh(
        theirs[0], moved(increments), theirs[1], moved(may), moved(threshold), moved(key), stratified
    )
    assert torch.equal(found.resampled.cpu(), plain.resampled)
    assert torch.equal(found.ancestors.cpu(), plain.ancestors)
    for a, b in [
        (found.log_w, plain.log_w), (found.ess, plain.ess), (found.log_mean, plain.log_mean),
        (theirs[0], ours[0]), (theirs[1], ours[1]),
    ]:  # fmt: skip
        torch.testing.assert_close(a.cpu(), b, rtol=1e-12, atol=1e-12, equal_nan=True)
