"""Potential states of every slot, and what they say: log ψ and masks. Knows potentials by protocol only."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from smcdecode.declare.proposal import LookAhead
from smcdecode.errors import PotentialError, SMCDecodeError
from smcdecode.potentials.potential import BasePotential, Potential, Prompt, allowed_words, evaluate
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["Death", "Twist"]

States = list[Any]  # one state a factor


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
        masked: the factors, by number, that are asked for masks.
        checked: those that are asked about single next tokens. Both follow from the factors and the proposal alone:
            were it a matter of what runs at the moment, a request's tokens would depend on its company.
    """

    def __init__(
        self, potentials: Sequence[Potential], slots: int, vocabulary: Vocabulary, check: LookAhead = "mask"
    ) -> None:
        self.potentials = tuple(potentials)
        self.vocabulary = vocabulary
        self.states: list[States] = [[] for _ in range(slots)]
        ways = [_look_ahead(psi, check) for psi in self.potentials]
        self.masked = [f for f, way in enumerate(ways) if way == "mask"]
        self.checked = [f for f, way in enumerate(ways) if way == "rejection"]

    def start(self, slots: Iterable[int], prompt: Prompt) -> None:
        """States of the empty continuation for one lane's slots."""
        first = [_guarded(psi, "start", psi.start, self.vocabulary, prompt) for psi in self.potentials]
        for slot in slots:
            self.states[slot] = self._copy(first)

    def advance(self, slots: Iterable[int], blocks: Iterable[Sequence[int]]) -> None:
        """Advance the states of ``slots`` over the tokens each gained, without EOS."""
        for slot, tokens in zip(slots, blocks, strict=True):
            if tokens:
                self.states[slot] = self.step(self.states[slot], tokens)

    def step(self, states: States, tokens: Sequence[int]) -> States:
        """Advance one state of each factor over some tokens; consumes ``states``."""
        pairs = zip(self.potentials, states, strict=True)
        return [_guarded(psi, "advance", psi.advance, state, tokens) for psi, state in pairs]

    def fork(self, slots: Iterable[int]) -> list[States]:
        """Independent copies of the states of some slots."""
        return [self._copy(self.states[slot]) for slot in slots]

    def _copy(self, states: States) -> States:
        return [_guarded(psi, "fork", psi.fork, state) for psi, state in zip(self.potentials, states, strict=True)]

    def select(self, ancestors: Sequence[int]) -> None:
        """Slot i takes over a fork of the states of slot ``ancestors[i]``."""
        moved = [(i, a) for i, a in enumerate(ancestors) if i != a]
        for i, states in [(i, self._copy(self.states[a])) for i, a in moved]:
            self.states[i] = states

    def clear(self, slots: Iterable[int]) -> None:
        """Forget the states of slots whose lane is done."""
        for slot in slots:
            self.states[slot] = []

    def log_psi(self, slots: Sequence[int], complete: Sequence[bool]) -> tuple[Tensor, list[str | None]]:
        """The log ψ of some slots, (n,) float64, and for each the name of the first factor that is −inf."""
        total = torch.zeros(len(slots), dtype=torch.float64)
        killer: list[str | None] = [None] * len(slots)
        for f, psi in enumerate(self.potentials):
            alive = [i for i, name in enumerate(killer) if name is None]
            value = evaluate(psi, [self.states[slots[i]][f] for i in alive], [complete[i] for i in alive])
            total[alive] += value
            for i in torch.isneginf(value).nonzero()[:, 0].tolist():
                killer[alive[i]] = psi.name
        return total, killer

    def why(self, slot: int, name: str, complete: bool) -> str | None:
        """Why the factor of this name forbids what a slot holds, in its own words; None where it has none."""
        f = [psi.name for psi in self.potentials].index(name)
        ask = getattr(self.potentials[f], "why", None)
        return None if ask is None else ask(self.states[slot][f], complete)

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
        for f in self.masked:
            mask = allowed_words(self.potentials[f], [s[f] for s in states], self.vocabulary.size)
            if mask is not None:
                every = mask if every is None else every & mask
        if every is None:
            every = torch.full((len(states), -(-self.vocabulary.size // 32)), -1, dtype=torch.int32)
        return every

    def refusals(
        self, slots: Sequence[int], nexts: Sequence[Sequence[int]], complete: Sequence[bool]
    ) -> list[str | None]:
        """For some slots, each with tokens that may come next, the name of the first checked factor that is −inf then.

        The slots' states stay as they are. Factors are asked in their order, and not about what is refused already.
        """
        killer: list[str | None] = [None] * len(slots)
        for f in self.checked:
            psi = self.potentials[f]
            alive = [i for i, name in enumerate(killer) if name is None]
            states = [self._peek(f, slots[i], nexts[i]) for i in alive]
            value = evaluate(psi, states, [complete[i] for i in alive])
            for i in torch.isneginf(value).nonzero()[:, 0].tolist():
                killer[alive[i]] = psi.name
        return killer

    def _peek(self, f: int, slot: int, tokens: Sequence[int]) -> Any:
        """The state of one factor of a slot behind some more tokens."""
        psi, state = self.potentials[f], self.states[slot][f]
        if not tokens:
            return state
        return _guarded(psi, "advance", psi.advance, _guarded(psi, "fork", psi.fork, state), tokens)


def _look_ahead(psi: Potential, check: LookAhead) -> LookAhead | None:
    """How a factor is asked about next tokens before they are drawn: by its mask, by rejection, or not at all."""
    if check == "rejection":
        return "rejection"
    if getattr(type(psi), "mask", None) is not BasePotential.mask:
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
