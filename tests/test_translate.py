"""The translation of Lark grammars, fuzzed: masks and Lark agree on what a text of the grammar is.

For each grammar: a walk through the masks that ends where they let it is accepted by Lark; every text that Lark
accepts is let through by the masks, however it is cut into tokens; so are all near misses that Lark accepts.
"""

import functools
import itertools
import math
import random
import re

import pytest
from lark import Lark
from lark.exceptions import UnexpectedInput

from smcdecode.potentials.grammar import Grammar
from smcdecode.potentials.potential import Prompt, allowed
from smcdecode.potentials.regexes import parse
from smcdecode.potentials.vocabulary import Vocabulary

PROMPT = Prompt((), "")
EXAMPLES = 30
LETTERS = "".join(map(chr, range(9, 127))) + "éàü😀🙏\u2028\u00a0"

GRAMMARS = {
    "json": r"""
        ?start: value
        ?value: object | array | ESCAPED_STRING | SIGNED_NUMBER | "true" -> true | "false" -> false | "null" -> null
        array: "[" [value ("," value)*] "]"
        object: "{" [pair ("," pair)*] "}"
        pair: ESCAPED_STRING ":" value
        %import common.ESCAPED_STRING
        %import common.SIGNED_NUMBER
        %import common.WS
        %ignore WS
    """,
    "calc": r"""
        ?start: sum | NAME "=" sum -> assign
        ?sum: product | sum "+" product | sum "-" product
        ?product: atom | product "*" atom | product "/" atom
        ?atom: NUMBER | "-" atom | NAME | "(" sum ")"
        %import common.CNAME -> NAME
        %import common.NUMBER
        %import common.WS_INLINE
        %ignore WS_INLINE
    """,
    "sql": r"""
        start: "SELECT"i columns "FROM"i NAME [where] [order] [limit] [";"]
        columns: "*" | expr ("," expr)*
        where: "WHERE"i condition
        condition: condition "AND"i condition | condition "OR"i condition | expr OP expr | expr "IS"i ["NOT"i] "NULL"i
        order: "ORDER"i "BY"i NAME ["ASC"i | "DESC"i]
        limit: "LIMIT"i INT
        expr: NAME | INT | STRING | NAME "(" expr ")"
        OP: "=" | "<>" | "<=" | ">=" | "<" | ">"
        NAME: /[a-z_][a-z0-9_]*/i
        STRING: /'[^']*'/
        %import common.INT
        %ignore /[ \t\n]+/
        %ignore /--[^\n]*/
    """,
    "python expression": r"""
        ?start: test
        ?test: or_test ["if" or_test "else" test] | "lambda" [NAME ("," NAME)*] ":" test
        ?or_test: and_test ("or" and_test)*
        ?and_test: not_test ("and" not_test)*
        ?not_test: "not" not_test | comparison
        ?comparison: arith (("<" | ">" | "==" | "!=" | "in" | "not" "in" | "is") arith)*
        ?arith: term (("+" | "-") term)*
        ?term: power (("*" | "/" | "//" | "%") power)*
        ?power: atom ["**" power]
        ?atom: NAME | NUMBER | STRING | "(" test ")" | "[" [test ("," test)*] "]" | atom "." NAME
             | atom "(" [test ("," test)*] ")" | "None" | "True" | "False"
        NAME: /[a-z_é][a-z0-9_é]*/
        NUMBER: /0x[0-9a-f]+|[0-9]+/i
        STRING: /"(\\.|[^"\\\n])*"|'(\\.|[^'\\\n])*'/
        %ignore /[ \t]+/
    """,
    "chess": r"""
        start: turn+
        turn: INT "." move move? RESULT?
        move: (CASTLE | PIECE? FILE? RANK? "x"? FILE RANK promotion?) CHECK?
        promotion: "=" PIECE
        CASTLE: "O-O-O" | "O-O"
        PIECE: /[KQRBN]/
        FILE: "a".."h"
        RANK: "1".."8"
        CHECK: /[+#]/
        RESULT: "1-0" | "0-1" | "1/2-1/2"
        INT: /[1-9][0-9]*/
        %ignore " "
    """,
    "dates": r"""
        start: date (";" date)*
        date: YEAR "-" MONTH "-" DAY ["T" HOUR ":" MINUTE] | DAY MONTH_NAME YEAR
        YEAR: /(19|20)[0-9][0-9]/
        MONTH: /0[1-9]|1[0-2]/
        DAY: /0[1-9]|[12][0-9]|3[01]/
        HOUR: /[01][0-9]|2[0-3]/
        MINUTE: /[0-5][0-9]/
        MONTH_NAME: "January" | "May" | "June" | "July"
        %ignore " "
    """,
    "ini": r"""
        start: _NL? section+
        section: "[" NAME "]" _NL item+
        item: NAME "=" VALUE? _NL
        NAME: /\w[\w ]{0,3}/
        VALUE: /[^\s\[\]=][^\n]{0,9}/
        %import common.NEWLINE -> _NL
        %ignore /[\t ]/
    """,
    "ranges": r"""
        start: item ("," item)*
        item: INT ".." INT | FLOAT | HEX | INT
        INT: /[0-9]+/
        FLOAT: /[0-9]+\.[0-9]+/
        HEX: /0x[0-9a-f]+/
    """,
    "comments": r"""
        start: (WORD ";")*
        WORD: /[a-z]+/
        COMMENT: "/*" /(.|\n)*?/ "*/"
        LINE: /\/\/[^\n]*/
        %ignore COMMENT
        %ignore LINE
        %ignore /\s+/
    """,
    "templates": r"""
        _list{item, sep}: item (sep item)*
        start: "(" _list{pair, ";"} ")"
        pair: NAME ":" "[" _list{NAME, ","} "]"
        NAME: /[a-zé😀-🙏]{1,3}/
        %ignore " "
    """,
    "keywords": r"""
        start: statement+
        statement: "let" NAME "=" value ";" | "if" value "then" statement | NAME ";"
        value: NAME | "not" value | STRING
        NAME: /[a-z]+/
        STRING: /"[^"]*"/
        %ignore " "
    """,
    "priorities": r"""
        start: (WORD | NUMBER | TAG | LONG)+
        TAG.2: /#[a-z]/
        WORD: /[#a-z]+/
        NUMBER.1: /\d+/
        LONG: "abc1"
        %ignore " "
    """,
    "xml": r"""
        start: element
        element: "<" NAME attribute* ">" (element | TEXT)* "</" NAME ">" | "<" NAME attribute* "/>"
        attribute: " " NAME "=" VALUE
        NAME: /[a-z]+/
        TEXT: /[^<>]+/
        VALUE: /".*?"/
    """,
    "lists of lists": r"""
        start: list
        list: "(" (list | ATOM)* ")"
        ATOM: /[^\s()"]+/ | /"(\\.|[^"\\])*"/
        %ignore /[ \n]+/
    """,
    "quotes": r"""
        start: (QUOTED | NAME ARROW NAME ";")+
        QUOTED: "«" /[^»\n]+/ "»"
        ARROW: "→" | "->"
        NAME: /[^\W\d]\w*/
        %ignore " "
    """,
    "guillemets": 'start: ("«" TEXT "»")*\nTEXT: /[^«»]+/',
    "strings": r"""
        start: (SHORT | RAW | LONG)+
        SHORT: "'" /.*?/ "'"
        RAW: /r"[^"]*"/
        LONG: /<<.*?>>/s
        %ignore /[ \n]/
    """,
}
DIALECTS = {name: {"parser": "lalr"} for name in GRAMMARS} | {
    "palindromes": {"parser": "earley"},
    "ambiguous": {"parser": "earley"},
}
GRAMMARS |= {
    "palindromes": 'start: "a" start "a" | "b" start "b" | "c"',
    "ambiguous": r"""
        start: sentence
        sentence: noun verb noun | noun verb "like" noun
        noun: ADJECTIVE? NOUN
        verb: VERB
        ADJECTIVE: "fruit"
        NOUN: "flies" | "bananas" | "fruit"
        VERB: "like" | "flies"
        %ignore " "
    """,
}
PIECES = [
    *(
        b"SELECT",
        b" FROM",
        b"ab",
        b"a b",
        b' "',
        b'":',
        b"1.",
        b"0x",
        b"..",
        b"if ",
        b"not",
        b"()",
        b"/*",
        b"*/",
        b"//",
    ),
    *(b"</", b"/>", b"));", b"10", b"20", b"-0", b" = ", b"; ", b"\n[", b"le", b"t x", b"O-O", b"true", b"<<", b">>"),
    *(b"abc", b"#a", b"''"),
]
TOKENS = (*(bytes([b]) for b in range(256)), *PIECES, b"ab", b"")
VOCABULARY = Vocabulary(len(TOKENS), frozenset({len(TOKENS) - 1}), TOKENS, frozenset({len(TOKENS) - 1}), "pieces")
EOS = len(TOKENS) - 1


@functools.cache
def compiled(name: str) -> Grammar:
    return Grammar(GRAMMARS[name], trailing_ignore=True, **DIALECTS[name])


def parses(lark: Lark, text: str) -> bool:
    try:
        lark.parse(text)
    except UnexpectedInput:
        return False
    return True


def cut(text: str, rng: random.Random) -> list[int]:
    """A random tokenisation."""
    data, ids = text.encode(), []
    while data:
        fits = [i for i, token in enumerate(TOKENS) if token and data.startswith(token)]
        ids.append(rng.choice(fits))
        data = data[len(TOKENS[ids[-1]]) :]
    return ids


def let_through(psi: Grammar, ids: list[int]) -> bool:
    """Whether the masks allow every token and the end."""
    state = psi.start(VOCABULARY, PROMPT)
    for token in ids:
        if not allowed(psi, [state], VOCABULARY.size)[0, token]:
            return False
        state = psi.advance(state, (token,))
    return bool(allowed(psi, [state], VOCABULARY.size)[0, EOS])


def written(name: str, rng: random.Random) -> str:
    """A random derivation from Lark's own compiled rules, blanks between some terminals."""
    lark = compiled(name).lark
    terminals = {t.name: t.pattern.to_regexp() for t in lark.terminals}
    rules: dict[str, list] = {}
    for rule in sorted(lark.rules, key=str):  # Lark orders some of them by hash
        rules.setdefault(rule.origin.name, []).append(list(rule.expansion))
    cost = dict.fromkeys(rules, math.inf)  # of the shortest derivation
    for _ in rules:
        cost |= {n: min(1 + sum(cost.get(s.name, 1) for s in a) for a in rules[n]) for n in rules}

    def derive(symbol: str, budget: int) -> list[str]:
        if symbol in terminals:
            return [spell(terminals[symbol], rng)]
        options = rules[symbol]
        if budget <= 0:
            options = [min(options, key=lambda a: sum(cost.get(s.name, 1) for s in a))]
        return [part for s in rng.choice(options) for part in derive(s.name, budget - rng.randint(1, 3))]

    blanks = [spell(terminals[t], rng) for t in lark.ignore_tokens]
    parts, often = derive("start", rng.randint(2, 14)), rng.choice([0.5, 1.0])
    return "".join(part + (rng.choice(blanks) if blanks and rng.random() < often else "") for part in parts)


def spell(pattern: str, rng: random.Random) -> str:
    """A random string that a regex matches, as far as lookarounds permit."""
    return "".join(spelled(op, arg, rng) for op, arg in parse(pattern, 0, "")[0])


def spelled(op: object, arg: object, rng: random.Random) -> str:
    match str(op):
        case "LITERAL":
            return chr(arg)
        case "NOT_LITERAL" | "ANY":
            return rng.choice("ab1 é😀")
        case "IN":
            shown = f"[{''.join(member(*item) for item in arg)}]"
            return rng.choice([c for c in LETTERS if re.fullmatch(shown, c)])
        case "BRANCH":
            return "".join(spelled(*item, rng) for item in rng.choice(arg[1]))
        case "SUBPATTERN":
            return "".join(spelled(*item, rng) for item in arg[3])
        case "MAX_REPEAT" | "MIN_REPEAT":
            times = rng.randint(arg[0], min(int(arg[1]), arg[0] + 3))
            return "".join(spelled(*item, rng) for _ in range(times) for item in arg[2])
    return ""


def member(op: object, arg: object) -> str:
    match str(op):
        case "NEGATE":
            return "^"
        case "LITERAL":
            return re.escape(chr(arg))
        case "RANGE":
            return f"{re.escape(chr(arg[0]))}-{re.escape(chr(arg[1]))}"
    name = str(arg).removeprefix("CATEGORY_")
    letter = "\\" + name.removeprefix("NOT_")[0].lower()
    return letter.upper() if name.startswith("NOT_") else letter


def walk(psi: Grammar, rng: random.Random, steps: int) -> str | None:
    """What a random walk through the masks writes, if it comes to an end."""
    state, out = psi.start(VOCABULARY, PROMPT), b""
    for _ in range(steps):
        row = allowed(psi, [state], VOCABULARY.size)[0]
        if row[EOS] and rng.random() < 0.3:
            return out.decode()
        fits = row[:EOS].nonzero()[:, 0].tolist()
        if not fits:
            return out.decode() if row[EOS] else None
        likely = [i for i in fits if TOKENS[i].isascii() and TOKENS[i] not in b"([{"]
        token = rng.choice(likely if likely and rng.random() < 0.7 else fits)
        state, out = psi.advance(state, (token,)), out + TOKENS[token]
    return None


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_finished_walk_is_accepted_by_lark(name):
    psi, rng = compiled(name), random.Random(name)
    finished = [text for text in (walk(psi, rng, 60) for _ in range(60)) if text is not None]
    assert len(finished) >= 3, "no walk came to an end"
    wrong = [text for text in finished if not parses(psi.lark, text)]
    assert not wrong or psi.notes, wrong[:3]


@pytest.mark.parametrize("name", GRAMMARS)
def test_texts_that_lark_accepts_are_let_through_and_near_misses_agree(name):
    psi = compiled(name)
    letters = sorted({c for c in GRAMMARS[name] if not c.isspace()} | {" ", "\n"})
    good: list[bool] = []
    for i in itertools.count():  # until enough of them are texts of the grammar
        if len(good) >= EXAMPLES and sum(good) > EXAMPLES / 4:
            break
        rng = random.Random(f"{name} {i}")
        text = written(name, rng)
        at = rng.randrange(len(text) + 1)
        near = [text[:at] + rng.choice(letters) + text[at:], text[:at] + text[at + 1 :], text[:at]]
        for candidate in [text, *near]:
            accepted, through = parses(psi.lark, candidate), let_through(psi, cut(candidate, rng))
            assert through if accepted else not through or psi.notes, (accepted, candidate)
        good.append(parses(psi.lark, text))
        assert len(good) < 20 * EXAMPLES, "too few texts of the grammar are written"
