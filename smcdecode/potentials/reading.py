"""Potentials that read the text, or the ids, and ask Python functions what it is worth. Knows texts; no model."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args, overload

from smcdecode.errors import InvalidOption
from smcdecode.potentials.function import Judge, UserFunction
from smcdecode.potentials.potential import BasePotential
from smcdecode.potentials.text import IdsRead, Prompt, TextRead
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["FunctionPotential", "Reading", "potential"]

On = Literal["text", "tokens", "final"]


class Reading(BasePotential):
    """A potential that reads the continuation, as text or as ids, and asks functions what it is worth.

    ``log ψ_t = scale · prefix(x_1:t)``, 0 without a ``prefix``, and ``log Ψ = scale · final(x)``. Particles that read
    the same are asked about once.
    """

    def __init__(self, final: Judge, prefix: Judge | None, *, as_ids: bool, scale: float, name: str) -> None:
        self.name = name
        self._final, self._prefix, self._as_ids, self._scale = final, prefix, as_ids, scale
        self._wants_prompt = final.wants_prompt or (prefix is not None and prefix.wants_prompt)

    def start(self, vocabulary: Vocabulary, prompt: Prompt) -> TextRead | IdsRead:
        """Nothing read yet."""
        if self._as_ids:
            return IdsRead((), prompt)
        if self._wants_prompt and prompt.text is None:
            prompt = replace(prompt, text=prompt.as_text(vocabulary))
        return TextRead("", b"", prompt, vocabulary.shown)

    def advance(self, state: TextRead | IdsRead, tokens: Sequence[int]) -> TextRead | IdsRead:
        """Read on."""
        return state.advance(tokens)

    def fork(self, state: TextRead | IdsRead) -> TextRead | IdsRead:
        """The same object: it never changes."""
        return state

    def log_psi(self, states: Sequence[TextRead | IdsRead], complete: Sequence[bool]) -> list[float]:
        """``log ψ`` of each state."""
        judges = [self._final if done else self._prefix for done in complete]
        values = [0.0] * len(states)
        for judge in dict.fromkeys(judge for judge in judges if judge is not None):
            asked = [i for i, other in enumerate(judges) if other is judge]
            for i, value in zip(asked, _ask(judge, states, complete, asked), strict=True):
                values[i] = self._scale * value
        return values


def _ask(
    judge: Judge, states: Sequence[TextRead | IdsRead], complete: Sequence[bool], asked: Sequence[int]
) -> list[float]:
    """The judge's values of the states ``asked``; what it cannot tell apart it is asked once."""
    keys = [(states[i].read(complete[i]), states[i].prompt.key() if judge.wants_prompt else None) for i in asked]
    prompts = {key: states[i].prompt for key, i in zip(keys, asked, strict=True)}
    values = judge.values([reading for reading, _ in prompts], list(prompts.values()))
    known = dict(zip(prompts, values, strict=True))
    return [known[key] for key in keys]


class FunctionPotential(Reading):
    """A potential made of a Python function, see ``potential``. It can still be called as the function."""

    def __init__(
        self, fn: Callable[..., Any], *, on: On = "text", batched: bool = False, name: str | None = None
    ) -> None:
        if on not in get_args(On):
            raise InvalidOption(f"on={on!r}: a potential reads on='text', on='tokens' or on='final'")
        name = name or str(getattr(fn, "__name__", type(fn).__name__))
        judge = UserFunction(fn, name, batched)
        super().__init__(judge, None if on == "final" else judge, as_ids=on == "tokens", scale=1.0, name=name)
        self.fn, self.on = fn, on
        self.__doc__ = fn.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"potential({self.name}, on={self.on!r})"


@overload
def potential(
    fn: Callable[..., Any], *, on: On = ..., batched: bool = ..., name: str | None = ...
) -> FunctionPotential: ...
@overload
def potential(
    fn: None = None, *, on: On = ..., batched: bool = ..., name: str | None = ...
) -> Callable[[Callable[..., Any]], FunctionPotential]: ...
def potential(
    fn: Callable[..., Any] | None = None, *, on: On = "text", batched: bool = False, name: str | None = None
) -> FunctionPotential | Callable[[Callable[..., Any]], FunctionPotential]:
    """Make a potential of a Python function that returns log ψ: a decorator, with or without options, or a call.

    Args:
        fn: the function. A parameter of it named ``prompt`` (not its first) receives the prompt.
        on: what it reads. ``"text"``: the text so far, at every step and at the end. ``"tokens"``: the same as a tuple
            of ids, without EOS. ``"final"``: only the text of a finished continuation; ψ = 1 before.
        batched: the function takes a list and returns as many numbers (``prompt`` is then a list as well).
        name: the potential's name in reports and messages; by default the function's.

    A function that forbids (−inf) a text that can still become a good one falsifies the answer: forbid only what cannot
    be mended any more. ``check_potential`` finds such mistakes.

    Raises:
        InvalidOption: ``on`` is none of the three.
        PotentialError: ``fn`` is no function, or takes the prompt first.

    Example:
        >>> @potential
        ... def polite(text):
        ...     return -2.0 * text.count("!")
        >>> polite("Hi!")
        -2.0
    """
    if fn is None:
        return functools.partial(FunctionPotential, on=on, batched=batched, name=name)
    return FunctionPotential(fn, on=on, batched=batched, name=name)
