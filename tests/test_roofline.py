"""Equation (7) with numbers."""

import pytest

from smcdecode.infer.roofline import speedup


def test_a_cycle_is_worth_its_tokens_over_its_passes():
    assert speedup(5, 4, target_one=10.0, draft=2.0, target=12.0) == pytest.approx(5 * 10 / (4 * 2 + 12))
    assert speedup(1, 0, target_one=10.0, draft=2.0, target=10.0) == 1.0
    assert speedup(5, 4, target_one=10.0, draft=2.0, target=12.0, other=5.0) == pytest.approx(2.0)
