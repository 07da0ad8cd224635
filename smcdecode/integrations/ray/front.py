"""Stands between Ray Serve's proxy and the replicas: sees how a prompt begins, and forwards. Knows no model."""

import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from smcdecode.integrations.ray.replica import Call
from smcdecode.integrations.ray.router import beginnings
from smcdecode.integrations.server.bodies import Bodies
from smcdecode.integrations.server.errors import Problem, problem_of, response
from smcdecode.integrations.server.runner import Busy

__all__ = ["Front"]

_ATTEMPTS = 3  # of a request whose replica dies before it says anything
_LOST = "the replica that wrote this answer is gone: ask again; the same seed gives the same answer"


class Front:
    """Forwards every request to a replica, and its messages back.

    Args:
        replicas: of :class:`~smcdecode.integrations.ray.replica.Replica`.
        most: bytes of a body.
        seconds: within which a body must come.
    """

    def __init__(self, replicas: DeploymentHandle, *, most: int, seconds: float = 30.0) -> None:
        self.replicas = replicas.options(method_name="answer", stream=True)
        self._bodies = Middleware(Bodies, most=most, seconds=seconds)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Ray Serve asks for it once the replica of this class is made."""
        routes = [Route("/metrics", self.metrics), Mount("/", self.forward)]
        return Starlette(routes=routes, middleware=[self._bodies])

    async def metrics(self, request: Request) -> Response:
        """What all replicas tell Prometheus, each under its number."""
        guard = await self._head(request)
        if guard is not None:
            return guard
        texts = await self.replicas.broadcast("metrics").results_async()
        return Response(merged(texts), media_type="text/plain; version=0.0.4")

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        request = Request(scope, receive)
        call = await _call(request)
        begun = stream = False
        try:
            async with aclosing(self._messages(call)) as messages:
                async for message in messages:
                    begun = True
                    stream = stream or _is_stream(message)
                    await send(message)
        except Exception as error:
            problem = _problem(error)
            if not begun:
                await response(problem)(scope, receive, send)
            elif stream:
                last = f"data: {json.dumps(problem.body())}\n\n".encode()
                await send({"type": "http.response.body", "body": last, "more_body": False})
            else:
                raise

    async def _head(self, request: Request) -> Response | None:
        """Whether a replica would let this request in: None, or its refusal."""
        async with aclosing(self._messages(await _call(request))) as messages:
            said = [message async for message in messages]
        if said[0]["status"] == 200:
            return None
        return Response(b"".join(m["body"] for m in said[1:]), said[0]["status"], media_type="application/json")

    async def _messages(self, call: Call) -> AsyncGenerator[Message, None]:
        """A replica's messages; where it dies before the first, another's."""
        for attempt in range(_ATTEMPTS):
            found, begun, over = self.replicas.remote(call), False, False
            try:
                async for message in found:
                    begun = True
                    yield message
                over = True
                return
            except RayActorError:
                over = True
                if begun or attempt == _ATTEMPTS - 1:
                    raise
            finally:
                if not over:  # the client has gone
                    found.cancel()


async def _call(request: Request) -> Call:
    """What a replica needs of a request."""
    body, scope = await request.body(), request.scope
    keys = beginnings(_prompt(body)) if request.method == "POST" else ()
    return Call(request.method, scope["path"], scope["query_string"], list(scope["headers"]), body, keys)


def _prompt(body: bytes) -> str:
    """The prompt of a body as a text whose beginning is the prompt's; empty where there is none."""
    try:
        asked = json.loads(body)
        prompt = asked.get("messages", asked.get("prompt", ""))
    except (ValueError, AttributeError, RecursionError):
        return ""  # whatever is wrong with it, a replica tells
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def _is_stream(message: Message) -> bool:
    return any(name == b"content-type" and b"event-stream" in value for name, value in message.get("headers", ()))


def _problem(error: Exception) -> Problem:
    """What to tell of a request that no replica answered."""
    if isinstance(error, RayActorError):
        return Problem(503, _LOST, code="replica_lost", headers={"Retry-After": "1"})
    if isinstance(error, DeploymentUnavailableError):
        return Problem(503, "no replica could be started", code="unavailable")
    return problem_of(Busy() if isinstance(error, BackPressureError) else error)


def merged(texts: Sequence[str]) -> bytes:
    """Texts for Prometheus as one, each one's numbers under a label ``replica``."""
    families: dict[str, Metric] = {}
    for number, text in enumerate(texts):
        for found in text_string_to_metric_families(text):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
                family.add_sample(sample.name, {**sample.labels, "replica": str(number)}, sample.value)
    return generate_latest(_Once(families.values()))


class _Once:
    """Families as a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self.families
