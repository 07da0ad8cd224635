"""The HTTP side: routes, keys, streams. Knows FastAPI and the runner; no mathematics."""

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft
from smcdecode.engine.memory import bytes_of
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.request import Request as EngineRequest
from smcdecode.engine.scheduler import Scheduler
from smcdecode.engine.stats import Stats
from smcdecode.errors import NoSurvivors
from smcdecode.integrations.server.answers import Answer, Envelope, usage
from smcdecode.integrations.server.asking import Asked, Asking
from smcdecode.integrations.server.bodies import Bodies
from smcdecode.integrations.server.errors import RESPONSES, Problem, problem_of, response, validation
from smcdecode.integrations.server.limits import Limits
from smcdecode.integrations.server.metrics import Metrics
from smcdecode.integrations.server.runner import Busy, Done, Event, Failed, Runner, Settled
from smcdecode.integrations.server.sandbox import Sandbox
from smcdecode.integrations.server.schema import ChatRequest, CompletionRequest
from smcdecode.report.pieces import Pieces

__all__ = ["create_app"]

_BODY_SECONDS = 30.0
_BEARER = HTTPBearer(auto_error=False)
Body = CompletionRequest | ChatRequest


def create_app(
    p: LanguageModel,
    method: SMC,
    *,
    name: str | None = None,
    limits: Limits = Limits(),  # noqa: B008  frozen
    memory: float = 0.5,
    page_size: int = 1,
    api_key: str | None = None,
) -> FastAPI:
    """The ASGI application that serves one model.

    Args:
        p: the target's model.
        method: of requests that say nothing else; its draft is the server's draft.
        name: what clients call the model; by default its own name.
        limits: what clients may ask for.
        memory: for keys, values and logits: a fraction of the available memory, or bytes if above 1.
        page_size: tokens a page of keys and values.
        api_key: clients must send it as a bearer token; None lets everybody in.

    Raises:
        OutOfPages: the memory does not hold one request.
    """
    draft = method.proposal.network if isinstance(method.proposal, Draft) else None
    drafts = [] if draft is None else [draft]
    scheduler = Scheduler.open(
        p, drafts, method, lanes=limits.lanes, memory=bytes_of(memory), max_tokens=limits.max_tokens,  # type: ignore[arg-type]
        page_size=page_size, stats=Stats(),
    )  # fmt: skip
    sandbox = Sandbox(limits)
    runner = Runner(scheduler, limits.queue)
    server = _Server(name or p.name, Asking(p, method, limits, sandbox), runner, limits, Metrics(runner))

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(sandbox.warm)
        yield
        await run_in_threadpool(runner.close, 0.0)  # those who drained have their answers
        sandbox.close()

    app = FastAPI(title="smcdecode", lifespan=life, docs_url=None, redoc_url=None, separate_input_output_schemas=False)
    app.state.runner = runner
    app.add_middleware(Bodies, most=limits.body, seconds=_BODY_SECONDS)
    _add_errors(app)
    _add_routes(app, server, [Depends(_lock(api_key))])
    return app


def _lock(api_key: str | None) -> Any:
    """A dependency that lets in who has the key."""

    async def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> None:
        token = "" if given is None else given.credentials
        if api_key is not None and not hmac.compare_digest(token.encode(), api_key.encode()):
            raise Problem(401, "the API key is missing or wrong", headers={"WWW-Authenticate": "Bearer"})

    return check


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return response(validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return response(Problem(error.status_code, str(error.detail), headers=error.headers))

    @app.exception_handler(Problem)
    async def problem(_: Request, error: Problem) -> JSONResponse:
        return response(error)

    @app.exception_handler(Exception)
    async def other(_: Request, error: Exception) -> JSONResponse:
        return response(problem_of(error))


def _add_routes(app: FastAPI, server: "_Server", guards: list[Any]) -> None:
    post: dict[str, Any] = {"dependencies": guards, "responses": RESPONSES, "response_model": None}

    @app.post("/v1/completions", **post)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continue prompts."""
        return await server.answer(body, http)

    @app.post("/v1/chat/completions", **post)
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Answer a chat."""
        return await server.answer(body, http)

    @app.get("/v1/models", dependencies=guards, responses={401: RESPONSES[401]})
    async def models() -> dict[str, Any]:
        """The one model there is."""
        return {
            "object": "list",
            "data": [{"id": server.name, "object": "model", "created": server.begun, "owned_by": "smcdecode"}],
        }

    @app.get("/health", responses={503: RESPONSES[503]})
    async def health() -> dict[str, str]:
        """Whether the engine is there."""
        if not server.runner.alive:
            raise Problem(503, "the engine has stopped")
        return {"status": "ok"}

    @app.get("/metrics", dependencies=guards, response_model=None, responses={401: RESPONSES[401]})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")


class _Server:
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
