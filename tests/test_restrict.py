"""A mask applied and what it leaves summed, against doing the one and then the other."""

import pytest
import torch

from smcdecode_kernels.reference import apply_bitmask, log_norm, pack_bits
from smcdecode_kernels.restrict import restrict

INF = torch.inf


def rows_of(shares, V):
    """Log-weights and masks whose rows keep these shares of the tokens, some of their last words full beyond V."""
    rng = torch.Generator().manual_seed(V)
    law = torch.randn(len(shares), V, generator=rng) * 3
    words = pack_bits(torch.rand(law.shape, generator=rng) < torch.tensor(shares)[:, None])
    if V % 32:
        words[::2, -1] |= -1 << V % 32
    return law, words


@pytest.mark.parametrize("V", [1, 31, 64, 5000])
@pytest.mark.parametrize("shares", [[0.0, 0.002, 0.01], [1.0, 0.5, 1.0], [0.01, 0.9, 0.0, 1.0, 0.002]])
def test_it_is_the_mask_and_then_the_sum(V, shares):
    law, words = rows_of(shares, V)
    expected = apply_bitmask(law.clone(), words)
    norm = restrict(law, words)
    assert torch.equal(law, expected)
    torch.testing.assert_close(norm.float(), log_norm(expected).float())  # as near as float32 is


def test_a_row_has_the_bits_that_it_has_alone():
    law, words = rows_of([0.01, 0.9, 0.002, 1.0], 5000)
    alone = torch.cat([restrict(law[i : i + 1].clone(), words[i : i + 1]) for i in range(4)])
    assert torch.equal(restrict(law, words), alone)


@pytest.mark.parametrize("V", [5, 40, 5000])
def test_a_row_that_keeps_all_has_the_bits_of_one_without_a_mask(V):
    law, words = rows_of([1.0, 0.01, 1.0], V)
    assert torch.equal(restrict(law.clone(), words)[::2], log_norm(law[::2]))


@pytest.mark.parametrize("share", [0.01, 0.9])
def test_what_is_no_number_shows(share):
    law, words = rows_of([share] * 4, 5000)
    allowed = apply_bitmask(torch.zeros(4, 5000), words) == 0
    law[0, allowed[0].nonzero()[0, 0]] = torch.nan
    law[1, allowed[1].nonzero()[0, 0]] = INF
    law[2] = -INF
    law[3, (~allowed[3]).nonzero()[0, 0]] = torch.nan  # forbidden: nobody asks
    norm = restrict(law, words)
    assert norm[:2].isnan().all() and norm[2] == -INF and norm[3].isfinite()
