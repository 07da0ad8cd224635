"""Processes that hold a model together: rank 0 decides, the others do their share. Knows process groups, no model.

A call that every rank makes is *one* run: rank 0 draws, weighs and resamples, and tells the others what each pass of
the model reads; they run the pass with it and wait for the next. So there is one set of decisions, whatever potentials,
clocks or rounding would say elsewhere, and every rank gets what came out.
"""

import contextlib
import functools
import hashlib
import itertools
import pickle
import reprlib
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from smcdecode.engine.wire import Wire
from smcdecode.errors import InvalidOption, RankError

__all__ = ["Ranks", "alone", "first", "joined", "ranks_of", "together"]

T = TypeVar("T")

_READY, _ITEM, _END = "ready", "item", "end"


def joined() -> "Ranks":
    """The ranks of this process's group, which is made from what torchrun says if there is none.

    Raises:
        InvalidOption: nobody says which rank this is.
    """
    if not dist.is_initialized():
        device = torch.accelerator.current_accelerator(check_available=True)
        try:
            if device is not None:
                torch.accelerator.set_device_index(dist.get_node_local_rank(0))
            dist.init_process_group("nccl" if device is not None and device.type == "cuda" else "gloo")
        except ValueError as error:
            raise InvalidOption(
                "parallel=True is for the processes that torchrun starts, and this is none of them: "
                "torchrun --nproc-per-node 2 script.py"
            ) from error
    return _ranks(dist.group.WORLD)


@functools.cache
def _ranks(_world: Any) -> "Ranks":
    return Ranks()


def alone() -> bool:
    """Whether this process is no rank of several."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def first() -> bool:
    """Whether this process speaks for all: it is alone, or rank 0."""
    return alone() or dist.get_rank() == 0


def ranks_of(target: Any) -> "Ranks | None":
    """The ranks that hold the model of a target; None where one process does."""
    goal = target.as_target() if hasattr(target, "as_target") else target
    found: Ranks | None = getattr(getattr(goal, "model", None), "ranks", None)
    return found


def together(target: Any, work: Callable[[], T], /, **terms: object) -> T:
    """What ``work`` returns, done once for all ranks of the target's model; see :meth:`Ranks.together`."""
    ranks = ranks_of(target)
    return work() if ranks is None else ranks.together(work, {"target": str(target.as_target()), **terms})


class Ranks:
    """All ranks of the default process group.

    Attributes:
        rank: this process's.
        size: how many there are.
        wire: what they say to one another by.
        leading: whether this is rank 0 and inside a call: what it does, all must do.
    """

    def __init__(self) -> None:
        self.wire = Wire()
        self.rank, self.size = self.wire.rank, self.wire.size
        self.leading = self._open = False
        self._members: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def enter(self, member: Any) -> int:
        """A number for an object that every rank has one of; all must enter theirs in the same order.

        Args:
            member: whose ``over()`` is called where a call of rank 0's ends.
        """
        number = next(self._numbers)
        self._members[number] = member
        return number

    def together(self, work: Callable[[], T], terms: Mapping[str, object]) -> T:
        """Do some work on rank 0, the others' passes with it, and return what it gave, on every rank.

        Args:
            work: called on rank 0 alone; what it raises is raised on every rank.
            terms: what was asked for, by name; must be the same on every rank.

        Raises:
            InvalidOption: the ranks were asked for different things.
            RankError: another rank is gone, or does not come.
        """

        def once() -> Generator[T, None, None]:
            yield work()

        [result] = self.relay(once, terms)
        return result

    def relay(
        self, make: Callable[[], Generator[T, None, None]], terms: Mapping[str, object]
    ) -> Generator[T, None, None]:
        """Items that rank 0 makes one by one, on every rank; arguments and errors as of :meth:`together`.

        ``make`` is called before this returns; each rank ends the call by reading all items, or by closing them.
        """
        if self.leading:
            return make()
        if self._open:
            raise InvalidOption("a stream of a model on several ranks is open: read it to its end, or close it, first")
        self._agree(terms)
        items = self._follow() if self.rank else self._lead(make)
        next(items)
        return items

    def tell(self, member: int, verb: str, *args: Any) -> None:
        """Have the other ranks call a method of theirs of an object; to be asked of the rank that leads."""
        self.wire.send((member, verb, args))

    def everywhere(self, work: Callable[..., T], *args: Any) -> list[T]:
        """What a function, known by its module, gives on each rank; to be asked of the rank that leads."""
        own = work(*args)
        self.wire.send((-1, "_answer", (work, args)))
        return self.wire.exchange(own)

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A pass of all ranks: the loss of one has its own error, and a pass that fails here leaves them apart."""
        try:
            yield
        except Exception as error:
            if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
                raise self.wire.lost(error) from error
            self.wire.broken = (
                f"rank {self.rank} failed in a pass that the others still wait for ({type(error).__name__})"
            )
            raise

    # ---- inside a call

    def _lead(self, make: Callable[[], Generator[Any, None, None]]) -> Generator[Any, None, None]:
        self.leading, reason = True, None
        try:
            with contextlib.closing(make()) as items:
                self.wire.send((_READY,))
                yield self._suspended()
                for item in self._resumed(items):
                    self.wire.send((_ITEM, item))
                    yield self._suspended(item)
        except GeneratorExit:
            raise
        except BaseException as error:
            reason = _sendable(error)
            raise
        finally:
            self.leading = self._open = False
            if self.wire.broken is None:
                with contextlib.suppress(RankError):
                    self.wire.send((_END, reason))

    def _suspended(self, item: Any = None) -> Any:
        """Between two items rank 0 is the caller's."""
        self.leading, self._open = False, True
        return item

    def _resumed(self, items: Iterator[Any]) -> Iterator[Any]:
        """Items, each made while leading."""
        while True:
            self.leading, self._open = True, False
            try:
                item = next(items)
            except StopIteration:
                return
            yield item

    def _follow(self) -> Generator[Any, None, None]:
        """Do what rank 0 tells until it ends the call; gives a None, then its items."""
        over = False
        try:
            while True:
                what, *rest = self.wire.receive()
                if what == _END:
                    over = True
                    if rest[0] is not None:
                        raise rest[0]
                    return
                if what in (_READY, _ITEM):
                    self._open = True
                    yield rest[0] if rest else None
                    self._open = False
                else:
                    self._obey(what, *rest)
        except GeneratorExit:
            while not over and (order := self.wire.receive())[0] != _END:  # the others may still read
                if order[0] not in (_READY, _ITEM):
                    self._obey(*order)
            raise
        finally:
            self._open = False
            for member in list(self._members.values()):
                member.over()

    def _obey(self, member: int, verb: str, args: tuple[Any, ...]) -> None:
        getattr(self if member < 0 else self._members[member], verb)(*args)

    def _answer(self, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.wire.exchange(work(*args))

    def _agree(self, terms: Mapping[str, object]) -> None:
        """Make sure that all ranks ask for the same."""
        mine = {
            name: (hashlib.sha256(repr(value).encode()).digest(), reprlib.repr(value)[:120])
            for name, value in terms.items()
        }
        for rank, other in enumerate(self.wire.exchange(mine)):
            for name in mine.keys() | other.keys():
                (one, here), (two, there) = (held.get(name, (b"", "not asked for")) for held in (mine, other))
                if one != two:
                    raise InvalidOption(
                        f"the ranks of one model must make the same calls, but {name} is {here} on rank {self.rank} "
                        f"and {there} on rank {rank}"
                    )


def _sendable(error: BaseException) -> BaseException:
    """An error as other ranks can raise it."""
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            copy: Exception = pickle.loads(pickle.dumps(error))
            return copy
    return RankError(f"rank 0 stopped with {type(error).__name__}: {error}")
