"""The exponent of each lane's target at a cycle: α, or on a bridge from 1 to it. Knows slots and their log p alone."""

import torch
from torch import Tensor

from smcdecode.engine.slots import Slots

__all__ = ["Exponents"]


class Exponents:
    """What power of p the particles stand under.

    Args:
        slots: say α, the cycle, and log p.
        bridge: cycles in which the exponent rises from 1 to α; 0 for α at once.
    """

    def __init__(self, slots: Slots, bridge: int) -> None:
        self.slots, self.bridge = slots, bridge

    def at(self, cycle: Tensor) -> Tensor:
        """Exponent of each lane at a cycle (lanes,): (lanes,) float64."""
        alpha = self.slots.alpha
        if not self.bridge:
            return alpha
        return 1.0 + (alpha - 1.0) * (cycle.double() / self.bridge).clamp(0.0, 1.0)

    def of(self, slots: Tensor) -> Tensor:
        """The exponent that stands in this cycle in each of some slots: (n,) float64."""
        return torch.from_numpy(self.at(self.slots.cycle).numpy()[self.slots.lane.numpy()[slots.numpy()]])

    def gain(self, before: Tensor, after: Tensor) -> Tensor:
        """From one exponent to the next every weight, finished particles' too, gains p(x_1:t)^(α_t − α_t−1): (S,)."""
        rise = (self.at(after) - self.at(before))[self.slots.lane]
        return torch.where((rise != 0) & ~self.slots.dead, rise * self.slots.log_p, 0.0)

    def finish(self) -> Tensor:
        """Where all particles of a lane are finished the exponent rises to α at once: the answer stands at α."""
        slots = self.slots
        over = slots.finished.view(slots.lanes, slots.N).all(-1)
        last = torch.where(over, slots.cycle.clamp(min=self.bridge), slots.cycle)
        increments = self.gain(slots.cycle, last)
        slots.cycle.copy_(last)
        return increments
