"""How fast and how rough SMC with a draft will be: (7) with measured times. Knows numbers; no model, no clock.

Along a text that the target wrote let, at every position, A be the chance that a drafted token is accepted, g the law
of accepted tokens, e the law of emitted ones (section 3 of the mathematics), r the target's local law, Z its norm. Then

    P(k drafted tokens are kept)  = E[ Π_{j<k} (g/r)(x_j) · A_k ]                          over texts x ~ r, exactly
    tokens of a cycle             = 1 + Σ_{k≤K} P(k are kept)
    1 + χ² of a cycle's weights   = E[w²] / E[w]²,  by the recursion over its positions
        E[w²]_K = Z² (F + G E[w²]_{K−1}),   F = Σ r² (e − g)/e²,   G = Σ r² g/e²
        E[w]_K  = Z (1 − U + U E[w]_{K−1}),   U = Σ r g/e,   with Z² and Z at the bonus token: a refusal ends the block.

There Z stands over its geometric mean: weights are compared at a common length, where a constant factor cancels.

With N particles each cycle multiplies E[Ẑ²]/Z² by about 1 + χ²/N, so Var log Ẑ ≈ cycles · log(1 + χ²/N). One drawn text
x has E[Ẑ 1{x}] = γ(x), hence a law at most E|Ẑ/Z − 1|/2 from the target in total variation: erf(√(Var log Ẑ / 8)) for
log-normal Ẑ.
"""

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

__all__ = ["Curve", "Forecast", "PassTimes", "Positions", "forecast", "marginal_cost", "recommend"]

Floats = NDArray[np.float64]

_RUNS = 24  # simulated runs behind one predicted time
_ALIKE = 0.02  # relative difference of speeds below which the better answer is preferred


@dataclasses.dataclass(frozen=True)
class Curve:
    """Seconds by width, linear between the widths that were measured and beyond the last; flat before the first."""

    widths: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, width: Floats | float) -> Floats:
        """Seconds at some widths; 0 at width 0."""
        x, y = np.array(self.widths), np.array(self.seconds)
        w = np.asarray(width, dtype=np.float64)
        found = np.interp(w, x, y)
        if len(x) > 1:
            slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
            found = found + slope * np.maximum(w - x[-1], 0.0)
        return np.where(w > 0, found, 0.0)


@dataclasses.dataclass(frozen=True)
class PassTimes:
    """What the parts of a cycle take on this machine."""

    target: Curve  # a pass of p over this many positions
    draft: Curve  # a pass of q over this many positions
    drawing: Curve  # besides it, for laws and tokens of so many particles
    carrying: Curve  # judging this many positions at s = 0
    judging: Curve  # the same at s > 0
    cycle: Curve  # whatever else a cycle of so many particles takes: potentials, resampling, bookkeeping
    prefill: float  # reading a prompt


@dataclasses.dataclass(frozen=True)
class Positions:
    """Draft against target at one strictness, position by position along texts of the target; all (n,) float64."""

    text: NDArray[np.int64]  # which text; positions of one text stand together, in order
    kept: Floats  # g/r of the token that the target wrote
    acceptance: Floats  # A
    ended: Floats  # F
    went_on: Floats  # G
    onward: Floats  # U
    log_z: Floats  # log Z of the target's local law; 0 for a plain target

    def survival(self, K: int) -> Floats:
        """P(k drafted tokens are kept) for k = 1 … K, at most the longest text: (K,) float64, falling."""
        alive, found = np.ones(len(self.text)), []
        for k in range(K):
            here = self._at(self.acceptance, k)
            found.append(float(np.nanmean(alive * here)))
            alive = alive * self._at(self.kept, k)
        return np.minimum.accumulate(np.clip(found, 0.0, 1.0))

    def rho(self, K: int) -> float:
        """1 + χ² of the weights of a cycle of K drafted tokens, K below the longest text; K = 0 is Local()."""
        z = np.exp(self.log_z - self.log_z.mean())  # weights are compared at a common length
        square, mean = self._at(z**2, K), self._at(z, K)
        for k in reversed(range(K)):
            square = self._at(z**2, k) * (self._at(self.ended, k) + self._at(self.went_on, k) * square)
            onward = self._at(self.onward, k)
            mean = self._at(z, k) * (1 - onward + onward * mean)
        return max(1.0, float(np.nanmean(square) / np.nanmean(mean) ** 2))

    @property
    def longest(self) -> int:
        """Positions of the longest text."""
        return int(np.bincount(self.text).max())

    def _at(self, values: Floats, k: int) -> Floats:
        """The values k positions further on in the same text; NaN past its end."""
        n = len(values)
        moved = np.full(n, np.nan)
        if k < n:
            same = self.text[k:] == self.text[: n - k]
            moved[: n - k] = np.where(same, values[k:], np.nan)
        return moved


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What one setting is expected to do."""

    particles: int
    block: int  # 0: the target writes alone
    strictness: float
    tokens_per_second: float  # of one answer, one prompt at a time
    speedup: float  # over the target alone, one particle
    tokens_per_cycle: float
    chi2: float  # 1 + χ² of a cycle's weights
    variance: float  # of log Ẑ over the whole text

    @property
    def share(self) -> float:
        """Particles that one cycle's weights leave effective, ESS/N."""
        return 1 / self.chi2

    @property
    def error(self) -> float:
        """Standard deviation of log Ẑ."""
        return math.sqrt(self.variance)

    @property
    def distance(self) -> float:
        """How far the law of one drawn text may be from the target, in total variation."""
        return float(erf(math.sqrt(self.variance / 8)))

    @property
    def exact(self) -> bool:
        """Whether every text has exactly the target's law."""
        return self.variance < 1e-9


def forecast(
    times: PassTimes, positions: Positions, *, particles: int, block: int, strictness: float, tokens: int, twist: float
) -> Forecast:
    """Speed and error of one setting.

    Args:
        times: what was measured.
        positions: draft against target at this strictness; any, where ``block`` is 0.
        particles: N.
        block: K; 0 is Local().
        strictness: s.
        tokens: length of the texts.
        twist: χ² of the potentials that give no masks, counted once, at the end of the text.
    """
    survival = positions.survival(block)
    per_cycle = 1 + float(survival.sum())
    rho = positions.rho(block)
    variance = tokens / per_cycle * math.log1p((rho - 1) / particles) + math.log1p(twist / particles)
    alone = _alone(times, 1, tokens)
    seconds = (
        _seconds(times, survival, particles, strictness > 0, tokens) if block else _alone(times, particles, tokens)
    )
    return Forecast(
        particles, block, strictness, tokens / seconds, alone / seconds, per_cycle, rho, variance
    )  # fmt: skip


def _alone(times: PassTimes, N: int, tokens: int) -> float:
    """Seconds of a text without a draft: the first token comes of the prompt, each other of a pass."""
    one = times.target(N) + times.carrying(N) + times.cycle(N)
    return times.prefill + float(times.cycle(N)) + (tokens - 1) * float(one)


def _seconds(times: PassTimes, survival: Floats, N: int, strict: bool, tokens: int) -> float:
    """Seconds of a run of N particles, by simulation: blocks are cut where refused, and at the end of the text.

    Particles that are done write no more, and the run lasts until the last one is.
    """
    K = len(survival)
    chances = -np.diff(np.concatenate([[1.0], survival, [0.0]]))  # of 0 … K tokens kept
    edges = chances.cumsum()
    rng = np.random.default_rng(0)
    length = np.ones((_RUNS if strict else 1, N), dtype=np.int64)
    lag = np.ones_like(length)  # tokens that the draft has not read
    seconds = np.full(len(length), times.prefill + float(times.cycle(N)))
    while (length < tokens).any():
        room = tokens - length
        wanted = np.minimum(room, K)  # (runs, N) tokens drafted; 0 where the text is done
        seconds += _block_seconds(times, wanted, lag, room, strict)
        kept = np.searchsorted(edges[:-1], rng.random(length.shape), side="right")
        refused = kept < wanted
        lag = np.where(refused, 1, 2)
        length = np.minimum(length + np.minimum(kept, wanted) + 1, tokens)
    return float(seconds.mean())


def _block_seconds(
    times: PassTimes, wanted: NDArray[np.int64], lag: NDArray[np.int64], room: NDArray[np.int64], strict: bool
) -> Floats:
    """Seconds of one cycle of each simulated run: (runs,) float64."""
    going = wanted > 0
    first = (going * lag).sum(-1)
    seconds = times.draft(first) + times.drawing(going.sum(-1))
    for k in range(1, int(wanted.max(initial=0))):
        n = (wanted > k).sum(-1)
        seconds = seconds + times.draft(n) + times.drawing(n)
    positions = (wanted + (wanted < room)).sum(-1, where=going)  # the bonus needs a position, unless the text ends
    judging = times.judging if strict else times.carrying
    return seconds + times.target(positions) + judging(positions) + times.cycle(going.sum(-1))


def marginal_cost(times: PassTimes, N: int) -> float:
    """What one more drafted token adds to a cycle of N particles, over the time of a cycle with none."""
    K = 8
    none = float(times.target(N) + times.judging(N) + times.cycle(N))
    wide = N * (K + 1)
    drafted = K * float(times.draft(N) + times.drawing(N))
    return (drafted + float(times.target(wide) + times.judging(wide) + times.cycle(N)) - none) / K / none


def recommend(forecasts: list[Forecast], distance: float) -> Forecast:
    """The fastest setting whose law is at most this far from the target; where none is, the nearest.

    Of settings about as fast, the one nearer to the target, and of those the one of fewest particles.
    """
    near = [f for f in forecasts if f.distance <= distance]
    if not near:
        return min(forecasts, key=lambda f: (f.distance, -f.tokens_per_second))
    fastest = max(f.tokens_per_second for f in near)
    alike = [f for f in near if f.tokens_per_second >= (1 - _ALIKE) * fastest]
    return min(alike, key=lambda f: (round(f.distance, 3), f.particles, -f.tokens_per_second))
