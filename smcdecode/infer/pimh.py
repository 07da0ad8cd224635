"""Exact answers from repeated runs: knows each run's log Ẑ and what it answered, not what a run is.

Particle independent Metropolis–Hastings (Andrieu, Doucet & Holenstein 2010): propose an independent run (x', Ẑ') and
move to it with probability min(1, Ẑ'/Ẑ). Because E[Ẑ] = Z, the answers have the target as their stationary law,
whatever N, proposal and resampling; Z itself is never needed, so power, reward and grammar targets are covered.

How far the chain still is from that law is known in terms of w = Ẑ/Z. From a state of weight w it refuses to move with
probability λ(w) = E[(1 − w'/w)+], and with common proposals and uniforms it meets a stationary copy once the larger
weight of the two has moved, so that after k proposals

    ‖law − π‖_TV ≤ E[λ(max(w_x, w_y))^k],   x from a first run, y from π,

the exact chance not to have met (Smith & Tierney 1996 give the law itself).
"""

import dataclasses
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["Chain", "accept", "remaining_bias"]

State = TypeVar("State")


def accept(log_z: Tensor, proposed: Tensor, u: Tensor) -> Tensor:
    """Whether chains move: log Ẑ held and proposed, and uniforms, (…,) float64 each -> (…,) bool.

    A run in which all particles died (-inf) is always left and never moved to, except from another such run.
    """
    return u.log() < (proposed - log_z).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


@dataclasses.dataclass(frozen=True)
class Chain(Generic[State]):
    """A chain after some proposals. Immutable: :meth:`step` gives the next."""

    state: State
    log_z: float
    moves: int
    runs: tuple[float, ...]
    """log Ẑ of every run so far, the first and the refused ones included."""

    @classmethod
    def start(cls, log_z: float, state: State) -> "Chain[State]":
        """Begin at a first run."""
        return cls(state, log_z, 0, (log_z,))

    def step(self, log_z: float, state: State, u: float) -> "Chain[State]":
        """Move to a proposed run or stay; u is a uniform in (0, 1) that had no part in the run."""
        held, proposed, uniform = (torch.tensor(x, dtype=torch.float64) for x in (self.log_z, log_z, u))
        runs = (*self.runs, log_z)
        if accept(held, proposed, uniform):
            return Chain(state, log_z, self.moves + 1, runs)
        return Chain(self.state, self.log_z, self.moves, runs)

    @property
    def proposals(self) -> int:
        """How often the chain was offered another run."""
        return len(self.runs) - 1

    @property
    def acceptance(self) -> float:
        """Share of proposals accepted; NaN before the first."""
        return self.moves / self.proposals if self.proposals else float("nan")

    @property
    def remaining_bias(self) -> float:
        """Estimate of the total variation between the state's law and the target; see :func:`remaining_bias`."""
        return remaining_bias(self.runs, self.proposals)


def remaining_bias(runs: Sequence[float], proposals: int) -> float:
    """The bound E[λ(max(w_x, w_y))^k] with expectations over the runs seen; in [0, 1].

    An estimate, not a certificate: it knows only weights that were seen, and a rare run of far larger Ẑ would raise it.
    1 before the first proposal and while no run has survivors.

    Args:
        runs: log Ẑ of independent runs.
        proposals: k, how many the chain has been offered since its first run.
    """
    log_w = torch.tensor(runs, dtype=torch.float64).sort().values
    if proposals == 0 or torch.isneginf(log_w[-1]):
        return 1.0
    w = (log_w - log_w[-1]).exp()
    below = torch.arange(1, len(w) + 1, dtype=torch.float64)
    stay = ((below - w.cumsum(0) / w).clamp(min=0.0) / len(w)).where(w > 0, 0.0)  # λ(w)
    largest = below / len(w) * w.cumsum(0) / w.sum()  # P(max(w_x, w_y) ≤ w)
    chance = largest.diff(prepend=largest.new_zeros(1))
    return float((chance * stay**proposals).sum())
