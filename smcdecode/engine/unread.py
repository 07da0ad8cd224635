"""Prompts that wait for the next pass, to be read along with a block. Knows readings; no particle.

A pass costs its weights' way through the caches, however few rows it has: a short prompt is best read by a pass that is
needed anyway. Its particles then guess their first tokens before their law is known, as any others.
"""

import torch

from smcdecode.engine.passes import Passes
from smcdecode.engine.slots import Reading

__all__ = ["Unread"]

_ALONG = 128  # most tokens of pieces kept for other prompts that wait: more of them fill a pass by themselves


class Unread:
    """What of some prompts nobody has read.

    Whether a prompt's ending waits does not depend on other requests; where the pieces before it are read changes no
    bit of them, but they are read before anybody else counts on them.
    """

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._reading: Reading | None = None

    def __bool__(self) -> bool:
        return self._reading is not None

    @property
    def lanes(self) -> torch.Tensor:
        """Whose prompts they are: (n,) int64."""
        return torch.empty(0, dtype=torch.int64) if self._reading is None else self._reading.lanes

    def add(self, reading: Reading) -> None:
        """Some prompts more; what these may begin with is read first."""
        if self._reading is not None:
            self._reading = self._without_kept(self._reading)
            lanes = torch.cat([self._reading.lanes, reading.lanes])
            reading = Reading(reading.kept, self._reading.ending.before(reading.ending), lanes)
        kept = reading.kept
        self._reading = self._without_kept(reading) if kept is not None and len(kept.tokens) > _ALONG else reading

    def take(self) -> Reading | None:
        """All of them, for the pass that is about to run."""
        reading, self._reading = self._reading, None
        return reading

    def _without_kept(self, reading: Reading) -> Reading:
        """The endings, once the pieces before them are read."""
        if reading.kept is not None:
            with self.passes.stats.clock("prefill"):
                self.passes.target(*reading.kept)
        return reading._replace(kept=None)
