"""Masks of the next position, computed on a thread while a model runs. Knows potential states; no model, no law."""

from collections.abc import Hashable, Sequence
from concurrent.futures import Executor, Future

from torch import Tensor

from smcdecode.engine.slots import Slots
from smcdecode.engine.twist import Twist

__all__ = ["Foresight", "done"]


def done(mask: Tensor) -> Future[Tensor]:
    """A mask that is at hand."""
    future: Future[Tensor] = Future()
    future.set_result(mask)
    return future


class Foresight:
    """Potential states of some slots, running ahead of them over a block that is being drafted.

    The mask of a position needs the tokens before it only, so it is computed while the model's pass for that position
    runs. One thread does everything in order, and nobody else asks the potentials anything until its results are taken.

    Args:
        worker: does one thing after the other; a thread lets the model's kernels run beside it where it leaves Python.
        slots: (n,) int64.
        ahead: whether :meth:`step` will be called, so that the slots' own states must be left as they are.
    """

    def __init__(self, worker: Executor, twist: Twist, all_slots: Slots, slots: Tensor, ahead: bool) -> None:
        here = slots.tolist()
        self.worker, self.twist = worker, twist
        self.states = twist.fork(here) if ahead else [twist.states[slot] for slot in here]
        self.texts: list[Hashable] = list(all_slots.texts(slots))

    def look(self) -> Future[Tensor]:
        """Masks where the states stand, packed (n, ⌈V/32⌉) int32."""
        return self.worker.submit(self.twist.masks, self.states, self.texts)

    def step(self, rows: Sequence[int], tokens: Sequence[int]) -> Future[Tensor]:
        """Masks after a token more in some rows, packed (n, ⌈V/32⌉) int32; the other rows' masks stay."""
        return self.worker.submit(self._step, rows, tokens)

    def _step(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        for i, token in zip(rows, tokens, strict=True):
            self.states[i] = self.twist.step(self.states[i], [token])
            self.texts[i] = (self.texts[i], token)
        return self.twist.masks(self.states, self.texts)
