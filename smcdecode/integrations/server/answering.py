"""From a body to its response: runs on the engine, whole or streamed, ended when the client leaves. Knows no route."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from smcdecode.engine.request import Request as EngineRequest
from smcdecode.errors import NoSurvivors
from smcdecode.integrations.server.answers import Answer, Envelope, usage
from smcdecode.integrations.server.asking import Asked, Asking
from smcdecode.integrations.server.errors import Problem, problem_of, response
from smcdecode.integrations.server.limits import Limits
from smcdecode.integrations.server.metrics import Metrics
from smcdecode.integrations.server.runner import Busy, Done, Event, Failed, Runner, Settled
from smcdecode.integrations.server.schema import ChatRequest, CompletionRequest
from smcdecode.report.pieces import Pieces

__all__ = ["Body", "Server"]

Body = CompletionRequest | ChatRequest


class Server:
    """One model behind the routes."""

    def __init__(self, name: str, asking: Asking, runner: Runner, limits: Limits, metrics: Metrics) -> None:
        self.name, self.asking, self.runner, self.limits, self.metrics = name, asking, runner, limits, metrics
        self.begun = int(time.time())

    async def answer(self, body: Body, http: Request) -> Response:
        """The response to a body: whole, or a stream."""
        start = time.perf_counter()
        try:
            answered = await self._answer(body, http, start)
        except Exception as error:
            answered = response(problem_of(error))
        self.metrics.responses.labels(http.url.path, str(answered.status_code)).inc()
        if not isinstance(answered, StreamingResponse):
            self.metrics.seconds.observe(time.perf_counter() - start)
        return answered

    async def _answer(self, body: Body, http: Request, start: float) -> Response:
        if body.model != self.name:
            raise Problem(404, f"this server has the model {self.name}", param="model", code="model_not_found")
        asked = await run_in_threadpool(self.asking.read, body)
        run = _Run(self.runner, asked, stream=bool(body.stream))
        envelope = Envelope(isinstance(body, ChatRequest), self.name)
        self.metrics.prompt_tokens.inc(asked.prompt_tokens)
        if body.stream:
            return StreamingResponse(self._stream(run, envelope, body, start), media_type="text/event-stream")
        try:
            async with asyncio.timeout(self.limits.seconds):
                answers = await _unless_gone(http, self._whole(run))
                scores = await self._scores(body, answers)
        except _Gone:
            self.metrics.cancelled.inc()
            return Response(status_code=499)  # nobody reads it
        finally:
            run.cancel()
        return JSONResponse(envelope.whole(answers, usage(asked.prompt_tokens, answers), scores))

    async def _whole(self, run: "_Run") -> list[Answer]:
        answers = {i: self._draw(run, event) async for i, event in run.events() if isinstance(event, Done)}
        epitaphs = [answer.epitaph for answer in answers.values()]
        if all(epitaph is not None for epitaph in epitaphs):
            raise NoSurvivors(epitaphs[0])
        return [answers[i] for i in range(len(answers))]

    async def _scores(self, body: Body, answers: Sequence[Answer]) -> list[list[float] | None]:
        """Log-probabilities of the answers' tokens, where they were asked for."""
        if body.logprobs is None or body.logprobs is False:
            return [None] * len(answers)
        return [await _scored(self.runner, answer.request, answer.shown()) for answer in answers]

    def _draw(self, run: "_Run", done: Done) -> Answer:
        answer = Answer.of(done.outcome, self.runner.scheduler.stats, run.asked.seed)
        self.metrics.tokens.inc(len(answer.tokens))
        return answer

    async def _stream(self, run: "_Run", envelope: Envelope, body: Body, start: float) -> AsyncIterator[str]:
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for chunk in self._chunks(run, envelope, body):
                    yield _sse(chunk)
            yield "data: [DONE]\n\n"
        except (GeneratorExit, asyncio.CancelledError):
            self.metrics.cancelled.inc()
            raise
        except Exception as error:
            yield _sse(problem_of(error).body())
        finally:
            run.cancel()
            self.metrics.seconds.observe(time.perf_counter() - start)

    async def _chunks(self, run: "_Run", envelope: Envelope, body: Body) -> AsyncIterator[dict[str, Any]]:
        requests = run.asked.requests
        pieces = [Pieces(request.target.model.vocabulary, request.stops) for request in requests]
        answers = []
        if envelope.chat:
            for i in range(len(requests)):
                yield envelope.piece(i, "", first=True)
        async for i, event in run.events():
            if isinstance(event, Settled) and (text := pieces[i].push(event.tokens)):
                yield envelope.piece(i, text)
            if isinstance(event, Done):
                answer = self._draw(run, event)
                if answer.epitaph is not None:
                    raise NoSurvivors(answer.epitaph)
                answers.append(answer)
                yield envelope.piece(i, pieces[i].push(answer.tokens, final=True), answer=answer)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield envelope.bill(usage(run.asked.prompt_tokens, answers))


class _Run:
    """The requests of one body on the engine, and what is told of them."""

    def __init__(self, runner: Runner, asked: Asked, *, stream: bool) -> None:
        self.runner, self.asked = runner, asked
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listener(i: int) -> Any:
            def tell(event: Event) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                    loop.call_soon_threadsafe(self._events.put_nowait, (i, event))

            return tell

        numbers = runner.submit([(r, listener(i)) for i, r in enumerate(asked.requests)], stream=stream)
        self._left = dict(enumerate(numbers))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """What happens to request i of the body, until all are done."""
        while self._left:
            i, event = await self._events.get()
            if isinstance(event, Failed):
                raise _stopping(event.error)
            if isinstance(event, Done):
                del self._left[i]
            yield i, event

    def cancel(self) -> None:
        """End what still runs."""
        for number in self._left.values():
            self.runner.cancel(number)
        self._left = {}


class _Gone(Exception):
    """The client has gone away."""


async def _unless_gone(http: Request, work: Any) -> Any:
    """What some work gives; _Gone as soon as the client has left, and the work is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Gone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _scored(runner: Runner, request: EngineRequest, tokens: Sequence[int]) -> list[float]:
    loop = asyncio.get_running_loop()
    told: asyncio.Future[list[float] | Exception] = loop.create_future()

    def tell(found: list[float] | Exception) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if told.done() else told.set_result(found))

    runner.score(request, tokens, tell)
    found = await told
    if isinstance(found, Exception):
        raise found
    return found


def _stopping(error: Exception) -> Exception:
    return Problem(503, "the server is stopping", code="stopping") if isinstance(error, Busy) else error


def _sse(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"
