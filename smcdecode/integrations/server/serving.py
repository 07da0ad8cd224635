"""One process that serves one application until it is told to stop. Knows uvicorn."""

from collections.abc import Mapping
from typing import Any

import uvicorn

from smcdecode.declare.method import SMC
from smcdecode.engine.model import LanguageModel
from smcdecode.integrations.server.app import create_app
from smcdecode.integrations.server.limits import Limits

__all__ = ["run"]


def run(
    p: LanguageModel,
    method: SMC,
    *,
    name: str | None = None,
    limits: Mapping[str, Any] | None = None,
    memory: float = 0.5,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    drain: int = 30,
) -> None:
    """Serve until SIGINT or SIGTERM; then take nothing new, and let what runs finish for ``drain`` seconds.

    Args:
        p: the target's model.
        method: of requests that say nothing else.
        name: what clients call the model.
        limits: values for :class:`Limits`.
        memory: for keys, values and logits.
        host: the address to bind to.
        port: 0 takes a free one.
        api_key: clients must send it as a bearer token.
        drain: seconds.
    """
    app = create_app(p, method, name=name, limits=Limits(**(limits or {})), memory=memory, api_key=api_key)
    uvicorn.run(app, host=host, port=port, timeout_graceful_shutdown=drain, log_level="info")
