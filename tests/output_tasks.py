"""Constraints with prompts, and for each what must hold of a finished text by Python's own means."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import jsonschema
import lark

import smcdecode as smc

PHONE = r" \([0-9]{3}\) [0-9]{3}-[0-9]{4}"
WORDS = r" (?:[a-zé]{2,9} ){2,4}[a-zé]{2,9}[.!?]"
YES_NO = " (yes|no)"
DATE = r" [12][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
SQL = r"""
    start: "SELECT " columns " FROM " TABLE where? ";"
    columns: "*" | COLUMN (", " COLUMN)*
    where: " WHERE " COLUMN (" = " | " < " | " > ") NUMBER
    TABLE: "users" | "orders"
    COLUMN: "id" | "name" | "age" | "price"
    NUMBER: /[0-9]{1,4}/
"""
SUM = r"""
    ?start: product | start "+" product | start "-" product
    ?product: atom | product "*" atom
    ?atom: NUMBER | "(" start ")"
    NUMBER: /[0-9]{1,3}/
    %ignore " "
"""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["Rome", "Oslo", "São Paulo"]},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
FLAGS = {"type": "array", "items": {"type": ["boolean", "null"]}, "minItems": 1, "maxItems": 3}


@dataclass(frozen=True)
class Task:
    """A constraint at work."""

    name: str
    psi: smc.Potential
    prompt: str
    max_tokens: int
    good: Callable[[str], bool]


def full(pattern: str) -> Callable[[str], bool]:
    """By ``re``."""
    return lambda text: re.fullmatch(pattern, text) is not None


def parsed(grammar: str, parser: str) -> Callable[[str], bool]:
    """By Lark; Earley where the task is compiled by LALR, and the other way round."""
    reader = lark.Lark(grammar, parser=parser)

    def good(text: str) -> bool:
        try:
            reader.parse(text)
        except lark.exceptions.LarkError:
            return False
        return True

    return good


def valid(schema: dict) -> Callable[[str], bool]:
    """By ``jsonschema``."""

    def good(text: str) -> bool:
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True

    return good


def after(delimiter: str, good: Callable[[str], bool]) -> Callable[[str], bool]:
    """Of what follows the first delimiter."""

    def check(text: str) -> bool:
        _, found, rest = text.partition(delimiter)
        return bool(found) and good(rest)

    return check


def regions(good: Callable[[str], bool]) -> Callable[[str], bool]:
    """Of everything in round brackets, all of which are closed."""

    def check(text: str) -> bool:
        contents = re.findall(r"\((.*?)\)", text, re.DOTALL)
        return "(" not in re.sub(r"\(.*?\)", "", text, flags=re.DOTALL) and all(map(good, contents))

    return check


def tasks() -> list[Task]:
    """All of them; constraints are declared anew."""
    no_u = smc.Predicate(lambda text: "u" not in text.lower(), on="text", name="no u")
    year = full("1[0-9]{3}")
    return [
        Task("phone", smc.Regex(PHONE), "Ann: (212) 555-0143\nBen: (415) 555-0178\nCleo:", 24, full(PHONE)),
        Task("words", smc.Regex(WORDS), "A sentence:", 32, full(WORDS)),
        Task("date", smc.Regex(DATE), "Apollo 11 landed on 1969-07-20, Apollo 17 on", 16, full(DATE)),
        Task("sql", smc.Grammar(SQL), "In SQL, users older than 30:\n", 32, parsed(SQL, "earley")),
        Task("sum", smc.Grammar(SUM), "12 as a sum of three numbers: ", 24, parsed(SUM, "lalr")),
        Task("person", smc.JsonSchema(PERSON), "A person as JSON:\n", 48, valid(PERSON)),
        Task("flags", smc.JsonSchema(FLAGS), "Answers as a JSON list:\n", 24, valid(FLAGS)),
        Task(
            "no u sql", smc.Grammar(SQL) * no_u, "In SQL, names and prices of orders:\n", 32,
            lambda text: parsed(SQL, "earley")(text) and "u" not in text.lower(),
        ),
        Task("after", smc.After(":", smc.Regex(YES_NO)), "Is seven prime? Answer", 10, after(":", full(YES_NO))),
        Task(
            "between", smc.Between("(", ")", smc.Regex("1[0-9]{3}"), required=False),
            "Births: Isaac Newton (1643), Charles Darwin (1809),", 16, regions(year),
        ),
    ]  # fmt: skip
