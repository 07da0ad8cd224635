"""Which backup and which C a cycle uses, from what was measured. Knows times, rates and laws; no process.

Only ``"auto"`` looks at clocks. With a fixed choice a cycle is a function of the request alone.
"""

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from smcdecode.engine.remote.messages import Answer, Backup
from smcdecode.infer.saguaro import foreseen
from smcdecode.infer.speculation import batch_speedup, crossover, emitted

__all__ = ["BACKUPS", "Mean", "Tuning"]

BACKUPS = {"redraft": Backup.REDRAFT, "lookup": Backup.LOOKUP, "uniform": Backup.UNIFORM}
SHARES = torch.tensor([1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1], dtype=torch.float64)
_MEMORY = 0.9  # share of a mean that stays when a number comes in
_FEW = 8  # cycles before anything is decided
_LOOKED_AT = 4  # rows of a block whose laws are compared


@dataclasses.dataclass
class Mean:
    """A mean that forgets slowly."""

    value: float = 0.0
    count: int = 0

    def add(self, x: float) -> None:
        """Take a number in."""
        self.count += 1
        weight = max(1.0 / self.count, 1.0 - _MEMORY)
        self.value += weight * (x - self.value)


class Tuning:
    """What is measured of a run, and the choices that follow.

    Args:
        block: K.
        backup: fixed, or "auto": re-drafting below the batch size b* at which a lookup becomes the better backup.
        share: C of σ_{F,C}, or "auto": the one with the best predicted speed.
    """

    def __init__(self, block: int, backup: str, share: float | Literal["auto"]) -> None:
        self.block, self._backup, self._share = block, backup, share
        self.share = 1.0 if share == "auto" else share
        self.target, self.prepared, self.redrafted = Mean(), Mean(), Mean()  # seconds
        self.hit, self.accepted = Mean(), Mean()
        self.looked_up = Mean()  # probability that the target gives to what a lookup guesses
        self.kept = [Mean() for _ in SHARES]
        self.foreseen = [Mean() for _ in SHARES]
        self._heard_at: float | None = None

    def asked(self, now: float) -> None:
        """The target asks for blocks: what passed since it got the last ones was its own time."""
        if self._heard_at is not None:
            self.target.add(now - self._heard_at)

    def heard(self, answer: Answer, hits: float, now: float) -> None:
        """An answer came, with such a share of hits."""
        self._heard_at = now
        self.hit.add(hits)
        if answer.prepared:
            self.prepared.add(answer.prepared)
        if answer.redrafted:
            self.redrafted.add(answer.redrafted)

    # ---- choices

    def backup(self, batch: int) -> Backup:
        """The backup of the next cycle, for so many sequences together (Theorem 17)."""
        if self._backup != "auto":
            return BACKUPS[self._backup]
        if min(self.target.count, self.redrafted.count, self.looked_up.count) < _FEW:
            return Backup.REDRAFT
        return Backup.LOOKUP if batch >= self.switch else Backup.REDRAFT

    @property
    def switch(self) -> float:
        """The batch size b* from which a lookup is the better backup, by what was measured."""
        hit = min(max(self.hit.value, 0.01), 0.99)
        good = emitted(self.accepted.value, self.block)
        poor = hit * good + (1 - hit) * emitted(self.looked_up.value, self.block)
        return crossover(hit, (good, self.redrafted.value / self.target.value), (poor, 0.0))

    def compare(self, p: Tensor, q: Tensor, top: Tensor | None) -> None:
        """Laws of some drafted positions, for the choice of C.

        Args:
            p: (n, V) float64, of the target.
            q: (n, V) float64, of the draft, as drawn from at the C of then.
            top: (n, F) int64, the tokens that were down-weighted; None at C = 1, where they are q's likeliest.
        """
        p, q = p[:_LOOKED_AT], q[:_LOOKED_AT]
        self.accepted.add(float(torch.minimum(p, q).sum(-1).mean()))
        if self._share != "auto":
            return
        if top is None:
            top = q.topk(min(4, q.shape[-1] - 1)).indices
        else:
            top = top[:_LOOKED_AT]
            q = q.scatter(-1, top, q.gather(-1, top) / self.share)
            q = q / q.sum(-1, keepdim=True)
        kept, seen = foreseen(p, q, top, SHARES)
        for i in range(len(SHARES)):
            self.kept[i].add(float(kept[i].mean()))
            self.foreseen[i].add(float(seen[i].mean()))
        if self.kept[0].count >= _FEW and self.target.count >= _FEW:
            self.share = float(SHARES[int(torch.tensor([self._speed(i) for i in range(len(SHARES))]).argmax())])

    @property
    def measures(self) -> bool:
        """Whether anything is chosen by measurements."""
        return "auto" in (self._backup, self._share)

    def _speed(self, i: int) -> float:
        """Predicted tokens a target pass at the i-th C (Theorem 7)."""
        kept = self.kept[i].value
        tokens, whole = emitted(kept, self.block), kept**self.block
        hit = (1 - whole) * self.foreseen[i].value + whole * self.foreseen[0].value
        draft = (self.redrafted if self.redrafted.count else self.prepared).value / self.target.value
        return batch_speedup(hit, tokens, tokens, prepare=self.prepared.value / self.target.value, backup=draft)
