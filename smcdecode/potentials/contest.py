"""Knows which terminal Lark's lexer prefers where several match, and takes from each what others win; no grammar rule.

Lark tries terminals in an order and takes the first that matches; llguidance takes all that match the longest text. A
terminal that others precede therefore loses the strings that those begin. Terminals compete where one state of the
parser accepts both; llguidance has one expression a terminal, so only what a terminal loses in *every* state that
accepts it is taken away. The rest is left to Lark, which reads finished texts again.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from lark import Lark
from lark.lexer import BasicLexer, ContextualLexer, PatternStr, TerminalDef

from smcdecode.errors import UnsupportedGrammar
from smcdecode.potentials.lexemes import ANYTHING, SOMETHING, lexeme, nonempty
from smcdecode.potentials.text import shorten

__all__ = ["Contest", "Entry"]


@dataclass
class Entry:
    """A terminal: its expression before the contest, and what it loses."""

    terminal: TerminalDef
    expression: str
    losses: list[str] = field(default_factory=list)

    @property
    def text(self) -> str | None:
        """The string of a plain string terminal."""
        pattern = self.terminal.pattern
        return str(pattern.value) if isinstance(pattern, PatternStr) and not pattern.flags else None

    @property
    def word(self) -> bool:
        """Whether this is a word, in upper or lower case perhaps."""
        return isinstance(self.terminal.pattern, PatternStr) and self.terminal.pattern.value.isidentifier()

    @property
    def outcome(self) -> str:
        """The expression after the contest."""
        if not self.losses:
            return self.expression
        return " & ".join([f"({self.expression})", *(f"~({loss})" for loss in self.losses)])


class Contest:
    """The terminals of a compiled Lark grammar, each with the strings that are its own."""

    def __init__(self, lark: Lark) -> None:
        self.flags = int(lark.options.g_regex_flags)
        self.entries = {t.name: Entry(t, _expression(t, self.flags)) for t in lark.terminals}
        self.notes: list[str] = []
        order = sorted(lark.terminals, key=_order)
        self._rank = {t.name: i for i, t in enumerate(order)}
        self.groups = _groups(lark)
        for winner, loser in self._rivals():
            self._settle(self.entries[winner], self.entries[loser])

    def living(self) -> set[str]:
        """Names of the terminals that keep at least one string."""
        return {name for name, entry in self.entries.items() if not entry.losses or nonempty(entry.outcome)}

    def _rivals(self) -> list[tuple[str, str]]:
        """Pairs that compete somewhere: who is tried first, and who second."""
        met = {(a, b) for group in self.groups for a in group for b in group if self._precedes(a, b)}
        return sorted(met)

    def _precedes(self, a: str, b: str) -> bool:
        """Whether Lark prefers terminal a where a and b match the same text."""
        if a == b:
            return False
        if self._embedded(a, b) or self._embedded(b, a):
            return self._embedded(a, b)
        return self._rank[a] < self._rank[b]

    def _embedded(self, a: str, b: str) -> bool:
        """Whether a is a reserved word of b: a string that b matches whole, of the same priority."""
        word, pattern = self.entries[a].terminal, self.entries[b].terminal
        if not isinstance(word.pattern, PatternStr) or isinstance(pattern.pattern, PatternStr):
            return False
        return word.priority == pattern.priority and self._match(pattern, word.pattern.value) == word.pattern.value

    def _match(self, terminal: TerminalDef, text: str) -> str | None:
        """What a terminal matches at the beginning of a text."""
        found = re.match(terminal.pattern.to_regexp(), text, self.flags)
        return found.group() if found else None

    def _settle(self, winner: Entry, loser: Entry) -> None:
        loss = self._loss(winner, loser)
        if loss is None:
            return
        a, b = winner.terminal.name, loser.terminal.name
        if any(b in group and a not in group for group in self.groups):
            self.notes.append(f"in some states of the parser {a} goes before {b}: Lark alone enforces that")
        else:
            loser.losses.append(loss)

    def _loss(self, winner: Entry, loser: Entry) -> str | None:
        """What the winner takes from the loser: an expression, or None."""
        a, b = winner.terminal.name, loser.terminal.name
        if self._embedded(a, b):
            return winner.expression
        if loser.text is not None:
            return loser.expression if self._match(winner.terminal, loser.text) else None
        begins = f"({winner.expression}) {ANYTHING}"
        if not nonempty(f"({loser.expression}) & ({begins})"):
            return None
        beyond = nonempty(f"({loser.expression}) & (({winner.expression}) {SOMETHING}) & ~({winner.expression})")
        return begins if beyond else winner.expression


def _order(terminal: TerminalDef) -> tuple[int, int, int, str]:
    """The order in which Lark's lexers try terminals."""
    pattern = terminal.pattern
    return -terminal.priority, -pattern.max_width, -len(pattern.value), terminal.name


def _groups(lark: Lark) -> list[frozenset[str]]:
    """Sets of terminals that are tried at the same place; none for lexers that try every terminal on its own."""
    lexer = getattr(lark.parser, "lexer", None)
    if isinstance(lexer, ContextualLexer):
        inner = (own for own in lexer.lexers.values() if isinstance(own, BasicLexer))
        return sorted({_names(own.terminals) for own in inner}, key=sorted)
    if isinstance(lexer, BasicLexer):
        return [_names(lexer.terminals)]
    if lark.options.lexer == "dynamic":
        return []
    raise UnsupportedGrammar(
        f"the lexer {lark.options.lexer!r} has no token masks; use lexer='contextual', 'basic' or 'dynamic'"
    )


def _names(terminals: Iterable[TerminalDef]) -> frozenset[str]:
    return frozenset(terminal.name for terminal in terminals)


def _expression(terminal: TerminalDef, flags: int) -> str:
    """A terminal as an expression of llguidance's terminals, before the contest."""
    pattern = terminal.pattern
    if isinstance(pattern, PatternStr) and not pattern.flags and pattern.value.isprintable():
        return json.dumps(pattern.value, ensure_ascii=False)
    return lexeme(pattern.to_regexp(), flags, f"terminal {terminal.name} ({shorten(str(pattern))})")
