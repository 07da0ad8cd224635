"""Knows the contract of a potential and checks it on given continuations; knows no model and no weight."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from smcdecode.errors import InvalidOption, PotentialError
from smcdecode.potentials.potential import Potential, State, allowed, evaluate
from smcdecode.potentials.text import Prompt, shorten
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["check_potential"]

NO_PROMPT = Prompt(tokens=(), text="")


class Walk(NamedTuple):
    """A potential along one continuation of T ids, token by token: position t has read t of them."""

    ids: tuple[int, ...]
    prefix: list[float]  # (T + 1,) log ψ_t
    final: list[float]  # (T + 1,) log Ψ of the first t ids taken as a finished continuation


def check_potential(
    psi: Potential,
    vocabulary: Vocabulary,
    contexts: Sequence[Sequence[int]],
    *,
    prompt: Prompt = NO_PROMPT,
    tolerance: float = 1e-4,
) -> None:
    """Check that a potential keeps the contract that makes answers right, on the continuations given.

    The clauses, for each context and all its prefixes, each prefix taken as unfinished and as finished:

    * *number*: log ψ is a finite number or −inf.
    * *repeatable*: asked twice, it says the same, and asking changes nothing.
    * *fork*: a copy of a state and the state go their own ways.
    * *company*: a value does not depend on the other states of the batch.
    * *block*: a block of tokens at once is the same as one by one.
    * *positive*: ψ_t > 0 wherever a finished continuation has Ψ > 0 (section 1 of the mathematics): a potential that
      forbids a prefix that can still become good falsifies the answer.
    * *mask*: where a mask forbids a token, ψ = 0 after it; where it forbids every EOS, Ψ = 0.

    Contexts that say much hold continuations with Ψ > 0, some that come near, characters split over tokens, and the
    empty one.

    Args:
        psi: the potential.
        vocabulary: the vocabulary of the model it is meant for, ``model.vocabulary``.
        contexts: continuations as ids, each up to its first EOS.
        prompt: what they continue.
        tolerance: how far two values of the same thing may differ, in absolute or relative terms; batches of a neural
            reward differ by rounding.

    Raises:
        PotentialError: a clause is broken; the message says which, where, and with what value.
        InvalidWeight: a value is NaN or +inf.
        InvalidOption: there are no contexts.

    Example:
        >>> from smcdecode.potentials.reading import potential
        >>> letters = Vocabulary(3, frozenset({0}), (b"<eos>", b"a", b"b"), frozenset({0}), "letters")
        >>> check_potential(potential(lambda text: -text.count("a")), letters, [(1, 2, 1), (2,)])
        >>> hasty = potential(lambda text: 0.0 if text.endswith("b") else float("-inf"), name="hasty")
        >>> check_potential(hasty, letters, [(1, 2)])
        Traceback (most recent call last):
        smcdecode.errors.PotentialError: potential 'hasty' breaks the clause "positive": Ψ > 0 for 'ab' (log Ψ = 0.0), but its beginning '' has log ψ = -inf; forbid only what cannot become good
    """  # noqa: E501  a message is one line
    if not contexts:
        raise InvalidOption("check_potential needs contexts: give at least one continuation as token ids")
    for context in contexts:
        ids = tuple(itertools.takewhile(lambda i: i not in vocabulary.eos, context))
        _Check(psi, vocabulary, prompt, tolerance).run(ids)


class _Check:
    """The clauses, one method each."""

    def __init__(self, psi: Potential, vocabulary: Vocabulary, prompt: Prompt, tolerance: float) -> None:
        self.psi, self.vocabulary, self.prompt, self.tolerance = psi, vocabulary, prompt, tolerance

    def run(self, ids: tuple[int, ...]) -> None:
        walk = self.walk(ids)
        states = self.snapshots(ids)
        self.fork(walk, states)
        self.company(walk, states)
        self.block(walk)
        self.positive(walk)
        self.mask(walk, states)

    def start(self) -> State:
        return self.psi.start(self.vocabulary, self.prompt)

    def ask(self, state: State) -> tuple[float, float]:
        """Log ψ and log Ψ of a state, alone."""
        return evaluate(self.psi, [state], [False]).item(), evaluate(self.psi, [state], [True]).item()

    def walk(self, ids: tuple[int, ...]) -> Walk:
        """The values that all others are compared with: one state, never copied. Clauses *number*, *repeatable*."""
        state, values = self.start(), []
        for t in range(len(ids) + 1):
            values.append(self.ask(state))
            self.same("repeatable", ids[:t], values[t], self.ask(state), "asked again")
            state = self.psi.advance(state, ids[t : t + 1]) if t < len(ids) else state
        return Walk(ids, [prefix for prefix, _ in values], [final for _, final in values])

    def snapshots(self, ids: tuple[int, ...]) -> list[State]:
        """The states along the way, each left behind by a fork that went on."""
        states = [self.start()]
        for token in ids:
            states.append(self.psi.advance(self.psi.fork(states[-1]), (token,)))
        return states

    def fork(self, walk: Walk, states: list[State]) -> None:
        for t, state in enumerate(states):
            expected = walk.prefix[t], walk.final[t]
            self.same("fork", walk.ids[:t], expected, self.ask(state), "asked after a fork of it went on")
            copy = self.psi.fork(state)
            self.psi.advance(self.psi.fork(state), walk.ids)
            self.same("fork", walk.ids[:t], expected, self.ask(copy), "asked of a fork after its sister went on")

    def company(self, walk: Walk, states: list[State]) -> None:
        n = len(states)
        together = evaluate(self.psi, states + states, [False] * n + [True] * n).tolist()
        for t in range(n):
            expected, found = (walk.prefix[t], walk.final[t]), (together[t], together[n + t])
            self.same("company", walk.ids[:t], expected, found, "asked together with its other prefixes")

    def block(self, walk: Walk) -> None:
        for size in {2, 3, len(walk.ids)}:
            state = self.start()
            for t in range(0, len(walk.ids), max(size, 1)):
                state = self.psi.advance(state, walk.ids[t : t + size])
                end = min(t + size, len(walk.ids))
                how = f"reached in blocks of {size} tokens"
                self.same("block", walk.ids[:end], (walk.prefix[end], walk.final[end]), self.ask(state), how)

    def positive(self, walk: Walk) -> None:
        """Against the longest finished prefix with Ψ > 0, which has all the others inside it."""
        good = max((t for t, value in enumerate(walk.final) if value > -math.inf), default=-1)
        for t, value in enumerate(walk.prefix[: good + 1]):
            if value == -math.inf:
                self.fail(
                    "positive",
                    f"Ψ > 0 for {self.show(walk.ids[:good])} (log Ψ = {walk.final[good]}), but its "
                    f"beginning {self.show(walk.ids[:t])} has log ψ = -inf; forbid only what cannot become good",
                )

    def mask(self, walk: Walk, states: list[State]) -> None:
        mask = allowed(self.psi, states, self.vocabulary.size)
        if mask is None:
            return
        for t, row in enumerate(mask):
            self.mask_of_end(walk, t, row)
            if t < len(walk.ids) and not row[walk.ids[t]]:
                self.mask_of_token(walk, t)

    def mask_of_end(self, walk: Walk, t: int, row: torch.Tensor) -> None:
        eos = sorted(self.vocabulary.eos)
        if eos and walk.final[t] > -math.inf and not row[eos].any():
            self.fail(
                "mask",
                f"every EOS is forbidden after {self.show(walk.ids[:t])}, yet as a finished continuation it has "
                f"log Ψ = {walk.final[t]}; allow EOS there or return -inf",
            )

    def mask_of_token(self, walk: Walk, t: int) -> None:
        value = max(walk.prefix[t + 1], walk.final[t + 1])
        if value > -math.inf:
            self.fail(
                "mask",
                f"token {walk.ids[t]} is forbidden after {self.show(walk.ids[:t])}, yet log ψ = {value} after it; "
                "allow the token there or return -inf",
            )

    def same(
        self, clause: str, ids: tuple[int, ...], expected: tuple[float, float], found: tuple[float, float], how: str
    ) -> None:
        for what, a, b in zip(("log ψ", "log Ψ"), expected, found, strict=True):
            if not math.isclose(a, b, rel_tol=self.tolerance, abs_tol=self.tolerance):
                self.fail(clause, f"{what} of {self.show(ids)} is {a}, but {b} when {how}")

    def show(self, ids: tuple[int, ...]) -> str:
        if self.vocabulary.tokens is None:
            return f"the ids {shorten(repr(ids))}"
        return repr(shorten(self.vocabulary.text(ids)))

    def fail(self, clause: str, message: str) -> None:
        raise PotentialError(f'potential {self.psi.name!r} breaks the clause "{clause}": {message}')
