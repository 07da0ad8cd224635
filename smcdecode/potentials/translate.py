"""Knows how a compiled Lark grammar is written for llguidance; no token and no text.

Lark has loaded, checked and expanded the grammar: imports, templates, EBNF and priorities are gone. What is left are
rules over terminals. Rules without a finite derivation are dropped, for masks promise that a text can be finished.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lark import Lark
from lark.grammar import Symbol

from smcdecode.errors import UnsupportedGrammar
from smcdecode.potentials.contest import Contest
from smcdecode.potentials.runs import Runs, runs
from smcdecode.potentials.stepping import Cut, cuts, follow

__all__ = ["Translation", "translate"]

Alternatives = dict[str, list[list[Symbol]]]  # of each rule
Parts = dict[str, Cut | Runs]  # of terminals that are rules in llguidance


@dataclass(frozen=True)
class Translation:
    """A grammar in llguidance's dialect.

    Attributes:
        text: the grammar; its rule ``start`` is the Lark grammar's start rule.
        notes: where the masks and Lark part, a sentence each: what only Lark forbids, and what the masks leave out.
    """

    text: str
    notes: tuple[str, ...]


def translate(lark: Lark, start: str, trailing_ignore: bool = False) -> Translation:
    """Write a compiled Lark grammar for llguidance.

    The same texts are accepted, but for what ``notes`` says, and for reserved words that begin one another with no
    blank between them and the next word (``INNER`` read as ``IN`` and a name ``NER``), which the masks leave out.

    Args:
        lark: the grammar.
        start: its start rule.
        trailing_ignore: let ``%ignore``-d text follow the last token.

    Raises:
        UnsupportedGrammar: a terminal or the lexer cannot be turned into token masks, or the language is empty.
    """
    _check(lark)
    contest = Contest(lark)
    living = contest.living()
    rules = _reduced(_alternatives(lark), living, start)
    ignored = [name for name in lark.ignore_tokens if name in living]
    parts = _parts(contest, rules, start, ignored)
    names = _names(rules, contest, parts)
    trail = " TRAIL?" if trailing_ignore and ignored else ""
    lines = [f"start: {names[start]}{trail}", *_rule_lines(rules, names)]
    lines += _terminal_lines(rules, contest, names, ignored, parts)
    lines += _part_lines(parts, names)
    lines += [f"TRAIL: {' | '.join(names[name] for name in ignored)}"] if trail else []
    lines += [f"%ignore {names[name]}" for name in ignored]
    return Translation("\n".join(lines) + "\n", tuple(contest.notes))


def _check(lark: Lark) -> None:
    """Refuse what acts on a text behind the grammar's back."""
    options = lark.options
    if options.postlex is not None:
        raise UnsupportedGrammar("a postlex (an indenter, say) rewrites tokens; write a grammar without it")
    if options.use_bytes:
        raise UnsupportedGrammar("use_bytes=True: texts are strings here; compile the grammar without it")
    if options.lexer_callbacks:
        raise UnsupportedGrammar("lexer_callbacks can change tokens; compile the grammar without them")
    known = {terminal.name for terminal in lark.terminals}
    used = {symbol.name for rule in lark.rules for symbol in rule.expansion if symbol.is_term}
    for name in sorted(used.union(lark.ignore_tokens) - known):
        raise UnsupportedGrammar(f"terminal {name} is only %declare-d, so it has no text; define it")


def _alternatives(lark: Lark) -> Alternatives:
    found: Alternatives = {}
    for rule in lark.rules:
        found.setdefault(rule.origin.name, []).append(list(rule.expansion))
    return found


def _reduced(rules: Alternatives, living: set[str], start: str) -> Alternatives:
    """The rules that take part in some text, with the alternatives that can be finished."""
    productive = _productive(rules, living)
    if start not in productive:
        raise UnsupportedGrammar(
            f"the language of rule {start!r} is empty: no text can ever finish it; give the rules it needs an "
            "alternative that does not lead back to them"
        )
    finished = {name: [a for a in rules[name] if _can_end(a, living, productive)] for name in productive}
    reached = _reached(finished, start)
    return {name: finished[name] for name in rules if name in reached}


def _productive(rules: Alternatives, living: set[str]) -> set[str]:
    """Names of the rules with a finite derivation."""
    found: set[str] = set()
    while True:
        more = {n for n, alternatives in rules.items() if any(_can_end(a, living, found) for a in alternatives)}
        if more == found:
            return found
        found = more


def _can_end(alternative: Sequence[Symbol], living: set[str], productive: set[str]) -> bool:
    return all(symbol.name in (living if symbol.is_term else productive) for symbol in alternative)


def _reached(rules: Alternatives, start: str) -> set[str]:
    found, todo = {start}, [start]
    while todo:
        inside = {s.name for alternative in rules[todo.pop()] for s in alternative if not s.is_term}
        todo += inside - found
        found |= inside
    return found


def _names(rules: Alternatives, contest: Contest, parts: Parts) -> dict[str, str]:
    """Names that llguidance takes: of rules and cut terminals in lower case, of whole terminals in upper case."""
    lower = {name: f"r{i}-{re.sub('[^a-z0-9]', '', name.lower())}" for i, name in enumerate(rules)}
    upper = {name: f"T{i}_{re.sub('[^A-Z0-9]', '', name.upper())}" for i, name in enumerate(contest.entries)}
    return lower | upper | {name: upper[name].lower().replace("_", "-") for name in parts}


def _rule_lines(rules: Alternatives, names: Mapping[str, str]) -> Iterator[str]:
    for name, alternatives in rules.items():
        bodies = [" ".join(names[symbol.name] for symbol in alternative) or '""' for alternative in alternatives]
        yield f"{names[name]}: {' | '.join(dict.fromkeys(bodies))}"


def _terminal_lines(
    rules: Alternatives, contest: Contest, names: Mapping[str, str], ignored: Sequence[str], parts: Parts
) -> Iterator[str]:
    used = {s.name for alternatives in rules.values() for a in alternatives for s in a if s.is_term}
    for name in sorted(used.union(ignored)):
        if name not in parts:
            yield f"{names[name]}: {contest.entries[name].outcome}"


def _part_lines(parts: Parts, names: Mapping[str, str]) -> Iterator[str]:
    """The rules that stand for terminals in parts."""
    for name, part in parts.items():
        yield from part.lines(names[name], names[name].upper().replace("-", "_"))


def _parts(contest: Contest, rules: Alternatives, start: str, ignored: Sequence[str]) -> Parts:
    """The terminals that llguidance's lexer can only read in parts."""
    inside = {s.name for alternatives in rules.values() for a in alternatives for s in a if s.is_term}
    used = sorted(inside.union(ignored))
    behind = follow(rules, start)
    behind |= {name: set(used) | behind.get(name, set()) for name in ignored}
    parts: Parts = dict(cuts(contest, behind, used, ignored))
    whole = [name for name in used if name not in parts and name not in ignored]
    parts |= runs(contest, behind, whole)
    if ignored:
        contest.notes += [
            f"ignored text inside {name}, which is read in parts: Lark alone forbids it" for name in parts
        ]
    return parts
