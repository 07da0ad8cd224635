"""A run as a tree of text: who descended from whom, with which weight. Knows records; nothing of how it is drawn.

Particles of one parent that wrote the same tokens in a cycle have the same text and are one *cell* of that cycle; its
weight is the sum of theirs. Cells that follow each other without a branch are one *node*: a stretch of text.
"""

import codecs
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from smcdecode.engine.scheduler import Cycle
from smcdecode.report.record import Record

__all__ = ["Node", "tree"]

End = Literal["branch", "answer", "replaced", "died"]
Floats = NDArray[np.float64]
Reader = Callable[[Sequence[int], bytes, bool], tuple[str, bytes]]
ROOT = -1  # the parent of texts that begin


@dataclasses.dataclass
class Node:
    """A stretch of text without a branch; every list has an entry a cycle, from cycle ``first`` (counted from 0) on."""

    parent: int  # number of the node it continues; −1 for the prompt
    first: int
    share: float  # weight its particles carried into cycle ``first``, of all; before (4), after resampling
    tokens: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    pieces: list[str] = dataclasses.field(default_factory=list)  # their text; of a model without a tokenizer, the ids
    weight: list[float] = dataclasses.field(default_factory=list)  # before resampling; those of a cycle sum to one
    gain: list[float] = dataclasses.field(default_factory=list)  # log weight increment, over that of the cycle's mean
    particles: list[int] = dataclasses.field(default_factory=list)
    deaths: list[int] = dataclasses.field(default_factory=list)  # which of ``record.deaths`` happened here
    end: End = "branch"
    mass: float = 0.0  # weight of the answers that descend from it

    @property
    def last(self) -> int:
        """Its last cycle."""
        return self.first + len(self.tokens) - 1


@dataclasses.dataclass
class _Cell:
    parent: int  # number of the cell of the cycle before; −1 in the first
    cycle: int
    tokens: tuple[int, ...]
    members: list[int]  # particles
    share: float = 0.0
    weight: float = 0.0
    gain: float = 0.0
    deaths: list[int] = dataclasses.field(default_factory=list)
    children: list[int] = dataclasses.field(default_factory=list)


def tree(record: Record) -> list[Node]:
    """The genealogy of a run: depth first, siblings by the weight of their answers.

    Texts that were replaced at a resampling or died are in it too, to their last token.
    """
    cells = _cells(record)
    roots = [i for i, cell in enumerate(cells) if cell.parent == ROOT]
    mass = _masses(cells, len(record.steps) - 1)
    reader = _reader(record)
    nodes: list[Node] = []
    waiting = [(i, ROOT, b"") for i in reversed(_sorted(roots, cells, mass))]
    while waiting:
        at, parent, pending = waiting.pop()
        node = Node(parent, cells[at].cycle, cells[at].share, mass=mass[at])
        nodes.append(node)
        last, pending = _fill(node, at, cells, reader, pending)
        node.end = _end(cells[last], len(record.steps) - 1)
        children = _sorted(cells[last].children, cells, mass)
        waiting += [(i, len(nodes) - 1, pending) for i in reversed(children)]
    return nodes


def _fill(node: Node, at: int, cells: list[_Cell], reader: Reader, pending: bytes) -> tuple[int, bytes]:
    """Put the cells from ``at`` on that follow without a branch into a node; the last of them, and bytes left over."""
    while True:
        cell = cells[at]
        piece, pending = reader(cell.tokens, pending, not cell.children)
        node.tokens.append(cell.tokens)
        node.pieces.append(piece)
        node.weight.append(cell.weight)
        node.gain.append(cell.gain)
        node.particles.append(len(cell.members))
        node.deaths += cell.deaths
        if len(cell.children) != 1:
            return at, pending
        at = cell.children[0]


def _cells(record: Record) -> list[_Cell]:
    """All cells, cycle by cycle. A particle of weight zero has one in the cycle of its death, and none from then on."""
    cells: list[_Cell] = []
    slots = len(record.steps[0].counts) if record.steps else 0
    home = [ROOT] * slots  # the cell that each slot's particle comes from
    died = {(death.cycle, death.particle): d for d, death in enumerate(record.deaths)}
    carried, log_z = _even(np.arange(slots) < record.steps[0].particles if slots else np.zeros(0, bool)), 0.0
    for c, step in enumerate(record.steps):
        log_w = np.array(step.log_w[:slots])
        found: dict[tuple[int, tuple[int, ...]], int] = {}
        for i, tokens in enumerate(_written(step)):
            if carried[i] == -np.inf:
                continue
            key = (home[i], tokens)
            if key not in found:
                found[key] = len(cells)
                cells.append(_Cell(home[i], c, tokens, []))
                if home[i] != ROOT:
                    cells[home[i]].children.append(found[key])
            cells[found[key]].members.append(i)
            if (c, i) in died:
                cells[found[key]].deaths.append(died[c, i])
            home[i] = found[key]
        for cell in (cells[i] for i in found.values()):
            _weigh(cell, log_w, carried, step.log_z - log_z)
        ancestors = step.ancestors[:slots]
        home = [home[a] if a >= 0 else ROOT for a in ancestors]
        carried, log_z = _even(np.array(ancestors) >= 0) if step.resampled else log_w, step.log_z
    return cells


def _even(held: NDArray[np.bool_]) -> Floats:
    """Log-weights after a resampling: equal, and zero weight where no particle stands."""
    return np.where(held, 0.0, -np.inf)


def _written(step: Cycle) -> Iterator[tuple[int, ...]]:
    """The tokens each particle wrote in a cycle."""
    end = 0
    for count in step.counts:
        yield tuple(step.written[end : end + count])
        end += count


def _weigh(cell: _Cell, log_w: Floats, carried: Floats, mean: float) -> None:
    own, before = _log_sum(log_w[cell.members]), _log_sum(carried[cell.members])
    total = _log_sum(log_w)
    cell.weight = math.exp(own - total) if own > -math.inf else 0.0
    cell.share = math.exp(before - _log_sum(carried))
    cell.gain = own - before - mean if own > -math.inf else -math.inf


def _log_sum(x: Floats) -> float:
    """Log of the sum of exponentials."""
    return float(np.logaddexp.reduce(x))


def _masses(cells: list[_Cell], last: int) -> list[float]:
    """For each cell the weight of the answers that descend from it."""
    mass = [cell.weight if cell.cycle == last else 0.0 for cell in cells]
    for i in range(len(cells) - 1, -1, -1):
        if cells[i].parent != ROOT:
            mass[cells[i].parent] += mass[i]
    return mass


def _sorted(those: list[int], cells: list[_Cell], mass: list[float]) -> list[int]:
    """Cells of one parent: the most weight among the answers first, then the most weight at once."""
    return sorted(those, key=lambda i: (-mass[i], -cells[i].weight, cells[i].tokens))


def _end(cell: _Cell, last: int) -> End:
    if cell.children:
        return "branch"
    if cell.gain == -math.inf:
        return "died"
    return "answer" if cell.cycle == last else "replaced"


def _reader(record: Record) -> Reader:
    """How ids become text, a block at a time: bytes of a character that is unfinished are carried to the next block."""
    spelling = record.spelling

    def ids(tokens: Sequence[int], pending: bytes, final: bool) -> tuple[str, bytes]:  # noqa: ARG001  nothing is left
        return "".join(f"{i} " for i in tokens), b""

    def text(tokens: Sequence[int], pending: bytes, final: bool) -> tuple[str, bytes]:
        assert spelling is not None
        data = pending + b"".join([spelling[i] for i in tokens])
        read, used = codecs.utf_8_decode(data, "replace", final)
        return read, data[used:]

    return ids if spelling is None else text
