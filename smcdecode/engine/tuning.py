"""What a lane's past says of its next cycle: strictness and block length. Knows verdicts and slots; no clock."""

import torch
from torch import Tensor

from smcdecode.declare.proposal import Draft
from smcdecode.declare.target import Model
from smcdecode.engine.judging import Verdict
from smcdecode.engine.slots import Slots
from smcdecode.infer.adapt import FIRST, BlockLengths
from smcdecode.infer.strictness import START, retune
from smcdecode.infer.weights import ess

__all__ = ["Tuner", "cost_of"]

_COST, _LEAST = 0.25, 0.02  # of models that tell no size; and of any, because the target scores the token too


def cost_of(draft: Draft, target: Model) -> float:
    """What one more drafted token adds to a cycle, over a cycle with none: as declared, else by the models' sizes."""
    if draft.cost is not None:
        return draft.cost
    p, q = getattr(target, "parameters", 0), getattr(draft.model, "parameters", 0)
    return max(q / p, _LEAST) if p else _COST


class Tuner:
    """Moves what a draft's declaration leaves to be found: ``strictness="auto"``, ``block="auto"``.

    Args:
        spec: the draft.
        ahead: block length where there is none; such blocks are judged at strictness 1.
        target: what judges them.
        slots: where lanes keep both numbers.
    """

    def __init__(self, spec: Draft | None, ahead: int, target: Model, slots: Slots) -> None:
        self.slots = slots
        self.strictness = (
            float(ahead > 0) if spec is None else START if spec.strictness == "auto" else float(spec.strictness)
        )
        self.block = ahead if spec is None else FIRST if spec.block == "auto" else spec.block
        self._moves_strictness = spec is not None and spec.strictness == "auto"
        moves_block = spec is not None and spec.block == "auto"
        self._lengths = BlockLengths.start(slots.lanes, cost_of(spec, target)) if spec and moves_block else None

    def open(self, lanes: Tensor) -> None:
        """Lanes (n,) begin a request."""
        self.slots.strictness[lanes] = self.strictness
        self.slots.block[lanes] = self.block
        if self._lengths is not None:
            self._lengths.forget(lanes)

    def learn(self, slots: Tensor, verdict: Verdict) -> None:
        """Take in what became of the blocks of some slots (n,)."""
        if not self._moves_strictness and self._lengths is None:
            return
        lanes, row = torch.unique(self.slots.lane[slots], return_inverse=True)
        count = _sums(row, torch.ones_like(verdict.log_p), len(lanes))
        log_w = torch.full((len(lanes), self.slots.N), -torch.inf, dtype=torch.float64)
        log_w[row, self.slots.particle[slots]] = verdict.log_w.sum(-1)
        efficiency = torch.where(torch.isneginf(log_w).all(-1), 1.0, ess(log_w) / count)
        if self._moves_strictness:
            tuned = retune(self.slots.strictness[lanes], efficiency)
            self.slots.strictness[lanes] = torch.where(count > 1, tuned, self.slots.strictness[lanes])
        if self._lengths is not None:
            kept = _sums(row, verdict.kept.double(), len(lanes))
            refused = _sums(row, verdict.refused.double(), len(lanes))
            self.slots.block[lanes] = self._lengths.learn(lanes, kept, refused, efficiency, kept / count)


def _sums(row: Tensor, values: Tensor, lanes: int) -> Tensor:
    """Sums of values (n,) by lane: (lanes,) float64."""
    return torch.zeros(lanes, dtype=torch.float64).index_add_(0, row, values)
