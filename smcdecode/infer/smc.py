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

for every N, K, q, scheme and threshold (Del Moral 2004, ch. 9; Chopin & Papaspiliopoulos 2020, ch. 10).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from smcdecode.infer import weights
from smcdecode.infer.resampling import multinomial
from smcdecode.infer.variance import multinomial_equivalents

__all__ = ["ParticleSystem", "Step", "run"]

Scheme = Callable[[Tensor, Tensor], Tensor]


class ParticleSystem(Protocol):
    """G lanes of N particles. A lane runs one request at a time and may be handed to another when it is done."""

    def admit(self) -> Tensor | None:
        """Start waiting requests: (G,) bool, the lanes that begin now; None when nothing runs and nothing waits."""

    def extend(self) -> Tensor:
        """Draft, score and weigh one block in every running lane: (G, N) float64 increments of log w, (2)–(5)."""

    def finished(self) -> Tensor:
        """(G, N) bool: particles whose text is complete, or that are dead; their weights move no more."""

    def uniforms(self) -> Tensor:
        """(G, N) float64 in (0, 1) for this cycle's resampling, a function of each lane's request alone."""

    def select(self, ancestors: Tensor) -> None:
        """Particle i of lane g becomes a copy of particle ``ancestors[g, i]``."""

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
    ancestors: Tensor  # (G, N) int64; identity where not resampled
    origin: Tensor  # (G, N) int64, first-cycle ancestor of each particle that entered this cycle's weights
    resamplings: Tensor  # (G,) float64, resamplings before this cycle's, in multinomial equivalents
    done: Tensor  # (G,) bool: lanes whose particles are all finished


def run(system: ParticleSystem, scheme: Scheme, threshold: float) -> Iterator[Step]:
    """Drive a particle system to its end, yielding a :class:`Step` a cycle.

    Args:
        system: what drafts, scores and moves the particles.
        scheme: a resampling scheme of :mod:`smcdecode.infer.resampling`.
        threshold: resample a lane when ESS < threshold·N.
    """
    state: _State | None = None
    while (fresh := system.admit()) is not None:
        increments = system.extend()  # (2)–(5)
        state = (state or _State.zeros(increments)).restart(fresh)
        log_w = state.log_w + increments
        log_mean = weights.log_mean_exp(log_w)
        ess = weights.ess(log_w)
        chi2 = weights.chi2_plus_one(increments, state.log_w)
        done = state.running & (system.finished().all(-1) | torch.isneginf(log_mean))
        resampled = state.running & ~done & (ess < threshold * log_w.shape[-1])
        ancestors = torch.arange(log_w.shape[-1]).expand_as(log_w)
        worth = torch.zeros_like(ess)  # multinomial resamplings that this one amounts to, for the variance estimate
        if resampled.any():
            W = weights.normalise(log_w)
            ancestors = torch.where(resampled[:, None], scheme(W, system.uniforms()), ancestors)
            equivalents = torch.ones_like(ess) if scheme is multinomial else multinomial_equivalents(W, ancestors)
            worth = torch.where(resampled, equivalents, worth)
            system.select(ancestors)
        yield Step(
            state.running, log_w, chi2, ess, state.log_z + log_mean, resampled, ancestors, state.origin,
            state.resamplings, done,
        )  # fmt: skip
        system.append()  # (5)
        state = state.after(log_w, log_mean, resampled, ancestors, worth, done)


@dataclasses.dataclass(frozen=True)
class _State:
    """What run() carries from cycle to cycle."""

    running: Tensor  # (G,) bool
    log_w: Tensor  # (G, N) float64
    log_z: Tensor  # (G,) float64, closed by resamplings
    origin: Tensor  # (G, N) int64
    resamplings: Tensor  # (G,) float64, multinomial equivalents

    @classmethod
    def zeros(cls, like: Tensor) -> "_State":
        lanes, particles = like.shape
        return cls(
            torch.zeros(lanes, dtype=torch.bool),
            torch.zeros_like(like),
            torch.zeros(lanes, dtype=torch.float64),
            torch.arange(particles).repeat(lanes, 1),
            torch.zeros(lanes, dtype=torch.float64),
        )

    def restart(self, fresh: Tensor) -> "_State":
        """Lanes that begin a request start from equal weights."""
        blank = _State.zeros(self.log_w)
        return _State(
            self.running | fresh,
            torch.where(fresh[:, None], blank.log_w, self.log_w),
            torch.where(fresh, blank.log_z, self.log_z),
            torch.where(fresh[:, None], blank.origin, self.origin),
            torch.where(fresh, blank.resamplings, self.resamplings),
        )

    def after(
        self, log_w: Tensor, log_mean: Tensor, resampled: Tensor, ancestors: Tensor, worth: Tensor, done: Tensor
    ) -> "_State":
        """The state behind a cycle: a resampling moves the mean weight into log Ẑ and evens the weights."""
        return _State(
            self.running & ~done,
            log_w.masked_fill(resampled[:, None], 0.0),
            self.log_z + log_mean.masked_fill(~resampled, 0.0),
            self.origin.gather(-1, ancestors),
            self.resamplings + worth,
        )
