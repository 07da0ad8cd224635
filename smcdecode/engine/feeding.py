"""What the pass that judges a block reads, and where it scores which position. Knows slots and prompts; no model."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from smcdecode.engine.attention import Feed
from smcdecode.engine.drafting import Block
from smcdecode.engine.slots import Reading, Slots

__all__ = ["Scoring", "scoring"]

Ints = NDArray[np.int64]


class Scoring(NamedTuple):
    """A pass of R wanted rows over a block of n rows and K places."""

    feed: Feed
    row: Ints  # (n, K+1), which of the R rows scores a position, −1 for none
    i: Ints  # (R,), of each of them the row of the block,
    k: Ints  # (R,), and the position; several rows of the block may have one in common


def scoring(block: Block, slots: Slots) -> Scoring:
    """The pass over each slot's last token and its block, and before them over the prompts that are unread."""
    own = _own(block, slots)
    return own if block.prompts is None else _along(block, block.prompts, own, slots.lanes)


def _own(block: Block, slots: Slots) -> Scoring:
    """The pass without prompts: where a slot has no token yet, nobody scores position 0."""
    company = block.company
    length, end = company.length.numpy(), block.count.numpy() + ~block.ended.numpy()
    begin = (length == 0).astype(np.int64)
    width = np.arange(block.tokens.shape[1] + 1)
    fed = (width >= begin[:, None]) & (width < end[:, None])
    row = np.where(fed, fed.cumsum().reshape(fed.shape) - 1, -1)
    i, k = fed.nonzero()
    last = slots.last(company.slots).numpy()[:, None]
    tokens = torch.from_numpy(np.concatenate([last, block.tokens.numpy()], 1)[fed])
    positions = torch.from_numpy((company.before.numpy() + length - 1)[i] + k)
    q_len, own_len = (torch.from_numpy(x) for x in (end - begin, length - 1 + end))
    if not q_len.numpy().all():
        some = torch.from_numpy(np.flatnonzero(q_len.numpy()))
        company, q_len, own_len = company.some(some), q_len[some], own_len[some]
    return Scoring(Feed(tokens, positions, company.batch(q_len, own_len), torch.arange(len(tokens))), row, i, k)


def _along(block: Block, prompts: Reading, own: Scoring, lanes: int) -> Scoring:
    """The same pass behind some prompts: the law behind a prompt is that of position 0 of all its slots."""
    prompt = np.full(lanes, -1)
    prompt[prompts.lanes.numpy()] = np.arange(len(prompts.lanes))
    fresh = np.flatnonzero(block.company.length.numpy() == 0)
    behind = prompt[block.company.lane.numpy()[fresh]]
    row = np.where(own.row < 0, own.row, own.row + len(prompts.lanes))
    row[fresh, 0] = behind
    first = fresh[np.unique(behind, return_index=True)[1]]  # a slot of each prompt
    i, k = np.concatenate([first, own.i]), np.concatenate([np.zeros_like(first), own.k])
    return Scoring(prompts.feed.before(own.feed), row, i, k)
