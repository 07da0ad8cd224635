"""The HTTP side: routes, keys, errors. Knows FastAPI; how a body is answered is not here."""

import contextlib
import hmac
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft
from smcdecode.engine.memory import least_bytes
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.scheduler import Scheduler
from smcdecode.engine.stats import Stats
from smcdecode.integrations.server.answering import Server
from smcdecode.integrations.server.asking import Asking
from smcdecode.integrations.server.bodies import Bodies
from smcdecode.integrations.server.errors import RESPONSES, Problem, problem_of, response, validation
from smcdecode.integrations.server.limits import Limits
from smcdecode.integrations.server.metrics import Metrics
from smcdecode.integrations.server.runner import Runner
from smcdecode.integrations.server.sandbox import Sandbox
from smcdecode.integrations.server.schema import ChatRequest, CompletionRequest

__all__ = ["create_app"]

_BODY_SECONDS = 30.0
_BEARER = HTTPBearer(auto_error=False)


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
        p, drafts, method, lanes=limits.lanes, memory=least_bytes(p, memory), max_tokens=limits.max_tokens,  # type: ignore[arg-type]
        page_size=page_size, stats=Stats(),
    )  # fmt: skip
    sandbox = Sandbox(limits)
    runner = Runner(scheduler, limits.queue)
    server = Server(name or p.name, Asking(p, method, limits, sandbox), runner, limits, Metrics(runner))

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(sandbox.warm)
        yield
        await run_in_threadpool(runner.close, 0.0)  # those who drained have their answers
        sandbox.close()

    app = FastAPI(title="smcdecode", lifespan=life, docs_url=None, redoc_url=None, separate_input_output_schemas=False)
    app.state.runner, app.state.metrics = runner, server.metrics
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


def _add_routes(app: FastAPI, server: "Server", guards: list[Any]) -> None:
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
