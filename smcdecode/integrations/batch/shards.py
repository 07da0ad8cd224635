"""The folder that a job's answers lie in: written once each, found again after anything. Knows files; no engine.

Every answer is a line of JSON, handed to the operating system as soon as it is there: what was written survives the end
of the process, however it ends, and a full shard is on the disk. A shard that is to be Parquet is made of its lines
when it is full, or the job done.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from smcdecode.errors import InvalidOption, OutputError
from smcdecode.integrations.batch.columns import COLUMNS, answers, id_of, schema
from smcdecode.integrations.batch.rows import parquet

__all__ = ["Kind", "Shards"]

Kind = Literal["jsonl", "parquet"]
SHARD = 10_000  # answers in a shard


class Shards:
    """The answers of one job in one folder, which no other process may write to meanwhile.

    Args:
        folder: made where it is not there.
        job: what tells this job from others, as JSON holds it; the folder remembers it.
        kind: of the files that are left in the end.

    Attributes:
        done: the ids that have their answer.
        repairs: what was found damaged, and what was done about it: a line each.

    Raises:
        InvalidOption: the folder holds another job, or another process writes to it.
        OutputError: it cannot be written to.
    """

    def __init__(self, folder: str | Path, job: Mapping[str, Any], kind: Kind) -> None:
        self.folder, self.kind = Path(folder), kind
        self.repairs: list[str] = []
        self._file: IO[bytes] | None = None
        if kind == "parquet":
            parquet()  # missing, it is so now
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
            with contextlib.ExitStack() as unless_opened:
                unless_opened.callback(self._lock.close)
                self._open(job)
                unless_opened.pop_all()

    def write(self, answer: Mapping[str, Any]) -> None:
        """Write an answer, unless its prompt has one.

        Raises:
            OutputError: the disk is full, or otherwise cannot be written to; what was written before is whole.
        """
        if answer["id"] in self.done:
            return
        held = {name: answer.get(name) for name in COLUMNS}
        line = json.dumps(held, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with _writing(self.folder):
            self._append(line)
        self.done.add(answer["id"])
        self._rows += 1
        if self._rows == SHARD:
            self._end_shard()

    def close(self) -> None:
        """Finish the shard that is open, and let others have the folder."""
        try:
            self._end_shard()
        finally:
            self._lock.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All answers, shard by shard."""
        for path in self._shards():
            yield from answers(path)

    # ---- inside

    def _open(self, job: Mapping[str, Any]) -> None:
        self._same(job)
        self.done = {name for path in self._shards() for name in self._ids(path)}
        for path in self._shards():
            self._convert(path)
        self._next = 1 + max((_number(path) for path in self._shards()), default=-1)

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self._path = self.folder / f"part-{self._next:05d}.jsonl"
            self._file, self._rows = self._path.open("ab", buffering=0), 0
            self._next += 1
        whole = self._file.tell()
        try:
            written = self._file.write(line)
            if written != len(line):
                written += self._file.write(line[written:])  # says what is wrong, or writes the rest
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes could be written")
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(whole)
            raise

    def _end_shard(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        with _writing(self.folder):
            os.fsync(file.fileno())
            file.close()
            self._convert(self._path)

    def _convert(self, path: Path) -> None:
        """Make a shard of lines what it is to be."""
        if self.kind == "jsonl" or path.suffix != ".jsonl":
            return
        held = list(answers(path))
        if held:
            import pyarrow as pa

            partial, final = path.with_suffix(".partial"), path.with_suffix(".parquet")
            parquet().write_table(pa.Table.from_pylist(held, schema=schema()), partial)
            _sync(partial)
            partial.replace(final)
        path.unlink()

    def _shards(self) -> list[Path]:
        """Files of answers; lines of which a Parquet file was made already do not count, and go."""
        for path in self.folder.glob("part-*.partial"):
            path.unlink()
        for path in self.folder.glob("part-*.jsonl"):
            if path.with_suffix(".parquet").exists():
                path.unlink()
        return sorted([*self.folder.glob("part-*.jsonl"), *self.folder.glob("part-*.parquet")])

    def _ids(self, path: Path) -> list[str]:
        """The ids in a shard, after what is damaged was put aside."""
        if path.suffix != ".parquet":
            return self._mended(path)
        try:
            return list(map(str, parquet().read_table(path)["id"].to_pylist()))
        except (ValueError, KeyError, OSError):  # what pyarrow raises of damaged files
            path.replace(path.with_name(path.name + ".damaged"))
        self.repairs.append(f"{path} is damaged: it is {path.name}.damaged now, and its prompts are run again")
        return []

    def _mended(self, path: Path) -> list[str]:
        """The ids of whole lines; a torn last line is cut off, other damage put aside."""
        lines = path.read_bytes().splitlines(keepends=True)
        names = [id_of(line) for line in lines]
        if None not in names:
            return [name for name in names if name is not None]
        good = [line for line, name in zip(lines, names, strict=True) if name is not None]
        if None in names[:-1]:
            shutil.copy(path, path.with_name(path.name + ".damaged"))
            self.repairs.append(
                f"{path}: {len(lines) - len(good)} of {len(lines)} answers are damaged, and their prompts are run "
                f"again; the file as it was is {path.name}.damaged"
            )
        else:
            self.repairs.append(f"{path}: the last answer was not written to its end, and its prompt is run again")
        partial = path.with_suffix(".partial")
        partial.write_bytes(b"".join(good))
        _sync(partial)
        partial.replace(path)
        return [name for name in names if name is not None]

    def _locked(self) -> IO[str]:
        lock = (self.folder / "job.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
        except BlockingIOError as error:
            lock.close()
            raise InvalidOption(
                f"another process writes to {self.folder}: wait for it, or name another folder"
            ) from error
        return lock

    def _same(self, job: Mapping[str, Any]) -> None:
        """Remember the job, or see that it is the one that the folder remembers."""
        path, held = self.folder / "job.json", json.loads(json.dumps(job))
        if not path.exists():
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(held, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            _sync(partial)
            partial.replace(path)
            return
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidOption(f"{path} is damaged: {error}; delete it to go on with this job") from error
        differ = [name for name in {**known, **held} if known.get(name) != held.get(name)]
        if differ:
            told = "; ".join(f"{name} was {known.get(name)!r} and is {held.get(name)!r}" for name in differ)
            raise InvalidOption(f"{self.folder} holds the answers of another job: {told}. Name another folder")


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write to {folder}: {error.strerror or error}. What was written is whole: make room, and give the "
            "same command again, which goes on from there"
        ) from error


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
