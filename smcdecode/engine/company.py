"""Slots that go through the passes of a block together, and the prompts they share. Knows page numbers; no model.

What a pass attends to is mostly the same for every pass of a block: it is looked up once, when the block has its pages.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from smcdecode.engine.attention import Batch
from smcdecode.engine.slots import Slots

__all__ = ["Company", "Feed"]


class Feed(NamedTuple):
    """What a pass reads: packed tokens (T,), their positions (T,), what they attend to, and the rows wanted of it."""

    tokens: Tensor
    positions: Tensor
    batch: Batch
    rows: Tensor


@dataclasses.dataclass(frozen=True)
class Company:
    """Some slots as they stood before a block, rows ordered by lane.

    Attributes:
        slots: (n,) int64.
        length: (n,) int64, own tokens of each.
        before: (n,) int64, tokens of the prompt before them: own token j stands at position ``before + j``.
        pages: (n, M) int64, the pages of each.
        group: (n,) int64, which of the prompts below precedes each.
        prefix_pages: see :class:`~smcdecode.engine.attention.Batch`.
        prefix_len: see there.
    """

    slots: Tensor
    length: Tensor
    before: Tensor
    pages: Tensor
    group: Tensor
    prefix_pages: tuple[Tensor, ...]
    prefix_len: tuple[int, ...]

    @classmethod
    def of(cls, every: Slots, slots: Tensor) -> "Company":
        """The company of ``slots`` (n,), which have the pages of what is to be written."""
        lane = every.lane[slots]
        lanes, group = torch.unique_consecutive(lane, return_inverse=True)
        here = lanes.tolist()
        before = every.prefix_len[lane]
        most = int(every.table.used[slots].max()) if len(slots) else 0
        return cls(
            slots, every.length[slots], before, every.table.rows[slots, :most], group,
            tuple(every.prefix[g] for g in here), tuple(every.prefix_len[lanes].tolist()),
        )  # fmt: skip

    def some(self, rows: Tensor) -> "Company":
        """That of some rows, (m,) int64 ascending."""
        groups, group = torch.unique_consecutive(self.group[rows], return_inverse=True)
        here = groups.tolist()
        return Company(
            self.slots[rows], self.length[rows], self.before[rows], self.pages[rows], group,
            tuple(self.prefix_pages[g] for g in here), tuple(self.prefix_len[g] for g in here),
        )  # fmt: skip

    def batch(self, q_len: Tensor, own_len: Tensor) -> Batch:
        """What a pass over the last ``q_len`` (n,) of the first ``own_len`` (n,) own tokens attends to."""
        return Batch(q_len, self.pages, own_len, self.group, self.prefix_pages, self.prefix_len)

    def unread(self, tokens: Tensor, lag: Tensor) -> Feed:
        """A pass over the last ``lag`` (n,) of the own tokens, rows of ``tokens`` (S, T): the last row of each."""
        end = lag.cumsum(0)
        owner = torch.arange(len(lag)).repeat_interleave(lag)
        place = (self.length - end)[owner] + torch.arange(len(owner))
        return Feed(tokens[self.slots[owner], place], self.before[owner] + place, self.batch(lag, self.length), end - 1)

    def behind(self, drafted: Tensor) -> Feed:
        """A pass over the last of some tokens ``drafted`` (n, k ≥ 1) behind the own ones."""
        own_len = self.length + drafted.shape[1]
        ones, rows = self._alone
        return Feed(drafted[:, -1], self.before + own_len - 1, self.batch(ones, own_len), rows)

    @functools.cached_property
    def _alone(self) -> tuple[Tensor, Tensor]:
        """One token a row: how many, and which."""
        return torch.ones_like(self.slots), torch.arange(len(self.slots))
