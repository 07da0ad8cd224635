"""How far a draft's laws are from the target's, behind one frozen head. Knows hidden states and the head; no model."""

import dataclasses

import torch
from torch import Tensor

__all__ = ["Agreement", "compare", "divergence", "subset"]


def subset(frequency: Tensor, likely: int, others: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids that stand for the whole vocabulary: the most frequent, and a few of the others drawn for all of them.

    A step of training that looks at these only costs a fraction of one over the whole vocabulary; the few others are
    weighted by how many each stands for, so that sums of probabilities are estimated without bias.

    Args:
        frequency: (V,) float32, how often each id is expected.
        likely: ids always taken.
        others: ids drawn.
        generator: of the draw.

    Returns:
        (m,) int64 ids, and the log of how many ids each stands for, (m,) float32.
    """
    order = frequency.argsort(descending=True, stable=True)
    rest = order[likely:]
    if len(rest) <= others:
        return order, torch.zeros(len(order))
    drawn = rest[torch.randperm(len(rest), generator=generator)[:others]]
    log_share = torch.zeros(likely + others)
    log_share[likely:] = torch.tensor(len(rest) / others).log()
    return torch.cat([order[:likely], drawn]), log_share


def divergence(hidden: Tensor, teacher: Tensor, head: Tensor, log_share: Tensor) -> Tensor:
    """KL(p‖q) averaged over positions, with p and q the laws that a head makes of two hidden states.

    Args:
        hidden: (n, d) of the draft; the gradient goes here.
        teacher: (n, d) of the target.
        head: (m, d) rows of the frozen head, for the ids looked at.
        log_share: (m,) float32, see :func:`subset`.
    """
    value: Tensor = _Divergence.apply(hidden, teacher, head, log_share)  # type: ignore[no-untyped-call]
    return value


class _Divergence(torch.autograd.Function):
    """The gradient in the draft's logits is q − p: nothing of the size of the laws is kept for the way back."""

    @staticmethod
    def forward(ctx: "torch.autograd.function.FunctionCtx", *inputs: Tensor) -> Tensor:
        hidden, teacher, head, log_share = inputs
        log_q, log_p = (
            torch.addmm(log_share.to(head.dtype), x.to(head.dtype), head.T).float().log_softmax(-1)
            for x in (hidden, teacher)
        )
        p = log_p.exp()
        value = (p * (log_p - log_q)).sum() / len(p)
        ctx.save_for_backward(((log_q.exp_() - p) / len(p)).to(head.dtype) @ head)
        return value

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * slope, None, None, None


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How well q serves as a draft for p on text that p wrote.

    Attributes:
        acceptance: 1 − TV(p, q), mean over positions: how often lossless verification keeps a token of q.
        chi2: χ²(p‖q), median over positions: it rules how weights scatter at strictness 0.
        kl: KL(p‖q), mean over positions, nats.
    """

    acceptance: float
    chi2: float
    kl: float

    @classmethod
    def of(cls, numbers: Tensor) -> "Agreement":
        """From what :func:`compare` says of each position, (n, 3)."""
        return cls(float(numbers[:, 0].mean()), float(numbers[:, 1].median()), float(numbers[:, 2].mean()))

    def __str__(self) -> str:
        return f"acceptance {self.acceptance:.3f}, χ² {self.chi2:.3g}, KL {self.kl:.3f}"


def compare(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1 − TV, χ²(p‖q) and KL(p‖q) at each position, (n, 3) float64, of two (n, V) log-laws."""
    log_p, log_q = log_p.double(), log_q.double()
    p, ratio = log_p.exp(), (log_p - log_q).masked_fill(torch.isneginf(log_p), 0.0)
    both = torch.minimum(p, log_q.exp()).sum(-1)
    return torch.stack([both, (p * ratio.exp()).sum(-1) - 1, (p * ratio).sum(-1)], -1)
