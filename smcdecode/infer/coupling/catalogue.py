"""The couplings by name, and which of two to draft for next; knows laws of positions seen, no model."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from smcdecode.infer.coupling.drafting import TOP_PLUS_ONE
from smcdecode.infer.coupling.global_resolution import GlobalResolution
from smcdecode.infer.coupling.greedy import Greedy
from smcdecode.infer.coupling.kseq import KSeq
from smcdecode.infer.coupling.optimum import optimal_acceptance, smallest_prefix
from smcdecode.infer.coupling.protocol import Coupling, counts_of
from smcdecode.infer.coupling.ratio_groups import by_ratio
from smcdecode.infer.coupling.recursive import RecursiveRejection, RecursiveRejectionWithoutReplacement

__all__ = ["COUPLINGS", "Preference"]

COUPLINGS: dict[str, Coupling] = {
    coupling.name: coupling
    for coupling in (
        GlobalResolution(),
        Greedy(),
        RecursiveRejection(),
        RecursiveRejectionWithoutReplacement(),
        KSeq(),
    )
}
"""The exact couplings. The published, approximate set softmax is not among them: it is asked for by its class."""

_MEMORY = 0.9  # weight of what was known when one more position is seen


@dataclasses.dataclass(frozen=True)
class Preference:
    """Global Resolution or greedy drafts, for each request, by the acceptance either allows at positions seen.

    Independent drafts with the optimal coupling win on flat laws, greedy ones where the draft is sure of itself. The
    drafts must be chosen before the target is known; a choice that looks only at the past keeps the output exact. What
    either accepts follows from p and q alone, whichever was used there. Chains that survive together further down are
    not counted, which favours greedy drafts a little.
    """

    CHOICES: ClassVar[tuple[str, ...]] = ("global resolution", "greedy")

    seen: Tensor  # (R, 2) float64, discounted sum of the acceptance of each choice; equal sums choose the first

    @classmethod
    def start(cls, requests: int) -> "Preference":
        """Nothing seen yet."""
        return cls(torch.zeros(requests, len(cls.CHOICES), dtype=torch.float64))

    @property
    def choice(self) -> Tensor:
        """(R,) int64, index in ``CHOICES``."""
        return self.seen.argmax(-1)

    def observe(self, rows: Tensor, p: Tensor, q: Tensor, n: int | Tensor) -> "Preference":
        """See one position of some requests; a few passes over the laws, nothing is solved.

        Args:
            rows: (m,) int64, the requests, each once.
            p: (m, V) float64, the target's law there.
            q: (m, V) float64, the draft's.
            n: drafts, one number or (m,) int64.
        """
        groups = by_ratio(p, q)
        independent = 1.0 + smallest_prefix(groups.P, groups.Q, counts_of(n, p))[1]
        both = torch.stack([independent, optimal_acceptance(p, q, n, TOP_PLUS_ONE)], -1)
        seen = self.seen.clone()
        seen[rows] = _MEMORY * seen[rows] + both.to(seen.device)
        return Preference(seen)
