"""The engine on a thread of its own: requests in, events out. Knows the scheduler and queues; no HTTP."""

import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Sequence

from smcdecode.engine.request import Request
from smcdecode.engine.scheduler import Outcome, Scheduler
from smcdecode.engine.scoring import log_probs
from smcdecode.errors import RankError

__all__ = ["Busy", "Done", "Event", "Failed", "Runner", "Settled"]


class Busy(Exception):
    """The queue is full, or the server is about to stop."""


@dataclasses.dataclass(frozen=True)
class Settled:
    """Tokens of a request that are final, all since its beginning."""

    tokens: list[int]


@dataclasses.dataclass(frozen=True)
class Done:
    """A request is done."""

    outcome: Outcome


@dataclasses.dataclass(frozen=True)
class Failed:
    """A request ended without an outcome."""

    error: Exception


Event = Settled | Done | Failed
Listener = Callable[[Event], None]


@dataclasses.dataclass(frozen=True)
class _Job:
    request: Request
    tell: Listener
    stream: bool


class Runner:
    """Feeds a scheduler from any thread. Listeners are called on the engine's thread and must return at once.

    Args:
        scheduler: of this runner alone.
        capacity: requests that may run or wait at a time.
    """

    def __init__(self, scheduler: Scheduler, capacity: int) -> None:
        self.scheduler, self.capacity = scheduler, capacity
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[int, _Job] = {}  # of the engine's thread
        self._live: set[int] = set()  # submitted and not over
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="smcdecode engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread is there."""
        return self._thread.is_alive()

    @property
    def live(self) -> int:
        """Requests that run or wait."""
        return len(self._live)

    def submit(self, jobs: Sequence[tuple[Request, Listener]], *, stream: bool) -> list[int]:
        """Hand over requests, all or none; each is known by a number from now on.

        Args:
            jobs: requests, whatever their ``index``, and who is told of them.
            stream: tell of settled tokens too.

        Raises:
            Busy: there is no room for them.
            OutOfPages, InvalidOption: one of them could not run, were it alone.
        """
        for request, _ in jobs:
            self.scheduler.check(request)
        with self._lock:
            if self._closed or len(self._live) + len(jobs) > self.capacity:
                raise Busy
            numbers = [next(self._numbers) for _ in jobs]
            self._live.update(numbers)
        for number, (request, tell) in zip(numbers, jobs, strict=True):
            job = _Job(dataclasses.replace(request, index=number), tell, stream)
            self._inbox.put(lambda job=job: self._add(job))  # type: ignore[misc]
        return numbers

    def cancel(self, number: int) -> None:
        """Forget a request, and free what it holds when the cycle that runs is over. Its listener hears no more."""
        self._inbox.put(lambda: self._drop(number))

    def score(self, request: Request, tokens: Sequence[int], tell: Callable[[list[float] | Exception], None]) -> None:
        """Have the log-probabilities of a text's tokens computed between two cycles."""
        self._inbox.put(lambda: tell(_attempt(request, tokens)))

    def close(self, patience: float) -> None:
        """Take no more requests, let those there are finish for so many seconds, end the others, stop the thread."""
        with self._lock:
            self._closed = True
        self._inbox.put(None)
        self._thread.join(patience)
        self._inbox.put(self._abandon)
        self._thread.join()

    # ---- on the engine's thread

    def _run(self) -> None:
        while self._take(wait=True):
            try:
                for outcomes in self.scheduler.run():
                    self._tell(outcomes)
                    self._take(wait=False)
            except Exception as error:  # whatever it is, those who wait must hear of it
                self._fail(error)
                if isinstance(error, RankError):
                    with self._lock:
                        self._closed = True  # nothing runs any more without the other ranks
                    return

    def _take(self, *, wait: bool) -> bool:
        """Do what was asked since; False once there is nothing left to do, for ever."""
        while True:
            try:
                ask = self._inbox.get(block=wait and not self._jobs and not self._closed)
            except queue.Empty:
                return not (self._closed and not self._jobs)
            if ask is not None:
                ask()

    def _add(self, job: _Job) -> None:
        self.scheduler.add(job.request)
        self._jobs[job.request.index] = job

    def _drop(self, number: int) -> None:
        if self._jobs.pop(number, None) is not None:
            self.scheduler.cancel(number)
        self._forget(number)

    def _forget(self, number: int) -> None:
        with self._lock:
            self._live.discard(number)

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        if any(job.stream for job in self._jobs.values()):
            for request, tokens in self.scheduler.settled():
                if self._jobs[request.index].stream:
                    self._jobs[request.index].tell(Settled(tokens))
        for outcome in outcomes:
            number = outcome.request.index
            job = self._jobs.pop(number)
            self._forget(number)
            job.tell(Done(outcome))

    def _fail(self, error: Exception) -> None:
        for number, job in self._jobs.items():
            self.scheduler.cancel(number)
            self._forget(number)
            job.tell(Failed(error))
        self._jobs.clear()

    def _abandon(self) -> None:
        self._fail(Busy())


def _attempt(request: Request, tokens: Sequence[int]) -> list[float] | Exception:
    try:
        return log_probs(request.target, request.prompt.tokens, tokens)
    except Exception as error:
        return error
