"""Knows constraints by regular expressions of Python."""

import re

from smcdecode.potentials.llg import Constraint
from smcdecode.potentials.regexes import as_regex
from smcdecode.potentials.text import shorten

__all__ = ["Regex"]


class Regex(Constraint):
    """``Ψ(x) = 1[re.fullmatch(pattern, x)]``.

    Args:
        pattern: of Python's ``re``, as a string or compiled with flags. Lookarounds, backreferences, word boundaries,
            and atomic and possessive parts have no token masks.
        name: in reports and messages; by default the pattern.

    Raises:
        UnsupportedGrammar: the pattern is malformed, nothing matches it, or a part of it cannot be turned into token
            masks; the message names the part and what to write instead.

    Example:
        >>> Regex(r"[0-9]{3}-[0-9]{4}")
        Regex('[0-9]{3}-[0-9]{4}')
    """

    def __init__(self, pattern: str | re.Pattern[str], *, name: str | None = None) -> None:
        text, flags = (pattern, 0) if isinstance(pattern, str) else (pattern.pattern, pattern.flags)
        expression = as_regex(text, flags, f"pattern {shorten(text)!r}")
        self.pattern = re.compile(pattern)
        super().__init__(f"start: TEXT\nTEXT: {expression}\n", self._match, name or text)

    def _match(self, text: str) -> str | None:
        """Why a finished text does not match; None where it does."""
        return None if self.pattern.fullmatch(text) else "re.fullmatch does not match"
