"""Knows how to call a function that the user wrote and what may come back; knows no particle and no vocabulary."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from smcdecode.errors import PotentialError
from smcdecode.potentials.text import Prompt, shorten

__all__ = ["Judge", "UserFunction"]


class Judge(Protocol):
    """Gives each continuation a number."""

    wants_prompt: bool

    def values(self, readings: Sequence[Any], prompts: Sequence[Prompt]) -> Sequence[float]:
        """One number for each reading (a text, or a tuple of ids); ``prompts`` have a text where it is wanted."""
        ...


class UserFunction:
    """``fn(reading) → number``, or ``fn(list of readings) → numbers`` if ``batched``.

    Where ``fn`` has a parameter ``prompt`` it is called with ``prompt=`` the prompt's text (its ids where the reading
    is ids), or the list of them if ``batched``.

    Raises:
        PotentialError: ``fn`` cannot be called so.
    """

    def __init__(self, fn: Callable[..., Any], name: str, batched: bool) -> None:
        if not callable(fn):
            raise PotentialError(f"{name!r}: a function of the text is wanted, not a {type(fn).__name__}")
        self.fn, self.name, self.batched = fn, name, batched
        self.wants_prompt = _wants_prompt(fn, name)

    def values(self, readings: Sequence[Any], prompts: Sequence[Prompt]) -> Sequence[float]:
        """The function's numbers, one for each reading.

        Raises:
            PotentialError: the function raised, or returned something that is no number.
        """
        if self.batched:
            return self._numbers(
                list(readings),
                self._call(list(readings), [_given(r, p) for r, p in zip(readings, prompts, strict=True)]),
            )
        return [_number(self._call(r, _given(r, p)), self.name, r) for r, p in zip(readings, prompts, strict=True)]

    def _call(self, reading: Any, prompt: Any) -> Any:
        try:
            return self.fn(reading, prompt=prompt) if self.wants_prompt else self.fn(reading)
        except Exception as error:
            raise PotentialError(
                f"potential {self.name!r} raised {type(error).__name__}: {error}; it was given {_show(reading)}"
            ) from error

    def _numbers(self, readings: list[Any], values: Any) -> Sequence[float]:
        """Check what a batched function returned."""
        if isinstance(values, torch.Tensor | np.ndarray):
            values = values.tolist()
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(readings):
            found = f"{len(values)} values" if isinstance(values, Sequence) else f"a {type(values).__name__}"
            raise PotentialError(
                f"potential {self.name!r} is batched, so it must return a sequence of {len(readings)} numbers, one for "
                f"each text it is given; it returned {found}"
            )
        return [_number(value, self.name, reading) for value, reading in zip(values, readings, strict=True)]


def _wants_prompt(fn: Callable[..., Any], name: str) -> bool:
    """Whether ``fn`` has a parameter ``prompt`` after its first one."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except ValueError:  # a builtin that does not tell
        return False
    if parameters and parameters[0].name == "prompt" and parameters[0].kind is not parameters[0].KEYWORD_ONLY:
        raise PotentialError(f"potential {name!r}: the text comes first, then the prompt: def {name}(text, *, prompt)")
    return any(p.name == "prompt" for p in parameters)


def _given(reading: Any, prompt: Prompt) -> Any:
    """The prompt in the terms of the reading: ids for ids, text for text."""
    return prompt.tokens if isinstance(reading, tuple) else prompt.text


def _number(value: Any, name: str, reading: Any) -> float:
    """A returned value as a float."""
    if type(value) is float:
        return value
    if isinstance(value, str | bool | np.bool_) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
        raise PotentialError(
            f"potential {name!r} returned {value!r} for {_show(reading)}; a number is wanted, the logarithm of a "
            "factor: 0.0 leaves a text as it is, -math.inf forbids it"
        )
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PotentialError(
            f"potential {name!r} returned a {type(value).__name__} for {_show(reading)}; a number is wanted"
        ) from error


def _show(reading: Any) -> str:
    """A reading, or a list of them, for messages."""
    if isinstance(reading, str):
        return f"the text {shorten(reading)!r}"
    return f"the ids {shorten(repr(reading))}" if isinstance(reading, tuple) else f"{len(reading)} texts"
