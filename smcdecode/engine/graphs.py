"""Cycles recorded as CUDA graphs and replayed; plain calls where there is no GPU. Knows buffers, no law, no particle.

A graph is recorded for each of a few numbers of lanes, over the first lanes of one state. The first cycle of a size
runs as it is, which lets every library compile and plan what it needs; the second is recorded. What the host reads of a
cycle is copied to pinned memory behind it, so that the next one can begin before anybody has looked.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from smcdecode.engine.fixed.state import State
from smcdecode.errors import InvalidOption

__all__ = ["Pending", "Recorder", "bucket_of"]


def bucket_of(lanes: int, most: int) -> int:
    """The size that a cycle of some lanes runs at: a power of two, or ``most``."""
    return min(1 << (lanes - 1).bit_length(), most)


@dataclasses.dataclass(frozen=True)
class Pending:
    """The report of a cycle that may still run."""

    numbers: Tensor
    event: torch.cuda.Event | None

    def read(self) -> Tensor:
        """Wait for the cycle, and read its report."""
        if self.event is not None:
            self.event.synchronize()
        return self.numbers


class Recorder:
    """Runs cycles of the first lanes of a state.

    Args:
        cycle: what to do to a state; the same work whatever its numbers are.
        state: the buffers.
    """

    def __init__(self, cycle: Callable[[State], None], state: State) -> None:
        self.cycle, self.state = cycle, state
        self._states: dict[int, State] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._turn = 0
        on_gpu = state.device.type == "cuda"
        self._pinned = [
            torch.empty(state.report.shape, dtype=torch.float64, pin_memory=True) for _ in range(2 * on_gpu)
        ]

    def run(self, lanes: int) -> Pending:
        """Begin one cycle of at least the first ``lanes`` lanes."""
        size = bucket_of(lanes, self.state.lanes)
        fresh = size not in self._states
        state = self._states.setdefault(size, self.state.first(size))
        if not self._pinned:
            self.cycle(state)
            return Pending(state.report.cpu().clone(), None)
        with torch.cuda.device(state.device):
            if fresh:
                self._aside(state)
            else:
                if size not in self._graphs:
                    self._graphs[size] = self._record(state)
                self._graphs[size].replay()
            return self._copy(state)

    def _aside(self, state: State) -> None:
        """A cycle as it is, on a stream of its own, as recording asks of the one before."""
        here, aside = torch.cuda.current_stream(state.device), torch.cuda.Stream(state.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            self.cycle(state)
        here.wait_stream(aside)

    def _record(self, state: State) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.cycle(state)
        except RuntimeError as error:
            raise InvalidOption(
                f"the cycle cannot be recorded as a CUDA graph ({error}): "
                "load the target by smc.load(…, graphs=False), which runs it step by step"
            ) from error
        return graph

    def _copy(self, state: State) -> Pending:
        self._turn = 1 - self._turn
        numbers = self._pinned[self._turn][: state.lanes]
        numbers.copy_(state.report, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(state.device))
        return Pending(numbers, event)
