"""Reads a request's body whole, within bytes and seconds, before anything looks at it. Knows ASGI; no routes."""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smcdecode.integrations.server.errors import Problem, response

__all__ = ["Bodies"]


class Bodies:
    """ASGI middleware: 413 for a body that is too long, 408 for one that does not come."""

    def __init__(self, app: ASGIApp, *, most: int, seconds: float) -> None:
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on the request with its body in one piece."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._read(scope, receive)
        except TimeoutError:
            body = Problem(408, f"the body did not come within {self.seconds:g} s")
        if isinstance(body, Problem):
            await response(body)(scope, receive, send)
            return
        held: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return held.pop() if held else await receive()

        await self.app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> Any:
        """The body, or what is wrong with it."""
        too_long = Problem(413, f"the body may have {self.most} bytes")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.most:
            return too_long
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self.most:
                return too_long
            if not message.get("more_body", False):
                return body
