"""Knows constraints by yes/no functions of the text."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from smcdecode.errors import InvalidOption, PotentialError
from smcdecode.potentials.function import UserFunction
from smcdecode.potentials.reading import Reading
from smcdecode.potentials.text import Prompt, shorten

__all__ = ["Predicate"]

When = Literal["text", "final"]


class Predicate(Reading):
    """``Ψ(x) = 1[fn(x)]``: a constraint that Python code checks.

    Args:
        fn: a function of the text that returns True or False. A parameter of it named ``prompt`` (not its first)
            receives the prompt's text.
        on: what it is asked about. ``"final"``: finished texts only. ``"text"``: the text so far, at every step, and
            the finished text; then it must say True of every beginning of a text it would accept, so it fits what
            cannot be mended any more, such as a forbidden word. ``check_potential`` finds such mistakes.
        batched: the function takes a list of texts and returns as many answers.
        name: in reports and messages; by default the function's.

    Raises:
        InvalidOption: ``on`` is neither.
        PotentialError: ``fn`` is no function, or takes the prompt first; when asked, if it raises or its answer is
            neither True nor False.

    Example:
        >>> short = Predicate(lambda text: len(text.split()) <= 12, on="text")
    """

    hard = True

    def __init__(
        self, fn: Callable[..., Any], *, on: When = "final", batched: bool = False, name: str | None = None
    ) -> None:
        if on not in get_args(When):
            raise InvalidOption(f"on={on!r}: a predicate is asked on='text' (every step) or on='final'")
        name = name or str(getattr(fn, "__name__", type(fn).__name__))
        judge = YesNo(fn, name, batched)
        super().__init__(judge, judge if on == "text" else None, as_ids=False, scale=1.0, name=name)
        self.fn, self.on = fn, on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Predicate({self.name}, on={self.on!r})"


class YesNo(UserFunction):
    """A function that says yes, log 1, or no, log 0; nothing else will do."""

    def values(self, readings: Sequence[str], prompts: Sequence[Prompt]) -> list[float]:
        """0 or −inf for each text."""
        texts = [prompt.text for prompt in prompts]
        if not self.batched:
            answers = [self._call(r, t) for r, t in zip(readings, texts, strict=True)]
        else:
            answers = self._several(list(readings), texts)
        return [self._log(answer, reading) for answer, reading in zip(answers, readings, strict=True)]

    def _several(self, readings: list[str], texts: list[str | None]) -> list[Any]:
        answers = self._call(readings, texts)
        answers = answers.tolist() if hasattr(answers, "tolist") else answers
        if not isinstance(answers, list | tuple) or len(answers) != len(readings):
            raise PotentialError(
                f"predicate {self.name!r} is batched, so it must return a list of {len(readings)} booleans"
            )
        return list(answers)

    def _log(self, answer: Any, reading: str) -> float:
        if not isinstance(answer, bool | np.bool_):
            raise PotentialError(
                f"predicate {self.name!r} returned {answer!r} for the text {shorten(reading)!r}; True or False is "
                "wanted. For a weight use smc.potential(fn), for a score smc.Reward(fn)"
            )
        return 0.0 if answer else -np.inf
