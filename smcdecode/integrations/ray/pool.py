"""Many engines on a Ray cluster, one an actor: rows in, answers out, whatever dies meanwhile. Knows Ray; no file.

Ray itself restarts nothing here. When an engine is lost, with its process or its node, the rows that it had not
answered are given to others in smaller pieces; of a row that two engines were lost over by itself, that is the answer.
Seeds belong to rows, so an answer is the same whoever gives it.
"""

import collections
import dataclasses
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from smcdecode.errors import InvalidOption, SMCDecodeError
from smcdecode.integrations.batch.answering import Answering, Build, Room, refusal
from smcdecode.integrations.batch.rows import Row

__all__ = ["Cluster", "Pool", "Worker", "needs_ray", "pool"]

_CHUNK = 512  # most rows that are handed to an engine at once
_PIECES = 8  # into which the rows of a lost engine are split
_TRIES = 2  # engines that may be lost over one row alone
_FALSE_STARTS = 3  # engines that may be lost in a row before any answers


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where engines run, and what each of them gets.

    Args:
        address: "local" starts a cluster on this machine for the time of the job; anything else is Ray's own: "auto",
            or host:port.
        engines: how many run at once, as soon as the cluster has room for them.
        cpus: cores of one engine; on a CPU, also its threads.
        gpus: GPUs of one engine.
    """

    address: str = "local"
    engines: int = 1
    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.engines < 1 or self.cpus < 0 or self.gpus < 0:
            raise InvalidOption(
                f"a cluster has one engine or more, each of some cores and GPUs; got engines={self.engines}, "
                f"cpus={self.cpus:g}, gpus={self.gpus:g}"
            )


class Worker:
    """One engine, as an actor."""

    def __init__(self, build: Build, room: Room, cluster: Cluster) -> None:
        self._build, self._room, self._cluster = build, room, cluster
        self._answering: Answering | None = None

    def start(self) -> None:
        """Make the engine."""
        room, cluster = self._room, self._cluster
        if room.memory <= 1 and not cluster.gpus:  # others of this node take their own part
            room = dataclasses.replace(room, memory=room.memory * min(1.0, cluster.cpus / (os.cpu_count() or 1)))
        self._answering = Answering(self._build, room)

    def answers(self, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """See :meth:`Answering.answers`."""
        assert self._answering is not None
        yield from self._answering.answers(rows)


def needs_ray() -> Any:
    """Ray.

    Raises:
        InvalidOption: it is missing; names the extra.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InvalidOption("many machines need Ray: install smcdecode[ray]") from error


def pool(build: Build, room: Room, cluster: Cluster, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The answers of many engines, each as soon as it is there, in any order.

    Uses the cluster that this process is connected to, if it is to one.

    Args:
        build: makes the parts of one engine, on whatever node it is called.
        room: of one engine. A share of memory is the share of what its node has free; engines of cores alone take the
            part of it that their cores are of all.
        cluster: where.
        rows: what is to be answered.

    Raises:
        SMCDecodeError: what an engine cannot begin for.
        InvalidOption: Ray is missing, or the cluster cannot be reached.
    """
    ray = needs_ray()
    mine = not ray.is_initialized()
    if mine:
        _connect(ray, cluster)
    try:
        yield from Pool(ray, build, room, cluster, rows).answers()
    finally:
        if mine:
            ray.shutdown()


def _connect(ray: Any, cluster: Cluster) -> None:
    local = cluster.address == "local"
    own: dict[str, Any] = {}
    if local:
        wanted = max(os.cpu_count() or 1, round(cluster.engines * cluster.cpus + 0.5))
        own = {"num_cpus": wanted, "include_dashboard": False}
    try:
        ray.init(cluster.address, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InvalidOption(f"no Ray cluster at {cluster.address!r}: {error}") from error


@dataclasses.dataclass(eq=False)
class _Engine:
    actor: Any
    waits: Any  # what is next heard of it: that it has begun, or an answer
    left: dict[str, Row] = dataclasses.field(default_factory=dict)  # its rows without an answer
    begun: bool = False


class Pool:
    """The engines of one job, and the rows that nobody has yet."""

    def __init__(self, ray: Any, build: Build, room: Room, cluster: Cluster, rows: Sequence[Row]) -> None:
        self.ray, self.build, self.room, self.cluster = ray, build, room, cluster
        self._fresh = collections.deque(rows)
        self._again: collections.deque[list[Row]] = collections.deque()  # of lost engines, in pieces
        self._strikes: collections.Counter[str] = collections.Counter()
        self._false_starts = 0
        self._engines: list[_Engine] = []

    def answers(self) -> Iterator[dict[str, Any]]:
        """Until every row has one."""
        try:
            self._engines = [self._actor() for _ in range(min(self.cluster.engines, len(self._fresh)))]
            while self._fresh or self._again or any(engine.left for engine in self._engines):
                heard = {engine.waits: engine for engine in self._engines if engine.waits is not None}
                for told in self.ray.wait(list(heard), num_returns=1)[0]:
                    yield from self._hear(heard[told])
        finally:
            for engine in self._engines:
                self.ray.kill(engine.actor)

    def _actor(self) -> _Engine:
        cluster = self.cluster
        kind = self.ray.remote(Worker).options(
            num_cpus=cluster.cpus, num_gpus=cluster.gpus, max_restarts=0, max_task_retries=0,
            scheduling_strategy="SPREAD",
        )  # fmt: skip
        actor = kind.remote(self.build, self.room, cluster)
        return _Engine(actor, actor.start.remote())

    def _hear(self, engine: _Engine) -> Iterator[dict[str, Any]]:
        """What there is of an engine; one that has nothing to do gets rows."""
        try:
            if not engine.begun:
                self.ray.get(engine.waits)
                engine.begun = True
                self._employ(engine)
                return
            answer = self.ray.get(next(engine.waits))
        except StopIteration:
            self._employ(engine)
        except self.ray.exceptions.RayError as error:
            yield from self._lose(engine, error)
        else:
            self._false_starts = 0
            if engine.left.pop(answer["id"], None) is not None:
                yield answer

    def _employ(self, engine: _Engine) -> None:
        assert not engine.left, "an engine answers every row"
        rows = self._again.popleft() if self._again else self._take()
        engine.left = {row.id: row for row in rows}
        answers = engine.actor.answers.options(num_returns="streaming")
        engine.waits = answers.remote(rows) if rows else None

    def _take(self) -> list[Row]:
        """Rows that nobody had: fewer as they run out, so that engines end together."""
        engines = len(self._engines)
        share = -(-len(self._fresh) // (1 if engines == 1 else 2 * engines))
        size = min(max(share, self.room.lanes), _CHUNK, len(self._fresh))
        return [self._fresh.popleft() for _ in range(size)]

    def _lose(self, engine: _Engine, error: Exception) -> Iterator[dict[str, Any]]:
        """Another engine in the place of one that ended, and its rows to whoever is free."""
        if not engine.begun:
            self._false_start(error)
        self.ray.kill(engine.actor)
        self._engines[self._engines.index(engine)] = self._actor()
        rows = list(engine.left.values())
        if len(rows) == 1:
            self._strikes[rows[0].id] += 1
            if self._strikes[rows[0].id] == _TRIES:
                why = f"{_TRIES} engines were lost over this prompt alone: {_told(error)}"
                yield refusal(rows[0], SMCDecodeError(why))
                return
        size = max(1, -(-len(rows) // _PIECES))
        self._again.extend(rows[i : i + size] for i in range(0, len(rows), size))
        self._wake()

    def _wake(self) -> None:
        """Give what was lost to engines that had nothing left to do."""
        for engine in self._engines:
            if self._again and engine.begun and engine.waits is None:
                self._employ(engine)

    def _false_start(self, error: Exception) -> None:
        cause = getattr(error, "cause", None)
        if isinstance(cause, SMCDecodeError):
            raise cause
        self._false_starts += 1
        if self._false_starts == _FALSE_STARTS:
            raise SMCDecodeError(f"{_FALSE_STARTS} engines ended before they began: {_told(error)}") from error


def _told(error: Exception) -> str:
    """What ended an engine, in a line."""
    cause = getattr(error, "cause", None)
    return f"{type(cause).__name__}: {cause}" if cause is not None else " ".join(str(error).split("\n")[:1])
