"""A potential that fails or hangs takes its own prompt with it, and no other. Knows potentials by protocol only."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smcdecode.errors import InvalidOption, PotentialError, SMCDecodeError
from smcdecode.integrations.batch.limit import Overdue, limit
from smcdecode.potentials.potential import BasePotential, Potential, allowed_words, evaluate, masks
from smcdecode.potentials.text import Prompt
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["Watched", "watched"]


@dataclasses.dataclass(frozen=True)
class _State:
    prompt: Prompt  # a request's own: two requests of equal prompts hold two
    own: Any


class Watched(BasePotential):
    """A potential with its errors caught: a prompt that it failed at dies, particle by particle, and is remembered.

    Prompts are asked about together where the potential is. If that fails, each is asked about by itself, so only the
    guilty ones are ended, and the others' values are what they would be without them.

    Args:
        psi: the potential.
        seconds: that one call of it may take.
    """

    def __init__(self, psi: Potential, seconds: float) -> None:
        self.psi, self.seconds, self.name = psi, seconds, psi.name
        self.__dict__["hard"] = getattr(psi, "hard", False)  # which others say of their class
        self._failed: dict[int, tuple[Prompt, Exception]] = {}  # the prompt is held, so that its id stays its own

    def verdict(self, prompt: Prompt) -> Exception | None:
        """What went wrong with a prompt, if anything did; it is forgotten now."""
        return self._failed.pop(id(prompt), (prompt, None))[1]

    def start(self, vocabulary: Vocabulary, prompt: Prompt) -> _State:
        """As the potential."""
        return self._step(_State(prompt, None), self.psi.start, vocabulary, prompt)

    def advance(self, state: _State, tokens: Sequence[int]) -> _State:
        """As the potential."""
        return self._step(state, self.psi.advance, state.own, tokens)

    def fork(self, state: _State) -> _State:
        """As the potential."""
        return self._step(state, self.psi.fork, state.own)

    def log_psi(self, states: Sequence[_State], complete: Sequence[bool]) -> list[float]:
        """As the potential; −inf for prompts that it failed at."""
        value = torch.full((len(states),), -torch.inf, dtype=torch.float64)

        def ask(rows: list[int]) -> torch.Tensor:
            return evaluate(self.psi, [states[i].own for i in rows], [complete[i] for i in rows])

        for rows, found in self._ask(states, ask):
            value[rows] = found
        return value.tolist()

    def why(self, state: _State, complete: bool) -> str | None:
        """As the potential, where it has words."""
        ask = getattr(self.psi, "why", None)
        return None if ask is None or id(state.prompt) in self._failed else ask(state.own, complete)

    def _step(self, state: _State, verb: Callable[..., Any], *args: Any) -> _State:
        """The state after a verb; of a prompt that failed, as it was."""
        if id(state.prompt) in self._failed:
            return state
        try:
            with limit(self.seconds, deadly=False):
                return _State(state.prompt, verb(*args))
        except (Exception, Overdue) as error:
            self._fail(state.prompt, error)
            return state

    def _ask(
        self, states: Sequence[_State], ask: Callable[[list[int]], torch.Tensor]
    ) -> list[tuple[list[int], torch.Tensor]]:
        """Answers about the prompts that have not failed: all together, or if that fails, each prompt by itself."""
        rows: dict[int, list[int]] = {}
        for i, state in enumerate(states):
            if id(state.prompt) not in self._failed:
                rows.setdefault(id(state.prompt), []).append(i)
        parts = list(rows.values())
        if len(parts) > 1:
            together = [i for part in parts for i in part]
            try:
                with limit(self.seconds):
                    return [(together, ask(together))]
            except (Exception, Overdue):
                pass  # somebody's fault: whose, is found out now
        answers = []
        for part in parts:
            try:
                with limit(self.seconds):
                    answers.append((part, ask(part)))
            except (Exception, Overdue) as error:
                self._fail(states[part[0]].prompt, error)
        return answers

    def _fail(self, prompt: Prompt, error: BaseException) -> None:
        if isinstance(error, Overdue):
            told: Exception = PotentialError(f"potential {self.name!r} did not return within {self.seconds:g} s")
        elif isinstance(error, SMCDecodeError):
            told = error
        else:
            told = PotentialError(f"potential {self.name!r} raised {type(error).__name__}: {error}")
        self._failed[id(prompt)] = (prompt, told)


class _WatchedMask(Watched):
    """One that tells which tokens may follow."""

    def mask(self, states: Sequence[_State]) -> torch.Tensor | None:
        """As the potential, packed (n, ⌈V/32⌉) int32; every token for prompts that it failed at."""
        size = self._size
        words = torch.full((len(states), -(-size // 32)), -1, dtype=torch.int32)

        def ask(rows: list[int]) -> torch.Tensor:
            found = allowed_words(self.psi, [states[i].own for i in rows], size)
            return words[rows] if found is None else found

        for rows, found in self._ask(states, ask):
            words[rows] = found
        return words

    def start(self, vocabulary: Vocabulary, prompt: Prompt) -> _State:
        """As the potential."""
        self._size = vocabulary.size
        return super().start(vocabulary, prompt)


def watched(psi: Potential, seconds: float) -> Watched:
    """The potential, watched.

    Raises:
        InvalidOption: the limit is not positive.
    """
    if not seconds > 0:
        raise InvalidOption(f"a potential's time limit is a positive number of seconds; got {seconds!r}")
    return (_WatchedMask if masks(psi) else Watched)(psi, seconds)
