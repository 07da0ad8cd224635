"""What is said of each prompt: the columns of an answer, as lines of JSON and as Arrow. Knows no folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smcdecode.integrations.batch.rows import parquet

__all__ = ["COLUMNS", "answers", "id_of", "schema"]

COLUMNS = {
    "id": "string",
    "text": "string",  # one draw of the posterior; null where there is none, and error says why
    "finish_reason": "string",  # stop, length, no_survivors; null where the prompt could not be served
    "texts": "list<string>",  # the N particles
    "weights": "list<double>",  # (N,) normalised
    "log_z": "double",  # null where it is not finite
    "log_z_error": "double",
    "ess": "double",
    "ess_lowest": "double",
    "particles": "int64",
    "seed": "int64",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "error": "string",
}


def schema() -> Any:
    """The columns as an Arrow schema."""
    import pyarrow as pa

    types = {
        "string": pa.string(), "double": pa.float64(), "int64": pa.int64(), "list<string>": pa.list_(pa.string()),
        "list<double>": pa.list_(pa.float64()),
    }  # fmt: skip
    return pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])


def answers(path: Path) -> Iterator[dict[str, Any]]:
    """The answers in a shard."""
    if path.suffix == ".parquet":
        yield from parquet().read_table(path).to_pylist()
        return
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def id_of(line: bytes) -> str | None:
    """The id of an answer's line; None for what is no such line."""
    try:
        held = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return (
        held["id"] if isinstance(held, dict) and isinstance(held.get("id"), str) and set(held) == set(COLUMNS) else None
    )
