"""What cycles did to a request's particles, told when somebody asks. Knows steps and counts; no engine, no model."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from smcdecode.infer.smc import Step

__all__ = ["Cycle", "Seen", "told"]


@dataclasses.dataclass(frozen=True)
class Cycle:
    """What one cycle did to one request's particles; weights are those before resampling."""

    ess: float
    log_z: float  # estimate so far
    chi2: float  # 1 + χ²(p‖q) of this cycle's incremental weights, estimated
    resampled: bool
    survivors: int  # distinct first-cycle ancestors of the particles
    alive: int  # particles with positive weight
    particles: int  # N in this cycle; the other slots were idle, of weight zero
    tokens: int  # tokens of the longest particle
    ancestors: list[int]  # by slot; -1: idle from now on
    log_w: list[float]
    counts: list[int]  # tokens that each particle wrote since its ancestor's last cycle
    written: list[int]  # those tokens, particle by particle


class Seen(NamedTuple):
    """A cycle of all lanes as it was, to be told of when somebody asks."""

    step: Step
    longest: Tensor  # (G,) int64, tokens of each lane's longest particle
    counts: Tensor  # (G, N) int64, tokens that each particle wrote since its ancestor's last cycle
    written: Tensor  # (G, N, W) int64, those tokens; only the first so many mean something


def told(seen: list[Seen], lanes: list[int]) -> list[list[Cycle]]:
    """What some cycles did in some lanes, lane by lane."""

    def columns(values: Iterable[Tensor]) -> Tensor:
        return torch.stack(list(values), 1)[lanes]  # (lanes, cycles, …)

    steps = [each.step for each in seen]
    log_w = columns(s.log_w for s in steps)
    counts, news = columns(each.counts for each in seen).tolist(), [each.written[lanes].tolist() for each in seen]
    written = [
        [_heads(*cycle) for cycle in zip(*lane, strict=True)]
        for lane in zip(zip(*news, strict=True), counts, strict=True)
    ]
    table = (
        columns(s.ess for s in steps), columns(s.log_z for s in steps), columns(s.chi2 for s in steps),
        columns(s.resampled for s in steps), _distinct(columns(s.origin for s in steps)),
        (~torch.isneginf(log_w)).sum(-1), columns(s.count for s in steps), columns(each.longest for each in seen),
        columns(s.ancestors for s in steps), log_w,
    )  # fmt: skip
    lists = (*(column.tolist() for column in table), counts, written)
    return [[Cycle(*row) for row in zip(*lane, strict=True)] for lane in zip(*lists, strict=True)]


def _heads(rows: list[list[int]], counts: list[int]) -> list[int]:
    """The first so many of each row, one row behind the other."""
    return [token for row, n in zip(rows, counts, strict=True) for token in row[:n]]


def _distinct(x: Tensor) -> Tensor:
    """How many different values each row has, -1 not counted: (…, N) int64 → (…,) int64."""
    return (x.sort(-1).values.diff() != 0).sum(-1) + 1 - (x < 0).any(-1).long()
