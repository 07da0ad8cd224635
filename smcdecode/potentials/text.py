"""Knows what a continuation says so far, as text or as ids; knows no value of it. All states here are immutable."""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["Ids", "IdsRead", "Prompt", "TextRead", "shorten"]


@dataclass(frozen=True)
class Prompt:
    """What the user gave to be continued.

    Attributes:
        tokens: the ids that the model sees.
        text: the prompt as the user wrote it; None where messages or ids were given.
        messages: the chat messages (``{"role": …, "content": …}``); None where text or ids were given.
    """

    tokens: tuple[int, ...]
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None

    def as_text(self, vocabulary: Vocabulary) -> str:
        """The prompt as text: as it was written, or the messages' contents with blank lines between, or the ids' text.

        Raises:
            PotentialError: only ids were given and the vocabulary knows no bytes.
        """
        if self.text is not None:
            return self.text
        if self.messages is not None:
            return "\n\n".join(_content(message) for message in self.messages)
        return vocabulary.text(self.tokens)

    def key(self) -> tuple[str | None, int, int]:
        """What tells two live prompts apart, without reading them through."""
        return self.text, id(self.tokens), id(self.messages)


def _content(message: Mapping[str, Any]) -> str:
    """A message's text, also where it is a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


class Ids(tuple[int, ...]):
    """The ids of a continuation. It cannot change, so a copy of it is itself."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> Self:
        return self


class TextRead(NamedTuple):
    """A continuation read as text: only new bytes are decoded as it grows."""

    text: str
    pending: bytes  # of a character that is not finished yet: 0 to 3 bytes
    prompt: Prompt
    shown: tuple[bytes, ...]  # of the vocabulary: id → bytes

    def advance(self, tokens: Sequence[int]) -> "TextRead":
        """The continuation with ``tokens`` after it."""
        shown = self.shown
        data = self.pending + b"".join([shown[i] for i in tokens])
        text, used = codecs.utf_8_decode(data, "replace", False)
        return TextRead(self.text + text, data[used:], self.prompt, shown)

    def read(self, complete: bool) -> str:
        """The text so far; what is left of an unfinished character counts (as U+FFFD) only when it is complete."""
        return self.text + self.pending.decode("utf-8", "replace") if complete and self.pending else self.text

    def __repr__(self) -> str:
        return f"the text {shorten(self.text)!r}"


class IdsRead(NamedTuple):
    """A continuation read as token ids."""

    ids: tuple[int, ...]
    prompt: Prompt

    def advance(self, tokens: Sequence[int]) -> "IdsRead":
        """The continuation with ``tokens`` after it."""
        return IdsRead(self.ids + tuple(tokens), self.prompt)

    def read(self, complete: bool) -> tuple[int, ...]:  # noqa: ARG002  the signature of TextRead.read
        """The ids so far, EOS not among them."""
        return self.ids

    def __repr__(self) -> str:
        return f"the ids {shorten(repr(self.ids))}"


def shorten(text: str, limit: int = 80) -> str:
    """The end of a long text, for messages."""
    return text if len(text) <= limit else "…" + text[-limit:]
