"""The engine as what Ray Data maps batches by: tables of prompts in, tables of answers out. Knows columns."""

from collections.abc import Iterator, Mapping
from typing import Any

from smcdecode.errors import InvalidOption, SMCDecodeError
from smcdecode.integrations.batch.answering import Answering, Build, Room
from smcdecode.integrations.batch.columns import schema
from smcdecode.integrations.batch.rows import Row

__all__ = ["Answers"]


class Answers:
    """A callable class for :meth:`ray.data.Dataset.map_batches`: one engine an actor.

    Batches are Arrow tables, ``batch_format="pyarrow"``, with a column ``id`` and the other columns of a job's input.
    Answers are rows of the columns of a job's output, each as soon as it is there.

    Args:
        build: makes the engine's parts on the actor's node.
        room: what the engine may take.
        seed: the same seed, the same answers, however the data is cut.
        defaults: what a row that does not say is read to say.

    Raises:
        SMCDecodeError: what an engine cannot begin for.
    """

    def __init__(
        self, build: Build, *, room: Room, seed: int = 0, defaults: Mapping[str, Any] | None = None
    ) -> None:  # fmt: skip
        self._answering, self._seed, self._defaults = Answering(build, room), seed, defaults or {}

    def __call__(self, batch: Any) -> Iterator[Any]:
        """The answers to one batch, a table each.

        Raises:
            InvalidOption: a row has no id.
        """
        import pyarrow as pa

        rows, refused = self._read(batch.to_pylist())
        for answer in [*refused]:
            yield pa.Table.from_pylist([answer], schema=schema())
        for answer in self._answering.answers(rows):
            yield pa.Table.from_pylist([answer], schema=schema())

    def _read(self, given: list[dict[str, Any]]) -> tuple[list[Row], list[dict[str, Any]]]:
        """Rows that can be read, and the answers to those that cannot."""
        rows, refused = [], []
        for said in given:
            if said.get("id") is None:
                raise InvalidOption("every row needs an id: its seed is made of it, and its answer is known by it")
            try:
                rows.append(Row.of(said, seed=self._seed, defaults=self._defaults))
            except SMCDecodeError as error:
                refused.append({"id": str(said["id"]), "error": str(error)})
        return rows, refused
