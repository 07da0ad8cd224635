"""What a request's past says of its next token, where few are allowed. Knows token ids and their bytes; no slot.

An n-gram model of the prompt and of the target's own laws at the positions scored so far. Before either says anything,
a token that another one goes on from is hardly ever the one: models write words as their tokenizer does.
"""

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ORDER", "Allowed", "Guess", "Habits", "Pieces"]

ORDER = 4  # tokens of context at most
_PROMPT = 0.3  # what an occurrence in the prompt counts, beside 1 for a law of the target
_PRIOR = 0.7  # what the law of a shorter context counts, in a longer one
_BEGUN = 0.05  # what a token counts that another allowed one goes on from, beside one that none does

Allowed = tuple[int, ...]
Context = tuple[int, ...]
Floats = NDArray[np.float64]


class Guess(NamedTuple):
    """One guess of a block, as :meth:`Ahead.learn` wants to see it."""

    text: list[int]  # the last tokens before it
    allowed: Allowed
    law: Floats  # (len(allowed),), all positive, that it is drawn from

    def draw(self, u: float) -> int:
        """The token that a uniform stands for."""
        if len(self.allowed) == 1:
            return self.allowed[0]
        total = self.law.cumsum()
        return self.allowed[min(int(total.searchsorted(u * total[-1], side="right")), len(total) - 1)]


class Pieces:
    """How likely allowed tokens are by their bytes alone.

    Args:
        tokens: the bytes of each id; None where nothing is known of them.
    """

    def __init__(self, tokens: Sequence[bytes] | None) -> None:
        self.tokens = tokens
        self._known = functools.lru_cache(maxsize=256)(self._law)

    def law(self, allowed: Allowed) -> Floats:
        """Probabilities of allowed tokens, all positive: (len(allowed),)."""
        return self._known(allowed)

    def _law(self, allowed: Allowed) -> Floats:
        weight = np.ones(len(allowed))
        if self.tokens is not None:
            text = [self.tokens[token] for token in allowed]
            order = sorted(range(len(text)), key=text.__getitem__)  # what goes on from a token comes right behind it
            for j, i in itertools.pairwise(reversed(order)):
                weight[i] = weight[j] if text[i] == text[j] else _BEGUN if text[j].startswith(text[i]) else 1.0
        return np.asarray(weight / weight.sum())


class Habits:
    """An n-gram model of one request over the tokens that a mask allows.

    From one context to the next longer one, the first being no token at all, it is
    ``q(v) = (c(v) + 0.7 q'(v)) / (Σ c + 0.7)``: c was learnt there under the same mask, or from the prompt; q' is the
    law of the one before, at first that of the bytes.

    Args:
        prompt: its ids.
        pieces: of its vocabulary.
    """

    def __init__(self, prompt: Sequence[int], pieces: Pieces) -> None:
        self.pieces, self.tail = pieces, list(prompt[-ORDER:])
        self._prompt: dict[Context, Counter[int]] = defaultdict(Counter)
        self._counts: dict[tuple[Context, Allowed], Floats] = {}
        self._kept: dict[Allowed, tuple[float, int]] = {}  # sum and number of the probabilities that a guess was right
        for place, token in enumerate(prompt):
            for context in _contexts(prompt[:place])[1:]:
                self._prompt[context][token] += 1

    def law(self, text: Sequence[int], allowed: Allowed) -> Floats:
        """Probabilities of the allowed tokens behind a text, all positive: (len(allowed),)."""
        q = self.pieces.law(allowed)
        if len(allowed) == 1:
            return q
        for context in _contexts(text):
            c = self._learnt(context, allowed)
            if c is not None:
                q = (c + _PRIOR * q) / (c.sum() + _PRIOR)
        return q

    def kept(self, allowed: Allowed) -> float:
        """How likely the target is to keep a guess among some tokens: Σ min(q, r) on average.

        What stands for one that was seen, at first: the geometric mean of the likeliest token's share and 1.
        """
        if len(allowed) == 1:
            return 1.0
        total, seen = self._kept.get(allowed, (0.0, 0))
        return (total + math.sqrt(self.pieces.law(allowed).max())) / (seen + 1)

    def learn(self, guess: Guess, law: Floats) -> None:
        """Remember the target's probabilities r of the tokens allowed at a guess, (n,), and how near its law was."""
        allowed = guess.allowed
        if len(allowed) == 1:
            return
        total, seen = self._kept.get(allowed, (0.0, 0))
        self._kept[allowed] = total + float(np.minimum(guess.law, law).sum()), seen + 1
        for context in _contexts(guess.text):
            c = self._learnt(context, allowed)
            self._counts[context, allowed] = law if c is None else c + law

    def _learnt(self, context: Context, allowed: Allowed) -> Floats | None:
        """Counts of the allowed tokens behind a context, (len(allowed),); None where there are none."""
        c = self._counts.get((context, allowed))
        if c is None and (seen := self._prompt.get(context)):
            c = self._counts[context, allowed] = _PROMPT * np.array([seen[token] for token in allowed], dtype=float)
        return c


def _contexts(text: Sequence[int]) -> list[Context]:
    """No token, the last one, the last two, … of a text, up to ``ORDER``."""
    return [tuple(text[len(text) - n :]) for n in range(min(len(text), ORDER) + 1)]
