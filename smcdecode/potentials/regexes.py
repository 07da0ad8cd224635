"""Knows how Python's regexes are written in Rust's syntax, as regular languages; not which match Python prefers.

A lazy repeat and a greedy one stand for the same language; ``lexemes`` knows when the difference matters.
"""

import importlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from smcdecode.errors import UnsupportedGrammar

__all__ = ["Item", "Printer", "as_regex", "parse", "spliced"]

sc: Any = importlib.import_module("re._constants")
sre: Any = importlib.import_module("re._parser")

Item = tuple[Any, Any]  # an operation of re's parse tree and its argument

PLAIN = frozenset(" _,:;=<>!@%'\"`")
CLASSES = {
    "DIGIT": (r"\p{Nd}", "0-9"),
    "WORD": (r"\p{L}\p{N}_", "0-9A-Za-z_"),
    "SPACE": (r"\s\x1c-\x1f", r" \t\n\r\x0c\x0b"),
}
REFUSED = {
    "ASSERT": "a lookahead or lookbehind",
    "ASSERT_NOT": "a negative lookahead or lookbehind",
    "FAILURE": "a negative lookahead",
    "AT": "an anchor or word boundary",
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}
REMEDY = {
    "ASSERT": "write the strings that are meant: a character class, a longer alternative, or a rule of the grammar",
    "ASSERT_NOT": "write the strings that are meant: a negated character class, or separate rules",
    "AT": "leave it out: a terminal or pattern always matches as a whole",
    "GROUPREF": "write the repeated alternatives out",
}


def parse(pattern: str, flags: int, where: str) -> tuple[list[Item], int]:
    """A pattern as re's parse tree, groups without flags spliced in, and its flags.

    Raises:
        UnsupportedGrammar: it is malformed, or depends on the locale.
    """
    try:
        tree = sre.parse(pattern, flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsupportedGrammar(f"{where}: {pattern!r} is no regex of Python's re module: {error}") from error
    if tree.state.flags & re.LOCALE:
        raise UnsupportedGrammar(f"{where}: the locale flag has no fixed meaning; leave it out")
    return spliced(tree, tree.state.flags), tree.state.flags


def spliced(items: Iterable[Item], flags: int) -> list[Item]:
    """The items of a sequence with those of its groups in place of the groups, where they change no flags."""
    out: list[Item] = []
    for op, arg in items:
        if op is sc.SUBPATTERN and (flags | arg[1]) & ~arg[2] == flags:
            out += spliced(arg[3], flags)
        else:
            out.append((op, arg))
    return out


def as_regex(pattern: str, flags: int, where: str) -> str:
    """The language of ``re.fullmatch`` as a Rust regex between slashes. Anchors at the ends say nothing new.

    Raises:
        UnsupportedGrammar: the pattern is malformed or uses a construct without a finite automaton.
    """
    items, flags = parse(pattern, flags, where)
    while items and items[0] in ((sc.AT, sc.AT_BEGINNING), (sc.AT, sc.AT_BEGINNING_STRING)):
        items = items[1:]
    while items and items[-1] in ((sc.AT, sc.AT_END), (sc.AT, sc.AT_END_STRING)):
        items = items[:-1]
    return f"/{Printer(where).whole(items, flags)}/"


class Printer:
    """Prints re's parse trees in the part of Rust's syntax that means the same."""

    def __init__(self, where: str) -> None:
        self.where = where

    def whole(self, items: Sequence[Item], flags: int) -> str:
        """A sequence that stands alone."""
        body = self.sequence(items, flags)
        return f"(?i:{body})" if flags & re.IGNORECASE else body

    def sequence(self, items: Iterable[Item], flags: int) -> str:
        """A sequence inside something that has set its flags."""
        return "".join(self._one(op, arg, flags) for op, arg in items)

    def beginnings(self, items: Sequence[Item], flags: int) -> str:
        """All beginnings of a sequence that stands alone, the empty one and the whole ones too."""
        body = self._beginnings(items, flags)
        return f"(?i:{body})" if flags & re.IGNORECASE else body

    def _beginnings(self, items: Sequence[Item], flags: int) -> str:
        heads = [f"{self.sequence(items[:i], flags)}{self._begun(*item, flags)}" for i, item in enumerate(items)]
        return f"(?:{'|'.join([*heads, self.sequence(items, flags)])})"

    def _begun(self, op: Any, arg: Any, flags: int) -> str:
        """All beginnings of one item, but perhaps not the whole."""
        if op is sc.BRANCH:
            return f"(?:{'|'.join(self._beginnings(branch, flags) for branch in arg[1])})"
        if op is sc.SUBPATTERN:
            inner = (flags | arg[1]) & ~arg[2]
            return self._flagged(self._beginnings(arg[3], inner), inner, flags)
        if op in (sc.MAX_REPEAT, sc.MIN_REPEAT) and arg[1]:
            before = arg[1] if arg[1] is sc.MAXREPEAT else arg[1] - 1
            return f"(?:{self.sequence(arg[2], flags)}){times(0, before)}{self._beginnings(arg[2], flags)}"
        return ""

    def _one(self, op: Any, arg: Any, flags: int) -> str:
        if op is sc.LITERAL:
            return self._literal(arg)
        if op is sc.NOT_LITERAL:
            return f"[^{self._literal(arg)}]"
        if op is sc.ANY:
            return "(?s:.)" if flags & re.DOTALL else r"[^\n]"
        if op is sc.IN:
            return self._class(arg, flags)
        if op is sc.BRANCH:
            return f"(?:{'|'.join(self.sequence(branch, flags) for branch in arg[1])})"
        if op is sc.SUBPATTERN:
            return self._group(arg, flags)
        if op in (sc.MAX_REPEAT, sc.MIN_REPEAT):
            return f"(?:{self.sequence(arg[2], flags)}){times(arg[0], arg[1])}"
        return self._refuse(str(op))

    def _refuse(self, op: str) -> str:
        remedy = REMEDY.get(op, "write it without")
        raise UnsupportedGrammar(f"{self.where}: {REFUSED.get(op, op)} cannot be turned into token masks; {remedy}")

    def _group(self, arg: Any, flags: int) -> str:
        inner = (flags | arg[1]) & ~arg[2]
        return self._flagged(self.sequence(arg[3], inner), inner, flags)

    def _flagged(self, body: str, inner: int, flags: int) -> str:
        if (inner ^ flags) & re.IGNORECASE:
            return f"(?i:{body})" if inner & re.IGNORECASE else f"(?-i:{body})"
        return f"(?:{body})"

    def _class(self, items: Iterable[Item], flags: int) -> str:
        parts = [self._member(op, arg, flags) for op, arg in items if op is not sc.NEGATE]
        negated = any(op is sc.NEGATE for op, _ in items)
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _member(self, op: Any, arg: Any, flags: int) -> str:
        if op is sc.LITERAL:
            return self._literal(arg)
        if op is sc.RANGE:
            return f"{self._literal(arg[0])}-{self._literal(arg[1])}"
        name = str(arg).removeprefix("CATEGORY_")
        body = CLASSES[name.removeprefix("NOT_")][bool(flags & re.ASCII)]
        return f"[^{body}]" if name.startswith("NOT_") else body

    def _literal(self, code: int) -> str:
        char = chr(code)
        if char.isascii() and (char.isalnum() or char in PLAIN):
            return char
        if 0xD800 <= code <= 0xDFFF:
            raise UnsupportedGrammar(f"{self.where}: a surrogate code point is no character of a text; leave it out")
        return rf"\x{code:02x}" if code < 0x80 else rf"\u{{{code:x}}}"


def times(least: int, most: int) -> str:
    """The quantifier of a repeat."""
    if most is sc.MAXREPEAT:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"
