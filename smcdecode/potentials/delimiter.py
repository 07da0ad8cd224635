"""Knows how a delimiter is found in bytes that come in tokens; no constraint and no weight."""

import functools
from collections.abc import Sequence

from smcdecode.errors import InvalidOption

__all__ = ["Delimiter", "Search"]


class Delimiter:
    """A string of bytes that is looked for, byte by byte.

    Args:
        text: what is looked for; a text stands for its UTF-8 bytes.

    Raises:
        InvalidOption: it is empty, or neither a text nor bytes.
    """

    def __init__(self, text: str | bytes) -> None:
        if not isinstance(text, str | bytes) or not text:
            raise InvalidOption(f"a delimiter is a text of at least one character; got {text!r}")
        self.data = text.encode() if isinstance(text, str) else text

    def __len__(self) -> int:
        return len(self.data)

    def borders(self, seen: int) -> list[int]:
        """How many bytes of it a text may end in where it ends in ``seen`` at most; longest first, 0 last."""
        head = self.data[:seen]
        return [n for n in range(seen, -1, -1) if head.endswith(self.data[:n])]

    def after(self, seen: int, byte: int) -> int:
        """How many bytes of the delimiter have been seen after one more byte."""
        for n in self.borders(seen):
            if self.data[n] == byte:
                return n + 1
        return 0


class Search:
    """A delimiter among the tokens of a vocabulary: which of them have to do with it.

    Args:
        delimiter: what is looked for.
        tokens: the bytes of each token.
        special: ids that are no text: they count only where one is the whole delimiter.
    """

    def __init__(self, delimiter: Delimiter, tokens: Sequence[bytes], special: frozenset[int]) -> None:
        self.delimiter, self.tokens = delimiter, tokens
        self._plain = [(i, token) for i, token in enumerate(tokens) if token and i not in special]
        self._whole = {i: b"" for i in sorted(special) if i < len(tokens) and tokens[i] == delimiter.data}
        self.completing = functools.cache(self._completing)
        self.touching = functools.cache(self._touching)

    def _completing(self, seen: int) -> dict[int, bytes]:
        """Tokens that complete the delimiter after ``seen`` bytes of it, each with the bytes that follow it there."""
        missing = tuple(self.delimiter.data[n:] for n in self.delimiter.borders(seen))
        likely = ((i, t) for i, t in self._plain if t.startswith(missing) or self.delimiter.data in t)
        rests = {i: self._rest(seen, token) for i, token in likely}
        return {i: rest for i, rest in rests.items() if rest is not None} | self._whole

    def _rest(self, seen: int, token: bytes) -> bytes | None:
        for k, byte in enumerate(token):
            seen = self.delimiter.after(seen, byte)
            if seen == len(self.delimiter):
                return token[k + 1 :]
        return None

    def _touching(self, seen: int) -> list[int]:
        """Tokens that leave a part of the delimiter behind, without completing it."""
        found = [i for i, token in self._plain if self._left(seen, token)]
        return [i for i in found if i not in self.completing(seen)]

    def _left(self, seen: int, token: bytes) -> bool:
        data = self.delimiter.data
        return token[-1] in data[:-1] and any(
            token.endswith(data[:n]) or (data[:n].endswith(token) and n - len(token) in self.delimiter.borders(seen))
            for n in range(1, len(data))
        )
