"""Knows how a potential weighs regions of a text, found by their delimiters; not what the potential is.

Delimiters are found byte by byte, so they may be split over tokens, and a token may hold the end of one and the
beginning of what it delimits. The inner potential reads a vocabulary that can spell: the model's tokens and, behind
them, the 256 single bytes.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from smcdecode.errors import InvalidOption
from smcdecode.potentials.delimiter import Delimiter, Search
from smcdecode.potentials.lexicon import with_bytes
from smcdecode.potentials.potential import BasePotential, Potential, Product, State, allowed, evaluate
from smcdecode.potentials.reading import FunctionPotential
from smcdecode.potentials.text import Prompt
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["Delimited"]

Row = NDArray[np.bool_]

_MOST_SETTINGS = 32  # prompts whose preparations are kept


@dataclass(frozen=True)
class Setting:
    """What all texts of one vocabulary and prompt share."""

    vocabulary: Vocabulary
    prompt: Prompt
    tokens: tuple[bytes, ...]  # of the vocabulary and the 256 single bytes
    first: State  # of the inner potential, nothing read
    opening: Search
    closing: Search | None
    rows: dict[int, Row] = field(default_factory=dict)  # seen bytes of the opening → (V,) bool
    begun: dict[bytes, bool] = field(default_factory=dict)  # first bytes of a region → whether they can go on


@dataclass
class Place:
    """Where a text stands: outside, with ``seen`` bytes of the opening; or inside a region.

    Inside, ``contents[n]`` is the inner state of the region's content if its last n bytes belong to the closing
    delimiter; ``contents[0]`` has read all of it.
    """

    setting: Setting = field(repr=False)
    inside: bool = False
    seen: int = 0
    contents: dict[int, State] = field(default_factory=dict)
    regions: int = 0  # opened so far
    total: float = 0.0  # log Ψ of the regions that were closed and asked about
    closed: list[State] = field(default_factory=list)  # the others


class Delimited(BasePotential):
    """Free text, in which delimiters open regions that the inner potential weighs."""

    def __init__(
        self, opening: str | bytes, closing: str | bytes | None, psi: Potential, required: bool, name: str
    ) -> None:
        if not isinstance(psi, Potential):
            raise InvalidOption(f"{name}: a potential is wanted, such as smc.Grammar(…); got {psi!r}")
        if _reads_ids(psi):
            raise InvalidOption(
                f"{name}: {psi.name!r} reads ids, but a region can begin inside a token; let it read text"
            )
        self.psi, self.required, self.name = psi, required, f"{name}: {psi.name}"
        self.opening = Delimiter(opening)
        self.closing = None if closing is None else Delimiter(closing)
        self._settings: OrderedDict[tuple[Any, ...], Setting] = OrderedDict()

    # ---- the protocol

    def start(self, vocabulary: Vocabulary, prompt: Prompt) -> Place:
        """Outside, nothing seen."""
        key = (id(vocabulary), *prompt.key())
        if key not in self._settings:  # which then keeps vocabulary and prompt alive, and so the key unique
            self._settings[key] = self._setting(vocabulary, prompt)
        self._settings.move_to_end(key)
        if len(self._settings) > _MOST_SETTINGS:
            self._settings.popitem(last=False)
        return Place(self._settings[key])

    def advance(self, state: Place, tokens: Sequence[int]) -> Place:
        """Read some tokens."""
        for token in tokens:
            self._read(state, int(token))
        return state

    def fork(self, state: Place) -> Place:
        """A copy, with copies of the inner states."""
        contents = {n: self.psi.fork(content) for n, content in state.contents.items()}
        return replace(state, contents=contents, closed=list(state.closed))

    def log_psi(self, states: Sequence[Place], complete: Sequence[bool]) -> list[float]:
        """The sum over regions of log Ψ of their contents, the open one's ψ_t; −inf where a region is missing."""
        self._settle(states)
        asked = [self._questions(place, done) for place, done in zip(states, complete, strict=True)]
        flat = [question for questions in asked for question in questions]
        values = iter(evaluate(self.psi, [s for s, _ in flat], [done for _, done in flat]).tolist())
        best = [max([next(values) for _ in questions], default=0.0) for questions in asked]
        return [
            -math.inf if done and self._lacking(place) else place.total + value
            for place, done, value in zip(states, complete, best, strict=True)
        ]

    def mask(self, states: Sequence[Place]) -> torch.Tensor:
        """The tokens that may follow, (n, V) bool."""
        inside = [place for place in states if place.inside]
        size = len(states[0].setting.tokens)
        found = allowed(self.psi, [place.contents[0] for place in inside], size) if inside else None
        inner = iter([None] * len(inside) if found is None else found.numpy())
        rows = [self._mask_inside(p, next(inner)) if p.inside else self._mask_outside(p) for p in states]
        return torch.from_numpy(np.stack(rows))

    # ---- reading

    def _read(self, place: Place, token: int) -> None:
        setting = place.setting
        data = setting.tokens[token]
        if token in setting.vocabulary.special:
            self._read_special(place, token, data)
        elif place.inside and self._clear(place, data):
            place.contents[0] = self.psi.advance(place.contents[0], (token,))
        else:
            self._spell(place, data)

    def _clear(self, place: Place, data: bytes) -> bool:
        """Whether bytes inside a region have nothing to do with its end."""
        return self.closing is None or (len(place.contents) == 1 and self.closing.data[0] not in data)

    def _read_special(self, place: Place, token: int, name: bytes) -> None:
        """A special token is a whole delimiter, or interrupts one."""
        wanted = self.closing if place.inside else self.opening
        place.seen, place.contents = 0, {n: content for n, content in place.contents.items() if n == 0}
        if wanted is not None and name == wanted.data:
            self._spell(place, name)
        elif place.inside:
            place.contents[0] = self.psi.advance(place.contents[0], (token,))

    def _spell(self, place: Place, data: bytes) -> None:
        """Read byte by byte."""
        size = place.setting.vocabulary.size
        for k, byte in enumerate(data):
            if place.inside and self.closing is None:
                place.contents[0] = self.psi.advance(place.contents[0], [size + b for b in data[k:]])
                return
            if place.inside:
                self._read_inside(place, byte)
            else:
                self._read_outside(place, byte)

    def _read_outside(self, place: Place, byte: int) -> None:
        place.seen = self.opening.after(place.seen, byte)
        if place.seen == len(self.opening):
            place.inside, place.seen, place.regions = True, 0, place.regions + 1
            place.contents = {0: self.psi.fork(place.setting.first)}

    def _read_inside(self, place: Place, byte: int) -> None:
        assert self.closing is not None
        end, contents = self.closing.data, place.contents
        longer = {n + 1: content for n, content in contents.items() if end[n] == byte}
        if len(end) in longer:
            place.closed.append(longer[len(end)])
            place.inside, place.contents = False, {}
            return
        if 1 in longer:
            longer[1] = self.psi.fork(contents[0])
        place.contents = {0: self.psi.advance(contents[0], (place.setting.vocabulary.size + byte,)), **longer}

    # ---- weighing

    def _settle(self, places: Iterable[Place]) -> None:
        """Ask about the regions that were closed."""
        open_ = [(place, content) for place in places for content in place.closed]
        values = evaluate(self.psi, [content for _, content in open_], [True] * len(open_)).tolist()
        for (place, _), value in zip(open_, values, strict=True):
            place.closed = []
            place.total += value

    def _questions(self, place: Place, done: bool) -> list[tuple[State, bool]]:
        """What is asked about an open region: the best of its ways to go on counts."""
        if not place.inside or (done and self.closing is not None):
            return []
        return [(content, done or n > 0) for n, content in place.contents.items()]

    def _lacking(self, place: Place) -> bool:
        """Whether a finished text lacks a region, or the end of one."""
        return (place.inside and self.closing is not None) or (self.required and not place.regions)

    # ---- masks

    def _mask_outside(self, place: Place) -> Row:
        """(V,) bool: all, but for tokens that open a region with what cannot begin it."""
        setting = place.setting
        if place.seen not in setting.rows:
            row = np.ones(setting.vocabulary.size, dtype=np.bool_)
            for token, rest in setting.opening.completing(place.seen).items():
                row[token] = self._can_begin(setting, rest)
            setting.rows[place.seen] = row
        row = setting.rows[place.seen]
        if not self._lacking(place):
            return row
        row = row.copy()
        row[sorted(setting.vocabulary.eos)] = False
        return row

    def _can_begin(self, setting: Setting, rest: bytes) -> bool:
        """Whether a region can begin with some bytes, as far as the inner potential knows."""
        if rest not in setting.begun:
            place = Place(setting, inside=True, regions=1, contents={0: self.psi.fork(setting.first)})
            self._spell(place, rest)
            setting.begun[rest] = self.log_psi([place], [False])[0] > -math.inf
        return setting.begun[rest]

    def _mask_inside(self, place: Place, found: Row | None) -> Row:
        """(V,) bool, from the inner potential's row (V + 256,), or from none where it has no mask."""
        setting = place.setting
        size = setting.vocabulary.size
        row = np.ones(size, dtype=np.bool_) if found is None else found[:size].copy()
        if setting.closing is None:
            return row
        row[sorted(setting.vocabulary.eos)] = False
        tokens = [] if found is None else self._doubtful(place, found)
        if tokens:
            row[tokens] = self._try(place, tokens)
        return row

    def _doubtful(self, place: Place, found: Row) -> list[int]:
        """Tokens that reach for the end of the region, where the inner mask does not decide."""
        assert self.closing is not None and place.setting.closing is not None
        search, size = place.setting.closing, place.setting.vocabulary.size
        seen = max(place.contents)
        nexts = {self.closing.data[n] for n in place.contents} | set(np.flatnonzero(found[size:]).tolist())
        touching = [i for i in search.touching(seen) if not found[i]]
        return [i for i in [*search.completing(seen), *touching] if search.tokens[i][0] in nexts]

    def _try(self, place: Place, tokens: Sequence[int]) -> Row:
        """(len(tokens),) bool: which tokens leave a positive ψ."""
        places = [self.advance(self.fork(place), (token,)) for token in tokens]
        return np.array(self.log_psi(places, [False] * len(places))) > -np.inf

    def _setting(self, vocabulary: Vocabulary, prompt: Prompt) -> Setting:
        spelling = with_bytes(vocabulary)
        assert spelling.tokens is not None
        tokens = spelling.tokens[: vocabulary.size]
        closing = None if self.closing is None else Search(self.closing, tokens, vocabulary.special)
        opening = Search(self.opening, tokens, vocabulary.special)
        first = self.psi.start(spelling, prompt)
        return Setting(vocabulary, prompt, spelling.tokens, first, opening, closing)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _reads_ids(psi: Potential) -> bool:
    if isinstance(psi, Product):
        return any(_reads_ids(factor) for factor in psi.factors)
    return isinstance(psi, FunctionPotential) and psi.on == "tokens"
