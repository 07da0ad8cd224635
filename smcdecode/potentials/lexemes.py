"""Knows which of its matches Python's re prefers, and writes exactly those for a lexer that takes the longest.

A terminal matches one beginning of what follows: the first in re's order of preference. Where that is always the
longest, the terminal's language is enough. Two things make it shorter: a lazy repeat, and an alternative that is a
beginning of a later one. Both are written out with ``&`` and ``~`` of llguidance's terminals, or refused.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from smcdecode.errors import UnsupportedGrammar
from smcdecode.potentials.lexicon import BYTES, lexicon_of, why
from smcdecode.potentials.regexes import Item, Printer, parse, sc, spliced

__all__ = ["ANYTHING", "SOMETHING", "lexeme", "nonempty", "parts_of"]

ANYTHING = "/(?s:.)*/"
SOMETHING = "/(?s:.)+/"


@functools.lru_cache(maxsize=4096)
def nonempty(expression: str) -> bool:
    """Whether any string satisfies an expression of llguidance's terminals.

    Raises:
        UnsupportedGrammar: the expression is too large for llguidance.
    """
    lexicon = lexicon_of(BYTES)
    matcher = lexicon.matcher(f"start: X\nX: {expression}\n")
    row = lexicon.fill([matcher])
    if matcher.is_error() and "NoExtension" not in matcher.get_error():
        raise UnsupportedGrammar(why(matcher))
    return not matcher.is_error() and (bool(np.any(row)) or matcher.is_accepting())


def lexeme(pattern: str, flags: int, where: str) -> str:
    """The strings that a terminal can match, as an expression of llguidance's terminals.

    Raises:
        UnsupportedGrammar: the pattern has no finite automaton, or prefers a match in a way not written out here.
    """
    return _Preference(where).expression(*parts_of(pattern, flags, where))


def parts_of(pattern: str, flags: int, where: str) -> tuple[list[Item], int]:
    """A terminal's parts in sequence and their flags, out of the group that may hold them all.

    Raises:
        UnsupportedGrammar: the pattern is malformed.
    """
    items, flags = parse(pattern, flags, where)
    while len(items) == 1 and items[0][0] is sc.SUBPATTERN:
        _, add, remove, body = items[0][1]
        flags = (flags | add) & ~remove
        items = spliced(body, flags)
    return _escapes(items, flags), flags


class _Preference:
    """Expressions for what re prefers."""

    def __init__(self, where: str) -> None:
        self.printer, self.where = Printer(where), where

    def plain(self, items: Sequence[Item], flags: int) -> str:
        """The regular language of a sequence."""
        return f"/{self.printer.whole(items, flags)}/" if items else '""'

    def expression(self, items: list[Item], flags: int) -> str:
        """What re prefers of a sequence that ends the terminal."""
        items = spliced(items, flags)
        lazy = next((i for i, (op, _) in enumerate(items) if op is sc.MIN_REPEAT), None)
        if lazy is not None:
            return self._lazy(items[:lazy], items[lazy][1], items[lazy + 1 :], flags)
        if items and items[-1][0] is sc.BRANCH and self._overtakes(items[-1][1][1], flags):
            return self._branches(items[:-1], items[-1][1][1], flags)
        plain = self.plain(items, flags)
        trouble = next(self._troubles(items, flags), None)
        if trouble and nonempty(f"{plain} & ({plain} {SOMETHING})"):
            raise UnsupportedGrammar(f"{self.where}: {trouble}")
        return plain

    def _lazy(self, head: list[Item], repeat: Any, tail: list[Item], flags: int) -> str:
        """``head X*? tail``: stop at the first place where the tail matches.

        That is ``head X* tail`` without the strings in which a tail began earlier and left something over.
        """
        least, _, body = repeat
        self._calm([*head, (sc.SUBPATTERN, (None, 0, 0, body))], flags)
        if not tail:
            return self.plain([*head, (sc.MAX_REPEAT, (least, least, body))], flags)
        before = [*head, (sc.MAX_REPEAT, repeat)]
        closed = self._closed(head, repeat, tail, flags)
        if closed is not None:
            return closed
        rest, any_rest = self.expression(tail, flags), self.plain(tail, flags)
        if nonempty(f'{any_rest} & ""'):
            raise UnsupportedGrammar(
                f"{self.where}: a lazy repeat before something that can be empty; leave the lazy repeat out"
            )
        start = self.plain(before, flags)
        return f"({start} ({rest})) & ~({start} (({any_rest} {ANYTHING}) & ~{any_rest}))"

    def _closed(self, head: list[Item], repeat: Any, tail: list[Item], flags: int) -> str | None:
        """``.*?q`` as ``[^q]*q``: the common case, without the cost of a complement."""
        least, most, body = repeat
        simple = len(tail) == 1 and tail[0][0] is sc.LITERAL and most is sc.MAXREPEAT and list(body) == [(sc.ANY, None)]
        if not simple or flags & re.IGNORECASE:
            return None
        others = [(sc.NEGATE, None), tail[0], *([] if flags & re.DOTALL else [(sc.LITERAL, 10)])]
        wait = (sc.MAX_REPEAT, (0, sc.MAXREPEAT, [(sc.IN, others)]))
        return self.plain([*head, (sc.MAX_REPEAT, (least, least, body)), wait, *tail], flags)

    def _branches(self, head: list[Item], branches: Sequence[Sequence[Item]], flags: int) -> str:
        """``head (X|Y)``: Y only where no X begins what follows."""
        self._calm(head, flags)
        parts: list[str] = []
        for branch in branches:
            own = self.expression(list(branch), flags)
            earlier = f" & ~(({' | '.join(parts)}) {ANYTHING})" if parts else ""
            parts.append(f"(({own}){earlier})")
        return f"{self.plain(head, flags)} ({' | '.join(parts)})"

    def _calm(self, items: Sequence[Item], flags: int) -> None:
        """Refuse what prefers short matches in front of something else."""
        for trouble in self._troubles(items, flags):
            raise UnsupportedGrammar(f"{self.where}: {trouble}")

    def _troubles(self, items: Sequence[Item], flags: int) -> Iterator[str]:
        """What makes re prefer a shorter match, anywhere in a sequence."""
        for op, arg in items:
            if op is sc.MIN_REPEAT:
                yield "a lazy repeat inside a group; write a negated character class, or move it to the top level"
            if op in (sc.MIN_REPEAT, sc.MAX_REPEAT):
                yield from self._troubles(arg[2], flags)
            elif op is sc.SUBPATTERN:
                yield from self._troubles(arg[3], (flags | arg[1]) & ~arg[2])
            elif op is sc.BRANCH:
                if self._overtakes(arg[1], flags):
                    yield "an alternative begins a later one, which re then never tries; put the longer one first"
                for branch in arg[1]:
                    yield from self._troubles(branch, flags)

    def _overtakes(self, branches: Sequence[Sequence[Item]], flags: int) -> bool:
        """Whether an alternative is a proper beginning of a later one."""
        texts = [_text(branch) for branch in branches]
        if all(text is not None for text in texts) and not flags & re.IGNORECASE:
            known = [text or "" for text in texts]
            return any(b != a and b.startswith(a) for j, b in enumerate(known) for a in known[:j])
        shown = [self.plain(branch, flags) for branch in branches]
        earlier = (f"({' | '.join(shown[:j])}) {SOMETHING}" for j in range(1, len(shown)))
        return any(nonempty(f"{later} & ({first})") for first, later in zip(earlier, shown[1:], strict=True))


def _text(items: Sequence[Item]) -> str | None:
    """The string that a sequence of literals spells; None for anything else."""
    return "".join(chr(arg) for _, arg in items) if all(op is sc.LITERAL for op, _ in items) else None


def _escapes(items: list[Item], flags: int) -> list[Item]:
    r"""``.*?(?<!\\)(\\\\)*?q``, the escaped string of Lark's ``common``, as ``([^\\q]|\\.)*q``."""
    for i in range(len(items) - 3):
        if i + 4 == len(items) and _is_escape(items[i : i + 3]) and items[i + 3][0] is sc.LITERAL:
            quote = items[i + 3]
            line = [] if flags & re.DOTALL else [(sc.LITERAL, 10)]
            safe = (sc.IN, [(sc.NEGATE, None), (sc.LITERAL, 92), quote, *line])
            escaped = [(sc.LITERAL, 92), (sc.ANY, None)]
            body = [(sc.BRANCH, (None, [[safe], escaped]))]
            return [*items[:i], (sc.MAX_REPEAT, (0, sc.MAXREPEAT, body)), quote]
    return items


def _is_escape(items: list[Item]) -> bool:
    r"""Whether three items are ``.*?``, ``(?<!\\)`` and ``(\\\\)*?``."""
    (a, any_), (b, behind), (c, pairs) = items
    if (a, b, c) != (sc.MIN_REPEAT, sc.ASSERT_NOT, sc.MIN_REPEAT):
        return False
    backslashes = [(sc.LITERAL, 92)] * 2
    return (
        (*any_[:2], list(any_[2])) == (0, sc.MAXREPEAT, [(sc.ANY, None)])
        and (behind[0], list(behind[1])) == (-1, backslashes[:1])
        and (*pairs[:2], spliced(pairs[2], 0)) == (0, sc.MAXREPEAT, backslashes)
    )
