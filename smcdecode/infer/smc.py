"""Sequential Monte Carlo over any particle system. Knows weights and ancestors; no model, no page, no text.

Target and one cycle, with K drafted tokens and one bonus token (K = 0 is ordinary SMC):

    γ_t(x_1:t) = p(x_1:t)^α ψ_t(x_1:t),   ψ_T = Ψ once x is complete                            (1)
    draft     x_t+k ~ q_k(· | x_<t+k),                       k = 1…K                            (2)
    score     p(· | x_<t+k),                                 k = 1…K+1, one pass                (3)
    reweight  log w += Σ_k [α log p(x_t+k|·) − log q_k(x_t+k|·)] + log ψ_t+K − log ψ_t          (4)
    bonus     x_t+K+1 ~ r(·) = p(·)^α m(·) / Z,              log w += log Z                     (5)

log Z does not depend on the bonus token, so it enters the weight before resampling and the bonus is drawn after:
copies of one ancestor get different tokens. Between (4) and (5) particles are resampled when ESS < threshold·N, and

    log Ẑ = Σ over resamplings [lse(log w) − log N]  +  final [lse(log w) − log N],   E[Ẑ] = Σ_x γ(x) exactly,

for every N, K, q, scheme and threshold (Del Moral 2004, ch. 9; Chopin & Papaspiliopoulos 2020, ch. 10). A resampling
may also change N (:class:`~smcdecode.infer.adapt.Population`): slots without a particle are idle, of weight zero.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from smcdecode.infer import weights
from smcdecode.infer.adapt import Population
from smcdecode.infer.resampling import multinomial, offspring
from smcdecode.infer.variance import multinomial_equivalents

__all__ = ["ParticleSystem", "Step", "run"]

Scheme = Callable[..., Tensor]


class ParticleSystem(Protocol):
    """G lanes of N slots. A lane runs one request at a time and may be handed to another when it is done."""

    def admit(self) -> Tensor | None:
        """Start waiting requests: (G,) bool, the lanes that begin now; None when nothing runs and nothing waits."""

    def extend(self) -> Tensor:
        """Draft, score and weigh one block in every running lane: (G, N) float64 increments of log w, (2)–(5)."""

    def finished(self) -> Tensor:
        """(G, N) bool: particles whose text is complete, or that are dead; their weights move no more."""

    def uniforms(self) -> Tensor:
        """(G, N) float64 in (0, 1) for this cycle's resampling, a function of each lane's request alone."""

    def select(self, ancestors: Tensor) -> None:
        """Slot i of lane g becomes a copy of slot ``ancestors[g, i]``; -1 leaves it idle: no particle stands there."""

    def append(self) -> None:
        """Draw the bonus token of every particle that scored one, (5)."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What one cycle did, all lanes at once. Weights and ESS are those *before* resampling."""

    running: Tensor  # (G,) bool: lanes this step belongs to
    log_w: Tensor  # (G, N) float64, accumulated since the last resampling
    chi2: Tensor  # (G,) float64, 1 + χ²(p‖q) of this cycle's incremental weights, estimated
    ess: Tensor  # (G,) float64
    log_z: Tensor  # (G,) float64, estimate of the evidence so far
    resampled: Tensor  # (G,) bool
    ancestors: Tensor  # (G, N) int64; identity where not resampled, -1 for slots that are idle from now on
    count: Tensor  # (G,) int64, particles that entered this cycle's weights; the other slots were idle
    origin: Tensor  # (G, N) int64, first-cycle ancestor of each of those particles; -1 for idle slots
    resamplings: Tensor  # (G,) float64, resamplings before this cycle's, in multinomial equivalents
    done: Tensor  # (G,) bool: lanes whose particles are all finished


def run(
    system: ParticleSystem, scheme: Scheme, threshold: float, population: Population | None = None
) -> Iterator[Step]:
    """Drive a particle system to its end, yielding a :class:`Step` a cycle.

    Args:
        system: what drafts, scores and moves the particles.
        scheme: a resampling scheme of :mod:`smcdecode.infer.resampling`.
        threshold: resample a lane when ESS < threshold·N.
        population: how many particles each resampling leaves, at most the system's slots; None fills all slots always.
    """
    state: _State | None = None
    seen: _Seen | None = None  # of a cycle that moves no weight, as those of a verified chain do
    while (fresh := system.admit()) is not None:
        increments = system.extend()  # (2)–(5)
        state = state or _State.zeros(increments, population)
        if bool(fresh.any()):
            state = state.restart(fresh, population)
            seen = None
        moved = bool(increments.any())
        if seen is None or moved:
            seen = _Seen.of(increments, state)
        log_w, ess = seen.log_w, seen.ess
        done = state.running & (system.finished().all(-1) | seen.dead)
        wanted = state.count if population is None else population.following(ess, state.count)
        uneven = (ess < threshold * state.count.double()) | (2 * wanted < state.count)
        resampled = state.running & ~done & uneven
        ancestors = torch.arange(log_w.shape[-1]).expand_as(log_w)
        worth = torch.zeros_like(ess)  # multinomial resamplings that this one amounts to, for the variance estimate
        resampling = bool(resampled.any())
        if resampling:
            W = weights.normalise(log_w)
            drawn = scheme(W, system.uniforms()) if population is None else scheme(W, system.uniforms(), wanted)
            ancestors = torch.where(resampled[:, None], drawn, ancestors)
            equivalents = _worth(wanted, W) if scheme is multinomial else multinomial_equivalents(W, drawn)
            worth = torch.where(resampled, equivalents, worth)
            system.select(ancestors)
        system.append()  # (5)
        yield Step(
            state.running, log_w, seen.chi2, ess, state.log_z + seen.log_mean, resampled, ancestors, state.count,
            state.origin, state.resamplings, done,
        )  # fmt: skip
        state = state.after(log_w, seen.log_mean, resampled, ancestors, worth, done)
        if moved or resampling:
            seen = None


def _worth(M: Tensor, W: Tensor) -> Tensor:
    """One multinomial resampling to M particles (G,), counted in those to all N slots: log M/(M−1) over log N/(N−1)."""
    if W.shape[-1] == 1:
        return torch.ones_like(W[:, 0])
    return (M.double() / (M - 1)).log() / torch.full_like(W[:, 0], W.shape[-1] / (W.shape[-1] - 1)).log()


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What the weights of a cycle amount to."""

    log_w: Tensor  # (G, N) float64
    log_mean: Tensor  # (G,) float64
    ess: Tensor  # (G,) float64
    chi2: Tensor  # (G,) float64
    dead: Tensor  # (G,) bool

    @classmethod
    def of(cls, increments: Tensor, state: "_State") -> "_Seen":
        """Those of a state whose weights move by ``increments`` (G, N)."""
        log_w = state.log_w + increments
        log_mean = weights.log_sum_exp(log_w) - state.count.double().log()
        chi2 = weights.chi2_plus_one(increments, state.log_w)
        return cls(log_w, log_mean, weights.ess(log_w), chi2, torch.isneginf(log_mean))


@dataclasses.dataclass(frozen=True)
class _State:
    """What run() carries from cycle to cycle."""

    running: Tensor  # (G,) bool
    log_w: Tensor  # (G, N) float64; -inf where a slot is idle
    count: Tensor  # (G,) int64, particles
    log_z: Tensor  # (G,) float64, closed by resamplings
    origin: Tensor  # (G, N) int64
    resamplings: Tensor  # (G,) float64, multinomial equivalents

    @classmethod
    def zeros(cls, like: Tensor, population: Population | None) -> "_State":
        """Equal weights for the first particles of every lane."""
        lanes, slots = like.shape
        first = slots if population is None else population.first
        held = torch.arange(slots) < first
        return cls(
            torch.zeros(lanes, dtype=torch.bool),
            torch.where(held, torch.zeros_like(like), -torch.inf),
            torch.full((lanes,), first),
            torch.zeros(lanes, dtype=torch.float64),
            torch.where(held, torch.arange(slots), -1).repeat(lanes, 1),
            torch.zeros(lanes, dtype=torch.float64),
        )

    def restart(self, fresh: Tensor, population: Population | None) -> "_State":
        """Lanes that begin a request start from equal weights."""
        blank = _State.zeros(self.log_w, population)
        return _State(
            self.running | fresh,
            torch.where(fresh[:, None], blank.log_w, self.log_w),
            torch.where(fresh, blank.count, self.count),
            torch.where(fresh, blank.log_z, self.log_z),
            torch.where(fresh[:, None], blank.origin, self.origin),
            torch.where(fresh, blank.resamplings, self.resamplings),
        )

    def after(
        self, log_w: Tensor, log_mean: Tensor, resampled: Tensor, ancestors: Tensor, worth: Tensor, done: Tensor
    ) -> "_State":
        """The state behind a cycle: a resampling moves the mean weight into log Ẑ and evens the weights."""
        if not bool(resampled.any()):
            return dataclasses.replace(self, running=self.running & ~done, log_w=log_w)
        idle = ancestors < 0
        even = torch.zeros_like(log_w).masked_fill(idle, -torch.inf)
        return _State(
            self.running & ~done,
            torch.where(resampled[:, None], even, log_w),
            torch.where(resampled, offspring(ancestors).sum(-1), self.count),
            self.log_z + log_mean.masked_fill(~resampled, 0.0),
            self.origin.gather(-1, ancestors.clamp(min=0)).masked_fill(idle, -1),
            self.resamplings + worth,
        )
