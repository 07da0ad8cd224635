"""Recursive rejection: the drafts are tried one after another, each against what the refusals before it left of p.

With i.i.d. drafts (SpecInfer, Miao et al. 2024) the law left after s refusals has a closed form, so that no law is
held for each draft: with c_0 = 0, Z_0 = 1,

    p_s = (p − c_s q)+ / Z_s,    c_s+1 = c_s + Z_s / R_s,    Z_s = Σ (p − c_s q)+,    R_s = 1 .

With drafts without replacement (recursive rejection sampling, Jeon et al. 2024) q loses each token refused and is
normalised again. A token refused has nothing left of p either, so the same form holds over the tokens not yet refused,
with R_s the mass of q on them. Both emit exactly p; neither accepts as often as it could.
"""

import dataclasses

import torch
from torch import Tensor

from smcdecode.infer.coupling.drafting import INDEPENDENT, WITHOUT_REPLACEMENT, Drafting, marked
from smcdecode.infer.coupling.protocol import Branches, Plan, counts_of, in_turn

__all__ = ["RecursiveRejection", "RecursiveRejectionWithoutReplacement"]


@dataclasses.dataclass(frozen=True)
class RecursiveRejection:
    """Recursive rejection of i.i.d. drafts; exact. One pass over the two laws for each draft."""

    name: str = "recursive"
    drafting: Drafting = INDEPENDENT

    def prepare(self, p: Tensor, q: Tensor, n: int | Tensor) -> Plan:
        """See :class:`~smcdecode.infer.coupling.protocol.Coupling`."""
        return _Recursive(p, q, counts_of(n, p))


class _Recursive(Plan):
    def __init__(self, p: Tensor, q: Tensor, n: Tensor) -> None:
        self.p, self.q, self.n = p, q, n.long()
        taken, left = [torch.zeros_like(n)], [torch.ones_like(n)]
        refused = torch.ones_like(n)
        for s in range(int(n.max())):
            taken.append(taken[s] + left[s])
            left.append((p - taken[-1][:, None] * q).clamp_(min=0.0).sum(-1))
            chance = torch.where(left[s] > 0, left[s + 1] / left[s], 0.0)
            refused = torch.where(s < self.n, refused * chance, refused)
        self.taken, self.left = torch.stack(taken, -1), torch.stack(left, -1)  # (B, n+1): c_s and Z_s
        self.expected = 1.0 - refused

    def branches(self, drafts: Tensor, alive: Tensor) -> Branches:
        turn = (alive.cumsum(-1) - 1).clamp(min=0)  # (B, N): which of the alive drafts this is
        p, q = self.p.gather(-1, drafts), self.q.gather(-1, drafts)
        rest = (p - self.taken.gather(-1, turn) * q).clamp(min=0.0)
        accept = (rest / (q * self.left.gather(-1, turn))).clamp(max=1.0).nan_to_num(nan=0.0)
        return Branches(in_turn(accept, alive), self._residual)

    def _residual(self, rows: Tensor) -> Tensor:
        taken = self.taken[rows].gather(-1, self.n[rows, None])
        return (self.p[rows] - taken * self.q[rows]).clamp_(min=0.0)


@dataclasses.dataclass(frozen=True)
class RecursiveRejectionWithoutReplacement:
    """Recursive rejection of distinct drafts; exact. Several passes over the two laws for each draft."""

    name: str = "recursive without replacement"
    drafting: Drafting = WITHOUT_REPLACEMENT

    def prepare(self, p: Tensor, q: Tensor, n: int | Tensor) -> Plan:
        """See :class:`~smcdecode.infer.coupling.protocol.Coupling`."""
        counts_of(n, p)
        return _WithoutReplacement(p, q)


class _WithoutReplacement(Plan):
    def __init__(self, p: Tensor, q: Tensor) -> None:
        self.p, self.q = p, q

    def branches(self, drafts: Tensor, alive: Tensor) -> Branches:
        p, q = self.p.clone(), self.q.clone()  # of the tokens not yet refused
        taken, left = torch.zeros_like(p[:, :1]), torch.ones_like(p[:, :1])
        accept = []
        for s in range(drafts.shape[1]):
            slot, here = drafts[:, s : s + 1], alive[:, s : s + 1]
            mass = q.sum(-1, keepdim=True)
            used_up = (mass == 0) & here
            if used_up.any():  # nothing of q is left, so c no longer matters: from here drafts are uniform
                q = torch.where(used_up, (~marked(q, drafts[:, :s], alive[:, :s])).double(), q)
                taken, mass = taken.masked_fill(used_up, 0.0), q.sum(-1, keepdim=True)
            at = q.gather(-1, slot)
            rest = (p.gather(-1, slot) - taken * at).clamp(min=0.0)
            accept.append((rest * mass / (left * at)).clamp(max=1.0).nan_to_num(nan=0.0))
            taken = torch.where(here, taken + left / mass, taken)
            p, q = (law.scatter(-1, slot, torch.where(here, 0.0, law.gather(-1, slot))) for law in (p, q))
            left = torch.where(here, (p - taken * q).clamp_(min=0.0).sum(-1, keepdim=True), left)
        return Branches(in_turn(torch.cat(accept, -1), alive), lambda rows: (p - taken * q)[rows].clamp_(min=0.0))
