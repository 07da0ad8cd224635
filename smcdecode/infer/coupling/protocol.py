"""What every coupling promises: knows n drafts, two laws and uniforms; not how a coupling chooses among drafts.

At one position n tokens were drafted from a law made of q; one token is emitted, whose law must be p. A coupling says
with which probability each drafted token is the one, and from which law the token comes otherwise. A drafted chain
survives a position if its token equals the token emitted, however that was chosen: what the chain drafted next is
independent of the choice, given the token. Several chains may survive, and with i.i.d. drafts they stay i.i.d.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from smcdecode.errors import InvalidOption
from smcdecode.infer.coupling.drafting import Drafting, at_quantiles

__all__ = ["Branches", "Coupling", "Plan", "Resolution", "counts_of", "in_turn"]


@dataclasses.dataclass(frozen=True)
class Resolution:
    """The token of each position, and which drafts go on."""

    token: Tensor  # (B,) int64
    survivors: Tensor  # (B, N) bool: the drafts alive that equal the token

    @property
    def branch(self) -> Tensor:
        """(B,) int64, the first surviving draft, −1 where none survives."""
        return torch.where(self.survivors.any(-1), self.survivors.long().argmax(-1), -1)


@dataclasses.dataclass(frozen=True)
class Branches:
    """The law of the emitted token given the drafts."""

    law: Tensor  # (B, N) float64, probability that the draft in this slot is the token; 0 where it is not alive
    residual: Callable[[Tensor], Tensor]  # rows (m,) int64 -> (m, V) float64 weights of the token otherwise


class Plan(abc.ABC):
    """A coupling fitted to B positions. A subclass gives :meth:`branches`; the rest follows."""

    p: Tensor  # (B, V) float64, the law of the token emitted
    expected: Tensor | None = None
    """(B,) float64, probability that a draft is chosen, before drafting; None where it has no closed form."""

    @abc.abstractmethod
    def branches(self, drafts: Tensor, alive: Tensor) -> Branches:
        """The law of the token given its drafts (B, N) int64, of which alive (B, N) bool counts n in each row."""

    def resolve(self, drafts: Tensor, alive: Tensor, u: Tensor) -> Resolution:
        """Draw the token of every position.

        Args:
            drafts: (B, N) int64, drawn from the coupling's drafting law; entries not alive are not read.
            alive: (B, N) bool, n of them true in each row, as many as the plan was prepared for.
            u: (B, 2) float64 uniforms in (0, 1) that had no part in drafting.
        """
        drafts = drafts.masked_fill(~alive, 0)
        given = self.branches(drafts, alive)
        slot = (given.law.cumsum(-1) <= u[:, :1]).sum(-1)  # (B,), N where no draft is chosen
        token = drafts.gather(-1, slot.clamp_max(drafts.shape[1] - 1)[:, None])[:, 0]
        rest = (slot == drafts.shape[1]).nonzero()[:, 0]
        if len(rest):
            token[rest] = at_quantiles(self._weights(given, rest), u[rest, 1:])[:, 0]
        return Resolution(token, alive & (drafts == token[:, None]))

    def conditional_law(self, drafts: Tensor, alive: Tensor) -> Tensor:
        """The law :meth:`resolve` draws from: (B, V) float64, what averaging over drafts must turn into p."""
        drafts = drafts.masked_fill(~alive, 0)
        given = self.branches(drafts, alive)
        weights = self._weights(given, torch.arange(len(drafts), device=drafts.device))
        rest = (1.0 - given.law.sum(-1, keepdim=True)).clamp(min=0.0)
        return (rest * weights / weights.sum(-1, keepdim=True)).scatter_add(-1, drafts, given.law)

    def _weights(self, given: Branches, rows: Tensor) -> Tensor:
        """The residual law of some rows; p itself where nothing is left and only rounding leads here."""
        weights = given.residual(rows)
        return torch.where((weights > 0).any(-1, keepdim=True), weights, self.p[rows])


class Coupling(Protocol):
    """A way to turn n drafts into one token whose law is p."""

    @property
    def name(self) -> str:
        """What reports call it."""

    @property
    def drafting(self) -> Drafting:
        """The joint law its drafts must have; for another law the output is not p."""

    def prepare(self, p: Tensor, q: Tensor, n: int | Tensor) -> Plan:
        """Fit the coupling to B positions.

        Args:
            p: (B, V) float64, the target's law, rows summing to 1.
            q: (B, V) float64, the law the drafts were made of, rows summing to 1.
            n: drafts alive at each position, one number or (B,) int64, each ≥ 1.

        Raises:
            InvalidOption: n below 1.
        """


def counts_of(n: int | Tensor, p: Tensor) -> Tensor:
    """The number of drafts of each position as (B,) float64.

    Raises:
        InvalidOption: n below 1, where there is nothing to couple.
    """
    counts = torch.as_tensor(n, dtype=torch.float64, device=p.device).expand(len(p))
    if bool((counts < 1).any()):
        raise InvalidOption("a coupling needs n ≥ 1 drafts alive at every position; draw from p where none is left")
    return counts


def in_turn(accept: Tensor, alive: Tensor) -> Tensor:
    """Law of the first draft accepted when those alive are tried in turn: (B, N) probabilities -> (B, N) float64."""
    accept = accept.masked_fill(~alive, 0.0)
    reached = torch.ones_like(accept)
    reached[:, 1:] = (1.0 - accept[:, :-1]).cumprod(-1)
    return accept * reached
