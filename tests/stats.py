"""The statistical assertions of every test: one false-alarm rate, stated here; knows samples, not what drew them."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special, stats

FALSE_ALARM = 1e-6
"""Chance that a correct program fails one assertion."""

ROUNDING = 1e-9
"""Relative error of float arithmetic that is no news, for samples that do not vary."""


def assert_mean(samples: ArrayLike, expected: ArrayLike) -> None:
    """Assert that samples (n, …), independent along the first axis, have mean ``expected`` (…).

    A two-sided t-test of each component, Bonferroni over components. As good as the samples are bounded: test
    weights whose largest value is not rare.
    """
    x = np.asarray(samples, dtype=np.float64)
    target = np.broadcast_to(np.asarray(expected, dtype=np.float64), x.shape[1:])
    assert np.isfinite(x).all(), "samples must be finite"
    n, components = len(x), max(target.size, 1)
    error = np.abs(x.mean(0) - target)
    allowed = stats.t.isf(FALSE_ALARM / components / 2, n - 1) * x.std(0, ddof=1) / np.sqrt(n)
    rounding = ROUNDING * np.maximum(np.abs(x).max(0), np.abs(target))
    assert (error <= allowed + rounding).all(), (
        f"mean of {n} samples {x.mean(0)} differs from {target} by {error}; allowed {allowed + rounding}"
    )


def assert_frequencies(counts: ArrayLike, probabilities: ArrayLike) -> None:
    """Assert that counts (k,) of independent draws come from ``probabilities`` (k,).

    A relative-entropy test with a bound that holds for every n and k, so that no cell needs a least count:
    ``P(n KL(counts/n ‖ p) ≥ t) ≤ e^-t (e t/(k−1))^(k−1)`` (Agrawal, IEEE Trans. Inf. Theory 66(10), 2020).
    """
    c, p = np.asarray(counts, dtype=np.float64), np.asarray(probabilities, dtype=np.float64)
    assert c.shape == p.shape and abs(p.sum() - 1) < ROUNDING, "give one probability for each count, summing to 1"
    assert not c[p == 0].any(), f"cells of probability zero were drawn: {np.flatnonzero(c * (p == 0))}"
    n = c.sum()
    divergence = special.rel_entr(c, n * p).sum()
    allowed = entropy_bound(np.count_nonzero(p)) + ROUNDING * n
    worst = int(np.argmax(np.abs(c - n * p) / np.sqrt(n * p + (p == 0))))
    assert divergence <= allowed, (
        f"{n:.0f} draws diverge from their law: n KL = {divergence:.3g}, allowed {allowed:.3g}; "
        f"cell {worst} was drawn {c[worst]:.0f} times, expected {n * p[worst]:.1f}"
    )


def entropy_bound(cells: int) -> float:
    """The t at which Agrawal's bound for ``cells`` cells equals the false-alarm rate."""
    d = cells - 1
    if d == 0:
        return 0.0
    slack = lambda t: -t + d + d * np.log(t / d) - np.log(FALSE_ALARM)  # noqa: E731
    return float(optimize.brentq(slack, d, 4 * d - 4 * np.log(FALSE_ALARM)))
