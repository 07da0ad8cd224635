r"""Knows where Lark's lexer steps back and llguidance's cannot, and cuts terminals in two so that it need not.

On ``1..2`` Lark tries ``FLOAT: /[0-9]+\.[0-9]+/``, fails at the second point, and takes ``INT: /[0-9]+/``.
llguidance never steps back: after ``1.`` only the FLOAT is left. Where the text behind the shorter terminal can go on
in this way, the longer one becomes a rule of two terminals, ``/[0-9]+/`` and ``/\.[0-9]+/``, and there is nothing to
step back over. Where no cut helps, a note says which texts the masks leave out. Reserved words that begin one another
are left as they are: words stand apart.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lark.grammar import Symbol

from smcdecode.potentials.contest import Contest, Entry
from smcdecode.potentials.lexemes import ANYTHING, SOMETHING, nonempty, parts_of
from smcdecode.potentials.regexes import Item, Printer, sc

__all__ = ["END", "Cut", "begun", "cuts", "follow"]

Alternatives = Mapping[str, Sequence[Sequence[Symbol]]]
END = ""  # what follows the last terminal of a text


@dataclass(frozen=True)
class Cut:
    """A terminal as two: a first part, and a rest that may be missing."""

    first: str  # expressions of llguidance's terminals
    rest: str
    optional: bool

    def lines(self, rule: str, token: str) -> Iterator[str]:
        """The rule that stands for the terminal, and its terminals."""
        yield f"{rule}: {token}_FIRST {token}_REST" + (f" | {token}_FIRST" if self.optional else "")
        yield f"{token}_FIRST: {self.first}"
        yield f"{token}_REST: {self.rest}"


def follow(rules: Alternatives, start: str) -> dict[str, set[str]]:
    """The terminals that can stand behind each terminal and rule, ``END`` for the end of a text."""
    empty = _nullable(rules)
    first: dict[str, set[str]] = {name: set() for name in rules}
    behind: dict[str, set[str]] = {name: set() for name in rules}
    behind[start].add(END)
    size = -1
    while size != (size := sum(map(len, [*first.values(), *behind.values()]))):
        for name, alternatives in rules.items():
            for alternative in alternatives:
                _spread(name, alternative, first, behind, empty)
    return behind


def _nullable(rules: Alternatives) -> set[str]:
    empty: set[str] = set()
    size = -1
    while size != (size := len(empty)):
        empty |= {n for n, alternatives in rules.items() if any(all(s.name in empty for s in a) for a in alternatives)}
    return empty


def _spread(
    name: str, alternative: Sequence[Symbol], first: dict[str, set[str]], behind: dict[str, set[str]], empty: set[str]
) -> None:
    """From right to left through one alternative: what follows each symbol, and what the rule can begin with."""
    ahead = set(behind[name])
    begins: set[str] = set()
    for symbol in reversed(alternative):
        behind.setdefault(symbol.name, set()).update(ahead)
        own = {symbol.name} if symbol.is_term else first[symbol.name]
        skipped = symbol.name in empty
        ahead = (ahead | own) if skipped else set(own)
        begins = (begins | own) if skipped else set(own)
    first[name] |= begins


def cuts(
    contest: Contest, behind: Mapping[str, set[str]], used: Sequence[str], ignored: Sequence[str]
) -> dict[str, Cut]:
    """The terminals among ``used`` that are cut in two; what no cut helps is added to the contest's notes.

    Args:
        contest: the terminals.
        behind: what can follow each, see ``follow``.
        used: names of the terminals that matter.
        ignored: names of those that may stand between any two.
    """
    found: dict[str, Cut] = {}
    for longer in used:
        stepping = _Stepping(contest, behind, ignored, longer)
        troubles = list(stepping.troubles(used))
        if not troubles:
            continue
        cut = None if longer in ignored else stepping.cut(troubles, used)
        if cut is not None:
            found[longer] = cut
        else:
            contest.notes.append(f"a text that goes on like {longer} but ends in less: the masks leave it out")
    return found


class _Stepping:
    """Which terminals Lark can step back to from inside a longer one."""

    def __init__(self, contest: Contest, behind: Mapping[str, set[str]], ignored: Sequence[str], longer: str) -> None:
        self.contest, self.behind, self.ignored = contest, behind, ignored
        self.longer = contest.entries[longer]
        self.begun = begun(self.longer, contest.flags)  # all beginnings of the longer terminal
        self.closed = not nonempty(f"{self.begun} & {SOMETHING} & ~({self.longer.expression})")

    def troubles(self, names: Sequence[str]) -> Iterator[str]:
        """Expressions for shorter terminals with what can follow them, one for each that is stepped back to."""
        if self.closed and self.contest.groups:
            return
        for name in names:
            entry, together = self.contest.entries[name], self._together(name)
            if (together or not self.contest.groups) and self._likely(entry):
                onward = f"({entry.outcome}) ({self._onward(name)})"
                if nonempty(f"({onward}) & {self.begun} & ~({self._taken(entry, together)})"):
                    yield f"({onward}) & ~({entry.expression})"

    def cut(self, troubles: Sequence[str], names: Sequence[str]) -> Cut | None:
        """The first cut after which neither the first part nor its rivals run past the end of the other."""
        rivals = [self.contest.entries[n] for n in names if self._together(n) or not self.contest.groups]
        others = [begun(rival, self.contest.flags) for rival in rivals if rival is not self.longer]
        items, flags, printer = _items(self.longer, self.contest.flags)
        for i in range(1, len(items)):
            first, rest = (f"/{printer.whole(part, flags)}/" for part in (items[:i], items[i:]))
            ahead, onward = (f"/{printer.beginnings(part, flags)}/" for part in (items[:i], items[i:]))
            past = [f"({trouble}) & {ahead}" for trouble in troubles]
            past += [f"({first} ({onward} & {SOMETHING})) & ~{first} & {rival}" for rival in others]
            if not nonempty(f'{first} & ""') and not any(map(nonempty, past)):
                optional = nonempty(f'{rest} & ""')
                return Cut(first, f"{rest} & {SOMETHING}" if optional else rest, optional)
        return None

    def _together(self, name: str) -> list[frozenset[str]]:
        """The places where a terminal is tried beside the longer one."""
        return [group for group in self.contest.groups if {name, self.longer.terminal.name} <= group]

    def _likely(self, shorter: Entry) -> bool:
        """A quick look, for most pairs have nothing in common."""
        if shorter.word and self.longer.word:
            return False
        if shorter.text is not None and self.longer.text is not None:
            return self.longer.text.startswith(shorter.text) and self.longer is not shorter
        return nonempty(f"(({shorter.expression}) {SOMETHING}) & {self.begun}")

    def _onward(self, name: str) -> str:
        """What can follow a terminal, or a beginning of it; something."""
        nexts = sorted((self.behind[name] | set(self.ignored)) - {END})
        flags = self.contest.flags
        parts = [f"({begun(e, flags)} | ({e.expression}) {ANYTHING})" for n in nexts if (e := self.contest.entries[n])]
        return f"({' | '.join(parts)}) & {SOMETHING}" if parts else '"" & /x/'

    def _taken(self, shorter: Entry, together: Sequence[frozenset[str]]) -> str:
        """What Lark takes as a whole instead of stepping back."""
        if not together:
            return shorter.expression
        always = sorted(frozenset.intersection(*together) | {shorter.terminal.name, self.longer.terminal.name})
        return " | ".join(f"({self.contest.entries[name].expression})" for name in always)


def _items(entry: Entry, flags: int) -> tuple[list[Item], int, Printer]:
    where = f"terminal {entry.terminal.name}"
    return *parts_of(entry.terminal.pattern.to_regexp(), flags, where), Printer(where)


def begun(entry: Entry, flags: int) -> str:
    """All beginnings of a terminal's strings, the empty one and the whole ones too."""
    items, flags, printer = _items(entry, flags)
    heads = f"/{printer.beginnings(items, flags)}/"
    lazy = any(op is sc.MIN_REPEAT for op, _ in items)
    return f"({heads} & ~(({entry.expression}) {SOMETHING}))" if lazy else heads
