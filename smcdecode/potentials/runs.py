"""Knows where llguidance's lexer stops inside a character, and divides terminals so that it need not.

llguidance reads bytes and never steps back. In ``"«" /[^»]+/ "»"`` the first byte of ``»`` is also that of ``«``,
which would prolong the terminal; after it the terminal is not at an end any more, and the second byte of ``»`` is
refused. So a terminal that goes on with characters outside ASCII, where such a character may also follow it, becomes
runs of ASCII and single other characters. What it loses to other terminals it still loses where it is all ASCII.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from smcdecode.potentials.contest import Contest, Entry
from smcdecode.potentials.lexemes import ANYTHING, nonempty, parts_of
from smcdecode.potentials.regexes import Item, Printer, sc
from smcdecode.potentials.stepping import END, begun

__all__ = ["Runs", "runs"]

ASCII = r"/[\x00-\x7f]+/"
OTHER = r"/[^\x00-\x7f]/"


@dataclass(frozen=True)
class Runs:
    """A terminal as runs; each part is an expression of llguidance's terminals."""

    whole: str  # all ASCII
    first: str  # ASCII, before the first other character
    head: str  # an other character that only the first may be; empty where the first is like the others
    run: str  # ASCII, later
    other: str  # one other character

    def lines(self, rule: str, token: str) -> Iterator[str]:
        """The rules that stand for the terminal, and their terminals."""
        headed = f" | {token}_HEAD | {token}_HEAD {rule}-rest" if self.head else ""
        yield f"{rule}: {token}_WHOLE | {rule}-tail | {token}_FIRST {rule}-tail{headed}"
        yield f"{rule}-tail: {token}_OTHER | {rule}-tail {token}_OTHER | {rule}-tail {token}_RUN"
        yield f"{token}_WHOLE: {self.whole}"
        yield f"{token}_FIRST: {self.first}"
        yield f"{token}_RUN: {self.run}"
        yield f"{token}_OTHER: {self.other}"
        if self.head:
            yield f"{rule}-rest: {rule}-tail | {token}_RUN | {token}_RUN {rule}-tail"
            yield f"{token}_HEAD: {self.head}"


def runs(contest: Contest, behind: Mapping[str, set[str]], names: Sequence[str]) -> dict[str, Runs]:
    """The terminals among ``names`` that are divided; where one cannot be, a note says so."""
    found: dict[str, Runs] = {}
    wide = {n for n, e in contest.entries.items() if nonempty(f"({e.expression}) & ({OTHER} {ANYTHING})")}
    for name in names:
        entry = contest.entries[name]
        if not (behind.get(name, set()) - {END}) & wide or not _goes_on(entry, contest.flags):
            continue
        divided = _divided(entry, contest.flags)
        if divided is not None:
            found[name] = divided
        else:
            contest.notes.append(f"{name} directly before a character outside ASCII: the masks may leave it out")
    return found


def _goes_on(entry: Entry, flags: int) -> bool:
    """Whether a string of the terminal can be prolonged by a character outside ASCII."""
    return nonempty(f"(({entry.expression}) {OTHER} {ANYTHING}) & {begun(entry, flags)}")


def _divided(entry: Entry, flags: int) -> Runs | None:
    """The runs of a terminal that is a repeated character, perhaps behind a first one; None for others."""
    where = f"terminal {entry.terminal.name}"
    items, flags = parts_of(entry.terminal.pattern.to_regexp(), flags, where)
    if not items or items[-1][0] is not sc.MAX_REPEAT or len(items) > 2 or not _single([*items[:-1], *items[-1][1][2]]):
        return None
    show = Printer(where).whole
    body = list(items[-1][1][2])
    one, head = f"/{show(body, flags)}/", f"/{show(items[:-1], flags)}/ & {OTHER}"
    run = f"/{show([(sc.MAX_REPEAT, (1, sc.MAXREPEAT, body))], flags)}/ & {ASCII}"
    parts = [f"({entry.outcome}) & {ASCII}", f"({entry.expression}) & {ASCII}", run, f"{one} & {OTHER}"]
    if not all(map(nonempty, parts)):
        return None
    whole, first, run, other = parts
    return Runs(whole, first, head if len(items) == 2 and nonempty(head) else "", run, other)


def _single(items: Sequence[Item]) -> bool:
    """Whether each item is one character."""
    return all(op in (sc.LITERAL, sc.NOT_LITERAL, sc.ANY, sc.IN) for op, _ in items)
