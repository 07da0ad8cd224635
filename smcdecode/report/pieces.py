"""Settled tokens → pieces of text, none taken back; and how long tokens waited. Knows bytes and counts, no model."""

import codecs
from collections.abc import Sequence

from smcdecode.potentials.stops import Stops
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["Delay", "Pieces"]


class Pieces:
    """The text of one request as its tokens become final; all pieces together are exactly the answer's text.

    Held back are the bytes of a character that is not finished, and those that may be the beginning of a stop string.
    Special tokens and EOS are not shown, nor is a stop string.

    Raises:
        PromptError: the model has no tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary, stops: Stops = Stops()) -> None:  # noqa: B008  frozen
        self._vocabulary, self._stops = vocabulary, stops
        self._read = 0  # tokens
        self._held = b""  # bytes read that may still be a stop string
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int], *, final: bool = False) -> str:
        """The next piece, perhaps empty.

        Args:
            tokens: all that is settled, which begins with what was settled before.
            final: it is the whole answer.
        """
        fresh = tokens[self._read :]
        self._read = len(tokens)
        self._held += self._vocabulary.bytes_of(i for i in fresh if i not in self._vocabulary.eos)
        shown = self._stops.cut(self._held)
        if shown == self._held and not final:
            shown = shown[: self._stops.safe(shown)]
        self._held = self._held[len(shown) :]
        return self._decoder.decode(shown, final)


class Delay:
    """How many tokens had been written beyond each when it became final, counted from the cycle that wrote it."""

    def __init__(self) -> None:
        self._written: list[int] = []  # by place: tokens of the longest particle in the cycle that wrote it
        self._waits: list[int] = []

    def observe(self, longest: int, settled: int) -> None:
        """A cycle has ended: the longest particle has so many tokens, and so many are final."""
        self._written += [longest] * (longest - len(self._written))
        now = len(self._written)  # the longest so far: that particle may be gone
        self._waits += [now - written for written in self._written[len(self._waits) : settled]]

    @property
    def mean(self) -> float:
        """Of all final tokens; NaN before there is one."""
        return sum(self._waits) / len(self._waits) if self._waits else float("nan")

    @property
    def most(self) -> int:
        """Of any final token; 0 before there is one."""
        return max(self._waits, default=0)
