"""Knows constraints by JSON schemas: masks by llguidance's schema compiler, the last word by ``jsonschema``."""

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import exceptions, validators

from smcdecode.errors import InvalidOption, UnsupportedGrammar
from smcdecode.potentials.llg import Constraint
from smcdecode.potentials.text import shorten

__all__ = ["JsonSchema"]

BLANKS = r"\n? {0,16}"
ANY_BLANKS = r"[ \n\r\t]+"


class JsonSchema(Constraint):
    """``Ψ(x) = 1[x is JSON that satisfies a schema]``.

    Properties are written in the order of the schema, as masks want it; nothing stands before or after the value.

    Args:
        schema: a JSON schema as a mapping, or a pydantic model (a class), which then validates finished texts too.
        whitespace: a regex for the blanks between elements. By default at most one line break and 16 spaces of
            indentation: unlimited blanks let a model write nothing else until its tokens are used up. ``""``
            allows none, ``None`` any amount.
        name: in reports and messages; by default the schema's title.

    Raises:
        UnsupportedGrammar: the schema is no JSON schema, nothing satisfies it, or it uses a keyword that cannot be
            turned into token masks; the message names it.
        InvalidOption: ``schema`` is neither a mapping nor a pydantic model.

    Example:
        >>> JsonSchema({"title": "age", "type": "integer", "minimum": 0, "maximum": 150})
        JsonSchema('age')
    """

    def __init__(
        self, schema: Mapping[str, Any] | type, *, whitespace: str | None = BLANKS, name: str | None = None
    ) -> None:
        self.schema, self.model = _schema_of(schema)
        self._validator = _validator(self.schema)
        own = {**self.schema, "x-guidance": _spacing(whitespace)}
        title = name or str(self.schema.get("title") or "JSON schema")
        super().__init__(f"start: %json {json.dumps(own)}\n", self._validate, title)

    def _validate(self, text: str) -> str | None:
        """What is wrong with a finished text; None where nothing is."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except ValueError as error:
            return f"json: {error}"
        found = exceptions.best_match(self._validator.iter_errors(value))
        if found is not None:
            return f"jsonschema: {shorten(found.message)}"
        return self._modelled(text)

    def _modelled(self, text: str) -> str | None:
        if self.model is None:
            return None
        try:
            self.model.model_validate_json(text)
        except ValueError as error:  # pydantic's ValidationError is one
            return f"pydantic: {str(error).splitlines()[0]}"
        return None


def _schema_of(schema: Any) -> tuple[dict[str, Any], Any]:
    """The schema, and the pydantic model it came from, if any."""
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        return schema.model_json_schema(), schema
    if isinstance(schema, Mapping):
        return dict(schema), None
    raise InvalidOption(f"a JSON schema is a mapping or a pydantic model class; got {shorten(repr(schema))}")


def _validator(schema: dict[str, Any]) -> Any:
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except exceptions.SchemaError as error:
        raise UnsupportedGrammar(f"this is no JSON schema: {error.message}") from error
    return kind(schema)


def _spacing(whitespace: str | None) -> dict[str, Any]:
    """Options of llguidance for the blanks between elements."""
    if whitespace == "":
        return {"whitespace_flexible": False}
    return {"whitespace_flexible": True, "whitespace_pattern": ANY_BLANKS if whitespace is None else whitespace}


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
