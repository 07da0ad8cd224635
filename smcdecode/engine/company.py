"""Slots that go through the passes of a block together, and the prompts they share. Knows page numbers; no model.

What a pass attends to is mostly the same for every pass of a block: it is looked up once, when the block has its pages.
"""

import dataclasses
import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcdecode.engine.attention import Batch, Feed
from smcdecode.engine.pages import Numbers
from smcdecode.engine.slots import Slots

__all__ = ["Company"]


@dataclasses.dataclass(frozen=True)
class Company:
    """Some slots as they stood before a block, rows ordered by lane.

    Attributes:
        slots: (n,) int64.
        lane: (n,) int64, of each.
        length: (n,) int64, own tokens of each.
        before: (n,) int64, tokens of the prompt before them: own token j stands at position ``before + j``.
        pages: (n, M) int64, the pages of each.
        group: (n,) int64, which of the prompts below precedes each.
        prefix_pages: see :class:`~smcdecode.engine.attention.Batch`.
        prefix_len: see there.
    """

    slots: Tensor
    lane: Tensor
    length: Tensor
    before: Tensor
    pages: Tensor
    group: Tensor
    prefix_pages: tuple[Tensor, ...]
    prefix_len: tuple[int, ...]

    @classmethod
    def of(cls, every: Slots, slots: Tensor) -> "Company":
        """The company of ``slots`` (n,), which have the pages of what is to be written."""
        at = slots.numpy()
        lane = every.lane.numpy()[at]
        here, group = _grouped(lane)
        prefix_len = every.prefix_len.numpy()
        most = int(every.table.used.numpy()[at].max(initial=0))
        return cls(
            slots, torch.from_numpy(lane), torch.from_numpy(every.length.numpy()[at]),
            torch.from_numpy(prefix_len[lane]), torch.from_numpy(every.table.rows.numpy()[at, :most]),
            torch.from_numpy(group),
            tuple(every.prefix[g] for g in here.tolist()), tuple(prefix_len[here].tolist()),
        )  # fmt: skip

    def some(self, rows: Tensor) -> "Company":
        """That of some rows, (m,) int64 ascending."""
        groups, group = _grouped(self.group.numpy()[rows.numpy()])
        here = groups.tolist()
        return Company(
            self.slots[rows], self.lane[rows], self.length[rows], self.before[rows], self.pages[rows],
            torch.from_numpy(group), tuple(self.prefix_pages[g] for g in here), tuple(self.prefix_len[g] for g in here),
        )  # fmt: skip

    def batch(self, q_len: Tensor, own_len: Tensor) -> Batch:
        """What a pass over the last ``q_len`` (n,) of the first ``own_len`` (n,) own tokens attends to."""
        return Batch(q_len, self.pages, own_len, self.group, self.prefix_pages, self.prefix_len, self.lane)

    def unread(self, tokens: Tensor, lag: Numbers) -> Feed:
        """A pass over the last ``lag`` (n,) of the own tokens, rows of ``tokens`` (S, T): the last row of each."""
        each = np.asarray(lag)
        end = each.cumsum()
        owner = np.arange(len(each)).repeat(each)
        place = (self.length.numpy() - end)[owner] + np.arange(len(owner))
        read, positions = tokens.numpy()[self.slots.numpy()[owner], place], self.before.numpy()[owner] + place
        rows = torch.from_numpy(end - 1)
        return Feed(
            torch.from_numpy(read), torch.from_numpy(positions), self.batch(torch.as_tensor(lag), self.length), rows
        )

    def behind(self, drafted: Tensor) -> Feed:
        """A pass over the last of some tokens ``drafted`` (n, k ≥ 1) behind the own ones."""
        own_len = self.length.numpy() + drafted.shape[1]
        positions = torch.from_numpy(self.before.numpy() + own_len - 1)
        ones, rows = self._alone
        return Feed(drafted[:, -1], positions, self.batch(ones, torch.from_numpy(own_len)), rows)

    @functools.cached_property
    def _alone(self) -> tuple[Tensor, Tensor]:
        """One token a row: how many, and which."""
        return torch.ones_like(self.slots), torch.arange(len(self.slots))


def _grouped(of: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The different values of something nondecreasing, and which of them each item has."""
    new = np.ones(len(of), dtype=bool)
    new[1:] = of[1:] != of[:-1]
    return of[new], new.cumsum() - 1
