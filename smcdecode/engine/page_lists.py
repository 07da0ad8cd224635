"""Batches as the index arrays that FlashInfer reads. Pure arithmetic on page numbers; knows no kernel, no store."""

from dataclasses import dataclass

import torch
from torch import Tensor

from smcdecode.engine.attention import Batch

__all__ = ["PageLists", "new_slots", "own_lists", "prompt_lists", "visible", "whole_lists"]


@dataclass(frozen=True)
class PageLists:
    """B requests to one attention call: which queries are theirs, and which pages they read, in order.

    A request's keys are the tokens of its pages, the last page filled up to ``last_page_len``. Under a causal mask its
    queries are the last of these tokens.

    Attributes:
        qo_indptr: (B + 1,) int32, the first packed query of each request, and how many there are.
        indptr: (B + 1,) int32, the first entry of ``indices`` of each request, and how many there are.
        indices: (n,) int32, n at least ``indptr[-1]``: pages; entries behind ``indptr[-1]`` mean nothing.
        last_page_len: (B,) int32, from 1 to the page size.
    """

    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def own_lists(batch: Batch, page_size: int) -> PageLists:
    """A request a row, over its own pages."""
    return _lists(
        batch.q_len, batch.own_pages, _held(batch.own_pages, batch.own_len, page_size), batch.own_len, page_size
    )


def whole_lists(batch: Batch, page_size: int) -> PageLists | None:
    """A request a row, over its prompt's pages and its own; None where a prompt ends inside a page."""
    if any(n % page_size for n in batch.prefix_len):
        return None
    prompts = _table(batch)[batch.group]  # (B, P)
    prefix_len = torch.tensor(batch.prefix_len)[batch.group]
    held = [_held(prompts, prefix_len, page_size), _held(batch.own_pages, batch.own_len, page_size)]
    pages = torch.cat([prompts, batch.own_pages], 1)
    return _lists(batch.q_len, pages, torch.cat(held, 1), prefix_len + batch.own_len, page_size)


def prompt_lists(batch: Batch, page_size: int) -> tuple[PageLists, Tensor]:
    """A request a group that has a prompt, over the prompt's pages; its queries are those of all its rows.

    Returns:
        The requests, and which packed queries they have: (T',) int64, ascending.
    """
    length = torch.tensor(batch.prefix_len)
    prompted = (length > 0).nonzero()[:, 0]
    q_len = torch.zeros_like(length).scatter_add_(0, batch.group, batch.q_len)
    tokens = (length > 0)[batch.group.repeat_interleave(batch.q_len)].nonzero()[:, 0]
    pages = _table(batch)[prompted]
    held = _held(pages, length[prompted], page_size)
    return _lists(q_len[prompted], pages, held, length[prompted], page_size), tokens


def visible(batch: Batch, window: int) -> Tensor | None:
    """Which prompt tokens each query sees through a sliding window, group by group, a row a query: flat bool.

    None where every query sees all of its prompt.
    """
    q_len, owner = batch.q_len, torch.arange(len(batch.q_len)).repeat_interleave(batch.q_len)
    place = torch.arange(len(owner)) - (q_len.cumsum(0) - q_len)[owner]
    prefix_len = torch.tensor(batch.prefix_len)
    at = (prefix_len[batch.group] + batch.own_len - q_len)[owner] + place  # (T,) positions
    if not ((at >= window) & (prefix_len[batch.group[owner]] > 0)).any():
        return None
    group = batch.group[owner]
    parts = [
        (torch.arange(n) > at[group == g][:, None] - window).flatten() for g, n in enumerate(batch.prefix_len) if n > 0
    ]
    return torch.cat(parts)


def new_slots(batch: Batch, page_size: int) -> Tensor:
    """Where the new tokens' keys and values go: (T,) int64, page · page_size + offset."""
    owner = torch.arange(len(batch.q_len)).repeat_interleave(batch.q_len)
    place = torch.arange(len(owner)) + (batch.own_len - batch.q_len.cumsum(0))[owner]
    return batch.own_pages[owner, place // page_size] * page_size + place % page_size


def _table(batch: Batch) -> Tensor:
    """The prompts' pages, padded: (G, P) int64."""
    return torch.nn.utils.rnn.pad_sequence(list(batch.prefix_pages), batch_first=True)


def _held(pages: Tensor, length: Tensor, page_size: int) -> Tensor:
    """Which entries of rows of pages (B, M) hold tokens, for rows of ``length`` (B,) tokens."""
    return torch.arange(pages.shape[1]) < -(-length // page_size)[:, None]


def _lists(q_len: Tensor, pages: Tensor, held: Tensor, length: Tensor, page_size: int) -> PageLists:
    zero = torch.zeros(1, dtype=torch.int64)
    indptr = torch.cat([zero, held.sum(1).cumsum(0)])
    place = indptr[:-1, None] + held.cumsum(1) - 1
    end = held.numel()  # entries that are not held gather here, and are cut off
    indices = torch.zeros(end + 1, dtype=torch.int64).scatter_(
        0, place.masked_fill(~held, end).flatten(), pages.flatten()
    )
    qo_indptr = torch.cat([zero, q_len.cumsum(0)])
    last = (length - 1) % page_size + 1
    return PageLists(qo_indptr.int(), indptr.int(), indices[:end].int(), last.int())
