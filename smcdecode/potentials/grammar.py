"""Knows constraints by Lark grammars: masks by translation, the last word by Lark."""

from pathlib import Path
from typing import Literal

from lark import Lark
from lark.exceptions import LarkError, UnexpectedInput

from smcdecode.errors import InvalidOption, UnsupportedGrammar
from smcdecode.potentials.llg import Constraint
from smcdecode.potentials.text import shorten
from smcdecode.potentials.translate import translate

__all__ = ["Grammar"]


class Grammar(Constraint):
    """``Ψ(x) = 1[x is a text of a Lark grammar]``.

    Lark compiles the grammar; llguidance gives the masks of the translated grammar; Lark reads every finished text
    again, so that whatever the translation cannot express costs a particle and never a wrong text.

    Where the two part, ``notes`` says how, a sentence each.

    Args:
        grammar: the grammar's text, the path of a file with it (imports are relative to it), or a ``lark.Lark`` as it
            was configured.
        start: the start rule; by default ``start``, or that of the ``lark.Lark``.
        parser: how Lark parses a grammar given as text or file. ``"lalr"``: with a contextual lexer and reserved
            words. ``"earley"``: any context-free grammar, without reserved words; slower at the end of a text.
        trailing_ignore: let ``%ignore``-d text follow the last token, as Lark does. Off, so that a model that keeps
            writing blanks cannot use up its tokens with them.
        name: in reports and messages; by default from the start rule.

    Raises:
        UnsupportedGrammar: Lark refuses the grammar, its language is empty, or a part of it cannot be turned into
            token masks; the message names the part and what to write instead.
        InvalidOption: an argument has a wrong type or value.

    Example:
        >>> Grammar('start: "yes" | "no"')
        Grammar('grammar start')
    """

    def __init__(
        self,
        grammar: str | Path | Lark,
        *,
        start: str | None = None,
        parser: Literal["lalr", "earley"] = "lalr",
        trailing_ignore: bool = False,
        name: str | None = None,
    ) -> None:
        self.lark = grammar if isinstance(grammar, Lark) else _compiled(grammar, start or "start", parser)
        self.start_rule = _start_rule(self.lark, start)
        translation = translate(self.lark, self.start_rule, trailing_ignore)
        self.notes = translation.notes
        super().__init__(translation.text, self._parse, name or f"grammar {self.start_rule}")

    def _parse(self, text: str) -> str | None:
        """Lark's objection to a finished text; None where it has none."""
        try:
            self.lark.parse(text, start=self.start_rule)
        except UnexpectedInput as error:
            return f"Lark: {str(error).splitlines()[0]}"
        return None


def _compiled(grammar: str | Path, start: str, parser: str) -> Lark:
    if not isinstance(grammar, str | Path):
        raise InvalidOption(f"a grammar is a text, a Path or a lark.Lark; got a {type(grammar).__name__}")
    if parser not in ("lalr", "earley"):
        raise InvalidOption(f"parser={parser!r}: 'lalr' or 'earley'")
    try:
        if isinstance(grammar, Path):
            return Lark.open(str(grammar), start=start, parser=parser)
        return Lark(grammar, start=start, parser=parser)
    except LarkError as error:
        earley = "; or use parser='earley'" if "ollision" in str(error) else ""
        raise UnsupportedGrammar(f"Lark refuses the grammar: {shorten(str(error), 500)}{earley}") from error


def _start_rule(lark: Lark, start: str | None) -> str:
    known = list(lark.options.start)
    if start is None and len(known) == 1:
        return str(known[0])
    if start not in known:
        raise InvalidOption(f"start={start!r}: the grammar was compiled for {', '.join(known)}; give one of these")
    return start
