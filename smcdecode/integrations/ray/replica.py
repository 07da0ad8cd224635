"""The server's application in a replica of Ray Serve: asked a request, it yields ASGI messages. Knows no port."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from starlette.types import Message

__all__ = ["Call", "Replica"]


@dataclasses.dataclass(frozen=True)
class Call:
    """One HTTP request, and how its prompt begins, for the router."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    keys: tuple[bytes, ...]

    def scope(self) -> dict[str, Any]:
        """As ASGI wants it."""
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": self.method, "scheme": "http", "path": self.path, "raw_path": self.path.encode(),
            "query_string": self.query, "root_path": "", "headers": self.headers, "client": None, "server": None,
        }  # fmt: skip


class Replica:
    """One engine and its application.

    Args:
        make: makes the application, in the replica's process: :func:`smcdecode.integrations.server.app.create_app`
            with models loaded there.
    """

    async def __init__(self, make: Callable[[], FastAPI]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self.app = make()
        self._life = self.app.router.lifespan_context(self.app)
        await self._life.__aenter__()

    async def __del__(self) -> None:
        await self._life.__aexit__(None, None, None)

    async def answer(self, call: Call) -> AsyncIterator[Message]:
        """The response's messages, the first one its head. Left early, the request is cancelled."""
        said: asyncio.Queue[Message] = asyncio.Queue()
        asked: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if not asked:
                await asyncio.Event().wait()  # who leaves ends the task
            return asked.pop()

        task = asyncio.ensure_future(self.app(call.scope(), receive, said.put))
        try:
            more = True
            while more:
                message = await _next(said, task)
                more = message["type"] == "http.response.start" or message.get("more_body", False)
                yield message
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def metrics(self) -> str:
        """For Prometheus."""
        text: bytes = self.app.state.metrics.text()
        return text.decode()

    async def check_health(self) -> None:
        """Ray Serve replaces a replica where this raises."""
        if not self.app.state.runner.alive:
            raise RuntimeError("the engine has stopped")


async def _next(said: "asyncio.Queue[Message]", task: "asyncio.Future[None]") -> Message:
    """The next message; the error of an application that ended before it said one."""
    getting = asyncio.ensure_future(said.get())
    try:
        both: set[asyncio.Future[Any]] = {getting, task}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done() and said.empty():
            task.result()
            raise RuntimeError("the application ended without a response")
        return await getting
    finally:
        getting.cancel()
