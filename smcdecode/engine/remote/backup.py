"""Blocks for misses that need no model, computed alike by both processes. Knows texts and their laws; no model."""

import dataclasses
import math

import torch
from torch import Tensor

from smcdecode.declare.proposal import PromptLookup
from smcdecode.engine.drafting import Stream
from smcdecode.engine.draw import draw
from smcdecode.engine.remote.messages import Backup
from smcdecode.engine.slots import Slots
from smcdecode.infer import lookup

__all__ = ["LOOKUP", "Backed", "backed"]

LOOKUP = PromptLookup(2)


@dataclasses.dataclass(frozen=True)
class Backed:
    """Blocks of n slots."""

    tokens: Tensor  # (n, K) int64
    count: Tensor  # (n,) int64, how many of them
    laws: Tensor  # (n, K, V) float32 log q that each was drawn from


def backed(kind: Backup, slots: Slots, which: Tensor, K: int, is_eos: Tensor) -> Backed:
    """The blocks that are verified where none were prepared: as far as there is room, none behind the end of a text.

    Args:
        kind: LOOKUP, drawn from the law of :data:`LOOKUP` as far as the text recurs, or UNIFORM, of law 1/V.
        slots: texts, and the uniforms of the cycle's drafts.
        which: (n,) int64, slots that want a block.
        K: most tokens.
        is_eos: (V,) bool.
    """
    u = slots.uniform(which[:, None], torch.arange(K), Stream.DRAFT)
    most = torch.from_numpy(slots.left(which)).clamp(max=K)
    block = _uniform(u, most, len(is_eos)) if kind == Backup.UNIFORM else _looked_up(slots, which, u, most, len(is_eos))
    ends = is_eos[block.tokens] & (torch.arange(K) < block.count[:, None])
    return dataclasses.replace(block, count=torch.where(ends.any(1), ends.int().argmax(1) + 1, block.count))


def _uniform(u: Tensor, most: Tensor, size: int) -> Backed:
    return Backed((u * size).long(), most, torch.tensor(-math.log(size)).expand(*u.shape, size))


def _looked_up(slots: Slots, which: Tensor, u: Tensor, most: Tensor, size: int) -> Backed:
    block = Backed(torch.zeros(u.shape, dtype=torch.int64), torch.zeros_like(most), torch.zeros(*u.shape, size))
    going = (most > 0).nonzero()[:, 0]
    for k in range(u.shape[1]):
        if not len(going):
            break
        text = slots.contexts(which[going], block.tokens[going, :k])
        known, law = lookup.law(text, LOOKUP.ngram, LOOKUP.floor, size)
        if not len(known):
            break
        going = going[known]
        tokens, norm = draw(law, u[going, k])
        block.tokens[going, k], block.count[going] = tokens, k + 1
        block.laws[going, k] = law - norm[:, None].float()
        going = going[most[going] > k + 1]
    return block
