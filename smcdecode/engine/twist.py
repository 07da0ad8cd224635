"""Potential states of every slot, and what they say: log ψ and masks. Knows potentials by protocol only."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from smcdecode.potentials.potential import Potential, Prompt, allowed, evaluate
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


class Twist:
    """ψ_t of every slot: one state a slot and factor, forked when slots are selected."""

    def __init__(self, potentials: Sequence[Potential], slots: int, vocabulary: Vocabulary) -> None:
        self.potentials = tuple(potentials)
        self.vocabulary = vocabulary
        self.states: list[States] = [[] for _ in range(slots)]
        self.masked = False

    def start(self, slots: Iterable[int], prompt: Prompt) -> None:
        """States of the empty continuation for one lane's slots."""
        for slot in slots:
            self.states[slot] = [psi.start(self.vocabulary, prompt) for psi in self.potentials]
            if not self.masked and self.potentials:
                self.masked = self.masks([self.states[slot]]) is not None

    def advance(self, slots: Iterable[int], blocks: Iterable[Sequence[int]]) -> None:
        """Advance the states of ``slots`` over the tokens each gained, without EOS."""
        for slot, tokens in zip(slots, blocks, strict=True):
            if tokens:
                self.states[slot] = self.step(self.states[slot], tokens)

    def step(self, states: States, tokens: Sequence[int]) -> States:
        """Advance one state of each factor over some tokens; consumes ``states``."""
        return [psi.advance(state, tokens) for psi, state in zip(self.potentials, states, strict=True)]

    def fork(self, slots: Iterable[int]) -> list[States]:
        """Independent copies of the states of some slots."""
        return [self._copy(self.states[slot]) for slot in slots]

    def _copy(self, states: States) -> States:
        return [psi.fork(state) for psi, state in zip(self.potentials, states, strict=True)]

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
        """log ψ of some slots, (n,) float64, and for each the name of the first factor that is −inf."""
        total = torch.zeros(len(slots), dtype=torch.float64)
        killer: list[str | None] = [None] * len(slots)
        for f, psi in enumerate(self.potentials):
            alive = [i for i, name in enumerate(killer) if name is None]
            value = evaluate(psi, [self.states[slots[i]][f] for i in alive], [complete[i] for i in alive])
            total[alive] += value
            for i in torch.isneginf(value).nonzero()[:, 0].tolist():
                killer[alive[i]] = psi.name
        return total, killer

    def masks(self, states: Sequence[States]) -> Tensor | None:
        """(n, V) bool tokens that every factor allows next; None if no factor has a mask."""
        both: Tensor | None = None
        for f, psi in enumerate(self.potentials):
            mask = allowed(psi, [s[f] for s in states], self.vocabulary.size)
            if mask is not None:
                both = mask if both is None else both & mask
        return both
