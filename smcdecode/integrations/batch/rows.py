"""What a job is asked: rows of JSONL or Parquet → bodies, each with an id and a seed. Knows files; no engine."""

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from smcdecode.engine.prompts import is_one
from smcdecode.errors import InvalidOption, SMCDecodeError
from smcdecode.integrations.server.schema import ChatRequest, CompletionRequest

__all__ = ["Body", "Row", "digest", "longest", "parquet", "read", "rows_of"]

Body = CompletionRequest | ChatRequest
_OF_A_SERVER = ("model", "n", "stream", "stream_options", "logprobs")  # fields of a request that a row cannot have
_SHOWN = 5  # of the complaints about one input


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt of a job, with what is asked of it."""

    id: str
    body: Body

    @classmethod
    def of(cls, given: Mapping[str, Any], *, seed: int, defaults: Mapping[str, Any]) -> "Row":
        """Read a row.

        Args:
            given: ``id``, ``prompt`` or ``messages``, and whatever else a request to the server may say. Where a
                table's columns cannot hold that, ``body`` is all of it but the id, as JSON. None is nothing.
            seed: of the job.
            defaults: what a row that does not say is read to say; its ``smc`` field by field.

        Raises:
            InvalidOption: the row asks for something that does not exist; the message names the field.
        """
        said = {name: value for name, value in given.items() if value is not None}
        name = said.pop("id", None)
        if not isinstance(name, str | int) or isinstance(name, bool) or not str(name).isprintable():
            raise InvalidOption(f"a row's id is a string of printable characters, or a whole number; got {name!r}")
        said |= _json_body(said.pop("body", None))
        for field in _OF_A_SERVER:
            if field in said:
                raise InvalidOption(f"a row cannot say {field!r}: it is answered by one run of the job's model")
        own = {field: value for field, value in said.get("smc", {}).items() if value is not None}
        merged = {**defaults, **said, "smc": {**defaults.get("smc", {}), **own}, "model": ""}
        merged.setdefault("seed", seed_of(seed, str(name)))
        return cls(str(name), _body(merged))


def seed_of(seed: int, name: str) -> int:
    """The seed of one prompt: of the job's seed and the prompt's id alone, so wherever and whenever it is run."""
    return int.from_bytes(hashlib.blake2b(repr((seed, name)).encode(), digest_size=8).digest(), "little") >> 1


def _json_body(text: Any) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        held = json.loads(text)
    except (TypeError, ValueError) as error:
        raise InvalidOption(f"the body of a row is the JSON text of an object: {error}") from error
    if not isinstance(held, dict):
        raise InvalidOption("the body of a row is the JSON text of an object")
    return {name: value for name, value in held.items() if value is not None}


def _body(said: dict[str, Any]) -> Body:
    if ("prompt" in said) == ("messages" in said):
        raise InvalidOption("a row has either a prompt or messages")
    try:
        if "messages" in said:
            return ChatRequest.model_validate(said)
        body = CompletionRequest.model_validate(said)
    except ValidationError as error:
        told = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:_SHOWN]]
        raise InvalidOption("; ".join(told)) from error
    if not is_one(body.prompt):
        raise InvalidOption("a row has one prompt: a string, or token ids")
    return body


def rows_of(
    given: Iterable[tuple[str, Mapping[str, Any]]], *, seed: int, defaults: Mapping[str, Any]
) -> list[Row]:  # fmt: skip
    """All rows of a job, read before anything runs.

    Args:
        given: where each row stands, for messages, and the row; one without an id is known by its number from 0.
        seed: of the job.
        defaults: see :meth:`Row.of`.

    Raises:
        InvalidOption: rows that cannot be read, up to five of them named; or two rows of one id.
    """
    rows: dict[str, Row] = {}
    wrong: list[str] = []
    for number, (place, said) in enumerate(given):
        try:
            row = Row.of({"id": number, **said}, seed=seed, defaults=defaults)
            if row.id in rows:
                raise InvalidOption(f"another row has the id {row.id!r}")
        except SMCDecodeError as error:
            wrong.append(f"{place}: {error}")
            continue
        rows[row.id] = row
    if wrong:
        more = f"\n… and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise InvalidOption("nothing was run, because of\n" + "\n".join(wrong[:_SHOWN]) + more)
    if not rows:
        raise InvalidOption("the input has no rows")
    return list(rows.values())


def longest(rows: Sequence[Row]) -> int:
    """Most tokens that any row asks for."""
    asked = (getattr(row.body, "max_completion_tokens", None) or row.body.max_tokens or 16 for row in rows)
    return max(asked)


def digest(rows: Iterable[Row]) -> str:
    """What tells one input from another: rows and their order do not matter, what they ask does."""
    total = hashlib.blake2b(digest_size=16)
    for line in sorted(json.dumps([row.id, row.body.model_dump(mode="json")], sort_keys=True) for row in rows):
        total.update(line.encode())
    return total.hexdigest()


def read(paths: Iterable[str | Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of files, one after another, each with its place: ``prompts.jsonl:3``.

    Raises:
        InvalidOption: a file is not there, is of another kind, or is damaged; the message names it.
    """
    readers = {".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet}
    for path in map(Path, paths):
        if path.suffix not in readers:
            raise InvalidOption(f"{path}: prompts are read from .jsonl and .parquet files")
        try:
            yield from readers[path.suffix](path)
        except OSError as error:
            raise InvalidOption(f"{path} cannot be read: {error}") from error


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                said = json.loads(line)
            except ValueError as error:
                raise InvalidOption(f"{path}:{number} is no JSON: {error}") from error
            if not isinstance(said, dict):
                raise InvalidOption(f"{path}:{number} is no JSON object")
            yield f"{path}:{number}", said


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    arrow = parquet()
    try:
        with arrow.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for said in batch.to_pylist():
                    yield f"{path}, row {number}", said
                    number += 1
    except ValueError as error:  # what pyarrow raises of damaged files
        raise InvalidOption(f"{path} is no Parquet file that can be read: {error}") from error


def parquet() -> Any:
    """The module that reads and writes Parquet.

    Raises:
        InvalidOption: it is missing; names the extra.
    """
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise InvalidOption("Parquet files need pyarrow: install smcdecode[batch], or use .jsonl") from error
