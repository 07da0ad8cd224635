"""The couplings by name, and which to draft for next; knows laws of positions seen, no model."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from smcdecode.infer.coupling.drafting import TOP_PLUS_ONE, WITHOUT_REPLACEMENT
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

_MEMORY = 0.95  # weight of what was known when one more position is seen


@dataclasses.dataclass(frozen=True)
class Preference:
    """Which coupling to draft for next, for each request, by the acceptance at positions seen.

    Independent drafts with the optimal coupling win on flat laws, distinct drafts on peaked ones, and the drafts must be
    chosen before the target is known; a choice that looks only at the past keeps the output exact. What each coupling
    accepts follows from p and q, whichever was used there. Chains surviving together further down are not counted,
    which favours distinct drafts a little.
    """

    CHOICES: ClassVar[tuple[str, ...]] = ("global resolution", "greedy", "recursive without replacement")

    seen: Tensor  # (R, 3) float64, discounted sum of the acceptance of each choice; equal sums choose the first

    @classmethod
    def start(cls, requests: int) -> "Preference":
        """Nothing seen yet."""
        return cls(torch.zeros(requests, len(cls.CHOICES), dtype=torch.float64))

    @property
    def choice(self) -> Tensor:
        """(R,) int64, index in ``CHOICES``."""
        return self.seen.argmax(-1)

    def observe(self, rows: Tensor, p: Tensor, q: Tensor, u: Tensor) -> "Preference":
        """See one position of some requests.

        Args:
            rows: (m,) int64, the requests.
            p: (m, V) float64, the target's law there.
            q: (m, V) float64, the draft's.
            u: (m, n) float64 uniforms in (0, 1), used nowhere else: n drafts without replacement are drawn with them, for
                what recursive rejection accepts has no closed form.
        """
        n = u.shape[-1]
        groups = by_ratio(p, q)
        independent = 1.0 + smallest_prefix(groups.P, groups.Q, counts_of(n, p))[1]
        greedy = optimal_acceptance(p, q, n, TOP_PLUS_ONE)
        drafts = WITHOUT_REPLACEMENT.draw(q, u)
        alive = torch.ones_like(drafts, dtype=torch.bool)
        distinct = RecursiveRejectionWithoutReplacement().prepare(p, q, n).branches(drafts, alive).law.sum(-1)
        seen = self.seen.clone()
        seen[rows] = _MEMORY * seen[rows] + torch.stack([independent, greedy, distinct], -1).to(seen.device)
        return Preference(seen)
