"""Where a text stops by a stop string: the first place at which its bytes spell one. Knows bytes, no model.

A stop string may begin and end inside tokens and span several, so it is looked for in what the tokens spell. The token
that completes it is the text's last, like an EOS; and like an EOS a stop string is not shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from smcdecode.errors import InvalidOption, PromptError
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["Stops"]


@dataclass(frozen=True)
class Stops:
    """Stop strings of one request, as bytes; none of them is empty."""

    strings: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, stop: str | Sequence[str], vocabulary: Vocabulary) -> "Stops":
        """What a caller gives as ``stop``: one string, or several.

        Raises:
            InvalidOption: something in it is no string, or an empty one.
            PromptError: the model has no tokenizer, so its continuations spell nothing.
        """
        given = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(s, str) and s for s in given):
            raise InvalidOption(f"stop must be a string or a list of strings, none of them empty; got {stop!r}")
        if given and vocabulary.tokens is None:
            raise PromptError(
                f"{vocabulary.name} has no tokenizer, so no stop string can be found in what it writes: "
                "smc.load((model, tokenizer))"
            )
        return cls(tuple(s.encode() for s in given))

    def __bool__(self) -> bool:
        return bool(self.strings)

    @cached_property
    def reach(self) -> int:
        """Bytes before a token that can be part of a stop string which the token completes."""
        return max((len(s) for s in self.strings), default=1) - 1

    def completes(self, tail: bytes, token: bytes) -> bool:
        """Whether a token completes a stop string: ``tail`` is the last ``reach`` bytes before it, or all there are."""
        window = tail[max(len(tail) - self.reach, 0) :] + token
        return any(s in window for s in self.strings)

    def cut(self, data: bytes) -> bytes:
        """What is shown of a text: the bytes before the first stop string, that which is complete first."""
        ends = [(at + len(s), -len(s)) for s in self.strings if (at := data.find(s)) >= 0]
        if not ends:
            return data
        end, length = min(ends)
        return data[: end + length]

    def safe(self, data: bytes) -> int:
        """How many of the bytes of an unfinished text will be shown whatever follows: the rest may begin a stop."""
        most = max((n for s in self.strings for n in range(1, len(s)) if data.endswith(s[:n])), default=0)
        return len(data) - most
