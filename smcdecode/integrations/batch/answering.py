"""Rows → answers, on one engine of this process: many at once, each as soon as it is done. Knows no file and no Ray."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft
from smcdecode.engine.memory import least_bytes
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.request import Request
from smcdecode.engine.scheduler import Outcome, Scheduler
from smcdecode.engine.stats import Stats
from smcdecode.errors import PromptError, RankError, SMCDecodeError
from smcdecode.integrations.batch.rows import Row
from smcdecode.integrations.batch.watched import watched
from smcdecode.integrations.server.answers import Answer
from smcdecode.integrations.server.asking import Asking
from smcdecode.integrations.server.limits import Limits
from smcdecode.integrations.server.sandbox import Sandbox
from smcdecode.potentials.potential import Potential, Product

__all__ = ["Answering", "Build", "Parts", "Room", "here", "refusal"]

_NO_LIMIT = 1 << 40  # of what strangers are granted little


@dataclasses.dataclass(frozen=True)
class Parts:
    """What answers: a model, how it is sampled from, and what every answer is weighed by besides."""

    p: LanguageModel
    method: SMC
    potentials: Sequence[Potential] = ()


Build = Callable[[], Parts]
"""Makes the parts where they are to run: in this process, or in another that it was sent to."""


@dataclasses.dataclass(frozen=True)
class Room:
    """What one engine may take."""

    max_tokens: int  # of the longest answer
    lanes: int = 16  # prompts that run at once
    memory: float = 0.5  # for keys, values and logits: a fraction of what is free, or bytes
    potential_seconds: float = 60.0  # for one call of a potential


class Answering:
    """One engine that answers rows.

    Args:
        build: makes its parts.
        room: what it may take.

    Raises:
        PromptError: the model has no tokenizer.
        OutOfPages: the memory does not hold one prompt.
    """

    def __init__(self, build: Build, room: Room) -> None:
        parts = build()
        p, proposal = parts.p, parts.method.proposal
        if p.tokenizer is None:
            raise PromptError(f"{p.name} has no tokenizer, and a job's answers are texts: smc.load((model, tokenizer))")
        drafts: list[Any] = [proposal.network] if isinstance(proposal, Draft) and proposal.network else []
        self.scheduler = Scheduler.open(
            p, drafts, parts.method, lanes=room.lanes, memory=least_bytes(p, room.memory),
            max_tokens=room.max_tokens, page_size=1, stats=Stats(),
        )  # fmt: skip
        limits = Limits(
            lanes=room.lanes, queue=_NO_LIMIT, max_tokens=room.max_tokens, particles=_NO_LIMIT, block=_NO_LIMIT,
            choices=1,
        )  # fmt: skip
        self._sandbox = Sandbox(limits)
        self._warm = False
        self._asking = Asking(p, parts.method, limits, self._sandbox)
        self._watched = [watched(psi, room.potential_seconds) for psi in _factors(parts.potentials)]
        self._jobs: dict[int, tuple[Row, Request]] = {}  # handed to the scheduler, by the request's index
        self._count = 0

    def answers(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """The answer to each row once, in the order in which they are done; see ``COLUMNS``.

        A row that cannot be answered gets one that says why, and harms no other. When the engine fails at rows that ran
        together, each of them is run again by itself.

        Raises:
            Exception: what the engine raised at one row alone, if it is not of a kind that a row is to blame for.
        """
        left = iter(rows)
        yield from self._fill(left)
        while self._jobs:
            try:
                for outcomes in self.scheduler.run():
                    for outcome in outcomes:
                        yield self._answer(outcome)
                    yield from self._fill(left)
            except Exception as error:
                yield from self._one_by_one(error)
            yield from self._fill(left)

    def close(self) -> None:
        """End the processes that read constraints."""
        self._sandbox.close()

    def _fill(self, left: Iterator[Row]) -> Iterator[dict[str, Any]]:
        """Hand rows to the scheduler until enough wait; the answers of those that it cannot run."""
        while self.scheduler.waiting < self.scheduler.budget.lanes:
            row = next(left, None)
            if row is None:
                return
            try:
                request = self._read(row)
                self.scheduler.add(request)
            except SMCDecodeError as error:
                yield refusal(row, error)
                continue
            self._jobs[request.index] = (row, request)

    def _read(self, row: Row) -> Request:
        own = row.body.smc
        if not self._warm and (own.grammar or own.regex or row.body.response_format):
            self._sandbox.warm()
            self._warm = True
        request = self._asking.read(row.body).requests[0]
        potentials = (*request.target.potentials, *self._watched)
        self._count += 1
        target = dataclasses.replace(request.target, potentials=potentials)
        return dataclasses.replace(request, target=target, index=self._count)

    def _answer(self, outcome: Outcome) -> dict[str, Any]:
        row, request = self._jobs.pop(outcome.request.index)
        failure = self._verdict(request)
        return _answer(row, outcome, self.scheduler.stats) if failure is None else refusal(row, failure)

    def _verdict(self, request: Request) -> Exception | None:
        """What a potential did wrong at a request, if one did."""
        verdicts = [psi.verdict(request.prompt) for psi in self._watched]
        return next((error for error in verdicts if error is not None), None)

    def _one_by_one(self, error: Exception) -> Iterator[dict[str, Any]]:
        """The engine failed at what ran together: the answers of each of those rows run alone."""
        begun = {i: job for i, job in self._jobs.items() if not self.scheduler.cancel(i)}
        waiting = {i: job for i, job in self._jobs.items() if i not in begun}
        if not begun:
            raise error
        for i, (row, request) in begun.items():
            self._jobs = {i: (row, request)}
            self.scheduler.add(request)
            try:
                answers = [self._answer(outcome) for outcomes in self.scheduler.run() for outcome in outcomes]
            except Exception as alone:
                if not _of_the_row(alone):
                    alone.add_note(f"at the prompt {row.id!r}")
                    raise
                self._verdict(request)
                answers = [refusal(row, alone)]
            yield from answers
        self._jobs = waiting
        for _, request in waiting.values():
            self.scheduler.add(request)


def _factors(potentials: Iterable[Potential]) -> list[Potential]:
    return [psi for given in potentials for psi in (given.factors if isinstance(given, Product) else (given,))]


def here(build: Build, room: Room, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """The answers of an engine of this process, made for them; see :meth:`Answering.answers`."""
    answering = Answering(build, room)
    try:
        yield from answering.answers(rows)
    finally:
        answering.close()


def _of_the_row(error: Exception) -> bool:
    """Whether other rows may fare better on the same engine."""
    if isinstance(error, RankError):
        return False
    return isinstance(error, SMCDecodeError | MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def refusal(row: Row, error: Exception) -> dict[str, Any]:
    """The answer to a row that cannot be answered."""
    reason = str(error) if isinstance(error, SMCDecodeError) else f"{type(error).__name__}: {error}"
    return {"id": row.id, "error": reason}


def _answer(row: Row, outcome: Outcome, stats: Stats) -> dict[str, Any]:
    assert row.body.seed is not None  # every row has one
    drawn = Answer.of(outcome, stats, row.body.seed)
    posterior = drawn.posterior
    numbers = {name: value for name, value in drawn.trust.items() if name != "trust"}
    return {
        "id": row.id,
        "text": None if drawn.epitaph else drawn.text,
        "finish_reason": drawn.finish,
        "texts": posterior.texts,
        "weights": posterior.weights.tolist(),
        **numbers,
        "prompt_tokens": len(outcome.request.prompt.tokens),
        "completion_tokens": len(drawn.tokens),
        "error": drawn.epitaph,
    }
