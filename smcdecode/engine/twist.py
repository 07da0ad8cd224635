"""Potential states of every slot, and what they say: log ψ and masks. Knows potentials by protocol only."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from smcdecode.declare.proposal import LookAhead
from smcdecode.errors import PotentialError, SMCDecodeError
from smcdecode.potentials.potential import Potential, Prompt, allowed_words, evaluate, masks
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["Death", "States", "Twist"]


@dataclasses.dataclass(frozen=True, eq=False)
class Factors:
    """The potentials of one request, and those of them, by number, that are asked for masks or about next tokens.

    Both follow from the potentials and the proposal alone: were it a matter of what runs at the moment, a request's
    tokens would depend on its company.
    """

    potentials: tuple[Potential, ...]
    masked: tuple[int, ...]  # asked for masks
    checked: tuple[int, ...]  # asked about single next tokens

    @classmethod
    def of(cls, potentials: Sequence[Potential], check: LookAhead) -> "Factors":
        """See :class:`~smcdecode.declare.proposal.Local` for what ``check`` means."""
        ways = [_look_ahead(psi, check) for psi in potentials]
        masked, checked = (tuple(f for f, way in enumerate(ways) if way == kind) for kind in ("mask", "rejection"))
        return cls(tuple(potentials), masked, checked)


@dataclasses.dataclass(frozen=True)
class States:
    """What a slot's potentials remember: one state a factor."""

    factors: Factors
    values: list[Any]


_NONE = States(Factors((), (), ()), [])


@dataclasses.dataclass(frozen=True)
class Death:
    """A particle whose weight became zero: when, by what, at which tokens."""

    cycle: int
    particle: int
    cause: str
    tokens: tuple[int, ...]
    why: str | None = None  # in the potential's own words, where it has some


class Twist:
    """ψ_t of every slot: one state a slot and factor, forked when slots are selected.

    Attributes:
        weighed, masked, checked: (S,) bool, slots whose request has potentials; some that are asked for masks; some
            that are asked about single next tokens.
    """

    def __init__(self, slots: int, vocabulary: Vocabulary, check: LookAhead = "mask") -> None:
        self.vocabulary, self.check = vocabulary, check
        self.states: list[States] = [_NONE] * slots
        self.weighed, self.masked, self.checked = torch.zeros(3, slots, dtype=torch.bool)

    def start(self, slots: Sequence[int], prompt: Prompt, potentials: Sequence[Potential]) -> None:
        """States of the empty continuation for one lane's slots."""
        factors = Factors.of(potentials, self.check)
        first = States(factors, [_guarded(psi, "start", psi.start, self.vocabulary, prompt) for psi in potentials])
        for slot in slots:
            self.states[slot] = _copy(first)
        self._flag(slots, factors)

    def _flag(self, slots: Sequence[int], factors: Factors) -> None:
        for flags, has in (
            (self.weighed, factors.potentials), (self.masked, factors.masked), (self.checked, factors.checked)
        ):  # fmt: skip
            flags[slots] = bool(has)

    def advance(self, slots: Iterable[int], blocks: Iterable[Sequence[int]]) -> None:
        """Advance the states of ``slots`` over the tokens each gained, without EOS."""
        for slot, tokens in zip(slots, blocks, strict=True):
            if tokens:
                self.states[slot] = self.step(self.states[slot], tokens)

    def step(self, states: States, tokens: Sequence[int]) -> States:
        """Advance one state of each factor over some tokens; consumes ``states``."""
        pairs = zip(states.factors.potentials, states.values, strict=True)
        return States(states.factors, [_guarded(psi, "advance", psi.advance, value, tokens) for psi, value in pairs])

    def fork(self, slots: Iterable[int]) -> list[States]:
        """Independent copies of the states of some slots."""
        return [_copy(self.states[slot]) for slot in slots]

    def select(self, ancestors: list[int]) -> None:
        """Slot i takes over a fork of the states of slot ``ancestors[i]``."""
        moved = [(i, a) for i, a in enumerate(ancestors) if i != a]
        for flags in (self.weighed, self.masked, self.checked):
            flags.copy_(flags[ancestors])
        for i, states in [(i, _copy(self.states[a])) for i, a in moved]:
            self.states[i] = states

    def clear(self, slots: Sequence[int]) -> None:
        """Forget the states of slots whose lane is done."""
        for slot in slots:
            self.states[slot] = _NONE
        self._flag(slots, _NONE.factors)

    def log_psi(self, slots: Sequence[int], complete: Sequence[bool]) -> tuple[Tensor, list[str | None]]:
        """The log ψ of some slots, (n,) float64, and for each the name of the first factor that is −inf."""
        total = torch.zeros(len(slots), dtype=torch.float64)
        killer: list[str | None] = [None] * len(slots)
        states = [self.states[slot] for slot in slots]
        for f in range(_most(states)):
            alive = [i for i, name in enumerate(killer) if name is None]
            for psi, rows in _askers(states, f, alive):
                value = evaluate(psi, [states[i].values[f] for i in rows], [complete[i] for i in rows])
                total[rows] += value
                for i in torch.isneginf(value).nonzero()[:, 0].tolist():
                    killer[rows[i]] = psi.name
        return total, killer

    def why(self, slot: int, name: str, complete: bool) -> str | None:
        """Why the factor of this name forbids what a slot holds, in its own words; None where it has none."""
        states = self.states[slot]
        f = [psi.name for psi in states.factors.potentials].index(name)
        ask = getattr(states.factors.potentials[f], "why", None)
        return None if ask is None else ask(states.values[f], complete)

    def masks(self, states: Sequence[States], texts: Sequence[Hashable]) -> Tensor:
        """Tokens that every factor allows next, packed (n, ⌈V/32⌉) int32; states of equal ``texts`` are asked once."""
        first: dict[Hashable, int] = {}
        for i, text in enumerate(texts):
            first.setdefault(text, i)
        masks = self._masks([states[i] for i in first.values()])
        if len(first) == len(states):
            return masks
        row = {text: j for j, text in enumerate(first)}
        return masks[[row[text] for text in texts]]

    def _masks(self, states: Sequence[States]) -> Tensor:
        every: Tensor | None = None
        for f in range(_most(states)):
            for psi, rows in _askers(states, f, [i for i, s in enumerate(states) if f in s.factors.masked]):
                mask = allowed_words(psi, [states[i].values[f] for i in rows], self.vocabulary.size)
                if mask is None:
                    continue
                if every is None and len(rows) == len(states):
                    every = mask.clone()  # its potential may write over it
                    continue
                every = self._anything(len(states)) if every is None else every
                every[rows] &= mask
        return self._anything(len(states)) if every is None else every

    def _anything(self, n: int) -> Tensor:
        """Masks that allow all tokens."""
        return torch.full((n, -(-self.vocabulary.size // 32)), -1, dtype=torch.int32)

    def refusals(
        self, slots: Sequence[int], nexts: Sequence[Sequence[int]], complete: Sequence[bool]
    ) -> list[str | None]:
        """For some slots, each with tokens that may come next, the name of the first checked factor that is −inf then.

        The slots' states stay as they are. Factors are asked in their order, and not about what is refused already.
        """
        killer: list[str | None] = [None] * len(slots)
        states = [self.states[slot] for slot in slots]
        for f in range(_most(states)):
            alive = [i for i, name in enumerate(killer) if name is None and f in states[i].factors.checked]
            for psi, rows in _askers(states, f, alive):
                ahead = [_peek(psi, states[i].values[f], nexts[i]) for i in rows]
                value = evaluate(psi, ahead, [complete[i] for i in rows])
                for i in torch.isneginf(value).nonzero()[:, 0].tolist():
                    killer[rows[i]] = psi.name
        return killer


def _most(states: Sequence[States]) -> int:
    return max((len(s.values) for s in states), default=0)


def _askers(states: Sequence[States], f: int, rows: Iterable[int]) -> Iterable[tuple[Potential, list[int]]]:
    """Those of some rows that have a factor number f, together where it is the same potential."""
    asked: dict[int, tuple[Potential, list[int]]] = {}
    for i in rows:
        if f < len(states[i].values):
            psi = states[i].factors.potentials[f]
            asked.setdefault(id(psi), (psi, []))[1].append(i)
    return asked.values()


def _copy(states: States) -> States:
    pairs = zip(states.factors.potentials, states.values, strict=True)
    return States(states.factors, [_guarded(psi, "fork", psi.fork, value) for psi, value in pairs])


def _peek(psi: Potential, state: Any, tokens: Sequence[int]) -> Any:
    """A state behind some more tokens; it stays as it is."""
    return _guarded(psi, "advance", psi.advance, _guarded(psi, "fork", psi.fork, state), tokens) if tokens else state


def _look_ahead(psi: Potential, check: LookAhead) -> LookAhead | None:
    """How a factor is asked about next tokens before they are drawn: by its mask, by rejection, or not at all."""
    if check == "rejection":
        return "rejection"
    if masks(psi):
        return "mask"
    return "rejection" if check == "auto" and getattr(psi, "hard", False) else None


def _guarded(psi: Potential, verb: str, method: Callable[..., Any], *args: Any) -> Any:
    """Call a method that a user may have written; an error of the user's becomes one that names the potential."""
    try:
        return method(*args)
    except SMCDecodeError:
        raise
    except Exception as error:
        raise PotentialError(f"potential {psi.name!r} raised {type(error).__name__} in {verb}: {error}") from error
