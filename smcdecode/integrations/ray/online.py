"""The server as replicas on Ray Serve: made, sized, run until told to stop. Knows deployments; no request.

    serve run smcdecode.integrations.ray.online:build target=demo memory=1e9 replicas=1:4

starts it on a cluster by Ray Serve's own command, and ``smcdecode serve --ray`` by this library's.
"""

import functools
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft, Local
from smcdecode.engine.load import load
from smcdecode.errors import InvalidOption
from smcdecode.integrations.ray.front import Front
from smcdecode.integrations.ray.replica import Replica
from smcdecode.integrations.server.app import create_app
from smcdecode.integrations.server.limits import Limits

__all__ = ["application", "build", "deploy", "run"]

_ROUTER = "smcdecode.integrations.ray.router:PrefixRouter"
_FRONT_CPUS = 0.1
_NAME = "smcdecode"  # of the application on its cluster


def deploy(
    make: Callable[[], FastAPI],
    *,
    replicas: tuple[int, int] = (1, 1),
    limits: Limits = Limits(),  # noqa: B008  frozen
    cpus: float = 1.0,
    gpus: float = 0.0,
    drain: float = 30.0,
) -> Any:
    """A Ray Serve application of replicas behind a front, for ``ray.serve.run``.

    Args:
        make: makes the server's application in a replica's process; see :func:`application`.
        replicas: fewest and most. More are started when more than ``limits.lanes`` requests a replica run or wait, and
            taken away when fewer do; those answers that run are waited for.
        limits: of each replica. A prompt goes past the replica that knows it where its queue is longer than another's
            by more than ``limits.lanes``.
        cpus: that a replica may use.
        gpus: the same.
        drain: seconds that the answers of a replica that is taken away may take.

    Raises:
        InvalidOption: the numbers of replicas mean nothing.
    """
    least, most = replicas
    if not 1 <= least <= most:
        raise InvalidOption(f"replicas are from a least to a most, like 1:4, with 1 ≤ least ≤ most; got {replicas}")
    shared = {"graceful_shutdown_timeout_s": drain, "graceful_shutdown_wait_loop_s": 0.5}
    inner = serve.deployment(
        Replica,
        autoscaling_config=AutoscalingConfig(
            min_replicas=least, max_replicas=most, target_ongoing_requests=limits.lanes
        ),
        max_ongoing_requests=limits.queue,
        max_queued_requests=limits.queue,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER, request_router_kwargs={"slack": limits.lanes}
        ),
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        **shared,
    )
    outer = serve.deployment(
        serve.ingress()(Front),
        max_ongoing_requests=2 * most * limits.queue,
        ray_actor_options={"num_cpus": _FRONT_CPUS},
        **shared,
    )
    return outer.bind(inner.bind(make), most=limits.body)


def application(
    target: str,
    *,
    memory: float,
    draft: str | None = None,
    block: int = 4,
    strictness: float = 0.2,
    particles: int = 8,
    name: str | None = None,
    limits: Limits = Limits(),  # noqa: B008  frozen
    api_key: str | None = None,
) -> FastAPI:
    """Load models, and make the server's application of them: in a replica's process.

    Args:
        target: as of :func:`smcdecode.load`.
        memory: bytes for keys, values and logits: of each replica.
        draft: as of :func:`smcdecode.load`; None for none.
        block: K.
        strictness: s.
        particles: N.
        name: what clients call the model.
        limits: of the replica.
        api_key: clients must send it as a bearer token.
    """
    proposal = Draft(load(draft), block, strictness=strictness) if draft else Local()
    method = SMC(proposal, particles)
    return create_app(load(target), method, name=name, limits=limits, memory=memory, api_key=api_key)


def build(options: Mapping[str, Any]) -> Any:
    """The application of Ray Serve's command ``serve run``, and of its configuration files.

    Args:
        options: of :func:`application`, with ``replicas`` as "1:4", ``cpus``, ``gpus``, ``drain``, and limits by name.
            Numbers may be texts.

    Raises:
        InvalidOption: one is not known or not a number, or ``target`` or ``memory`` is missing.
    """
    given = dict(options)
    sizes = {name: _number(name, given.pop(name)) for name in ("cpus", "gpus", "drain") if name in given}
    replicas = range_of(str(given.pop("replicas", "1:1")))
    limits = Limits(**{name: int(_number(name, given.pop(name))) for name in _LIMITS & given.keys()})
    unknown = given.keys() - _TEXTS - _NUMBERS.keys()
    if unknown or not {"target", "memory"} <= given.keys():
        raise InvalidOption(
            f"give target, memory (bytes) and perhaps {', '.join(sorted(_KNOWN))}; got {', '.join(sorted(options))}"
        )
    given |= {name: kind(_number(name, given[name])) for name, kind in _NUMBERS.items() if name in given}
    if given["memory"] <= 1:
        raise InvalidOption("memory must be bytes for each replica, for several may share a machine; got a fraction")
    make = functools.partial(application, **given, limits=limits)
    return deploy(make, replicas=replicas, limits=limits, **sizes)


_TEXTS = {"target", "draft", "name", "api_key"}
_NUMBERS: dict[str, Callable[[float], float]] = {"memory": float, "block": int, "strictness": float, "particles": int}
_LIMITS = {"lanes", "queue", "max_tokens"}
_KNOWN = (_TEXTS | _NUMBERS.keys() | _LIMITS | {"replicas", "cpus", "gpus", "drain"}) - {"target", "memory"}


def range_of(text: str) -> tuple[int, int]:
    """The numbers of "1:4", or of "4".

    Raises:
        InvalidOption: they are none.
    """
    least, _, most = text.partition(":")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise InvalidOption(f"replicas are numbers like 2, or 1:4; got {text!r}") from None


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidOption(f"{name} must be a number; got {value!r}") from None


def run(options: Mapping[str, Any], *, address: str, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; then take nothing new, and let what runs finish.

    Args:
        options: of :func:`build`.
        address: of a Ray cluster; "local" starts one on this machine, which ends with this process.
        host: the address that each node's proxy binds to.
        port: of the proxies.

    Raises:
        InvalidOption: as :func:`build` does.
    """
    app, stop = build(options), threading.Event()
    ray.init(address=address, **({"include_dashboard": False} if address == "local" else {}))
    serve.start(http_options={"host": host, "port": port})
    serve.run(app, name=_NAME, route_prefix="/")
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has set its own
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    serve.delete(_NAME)
    if address == "local":
        serve.shutdown()
    ray.shutdown()
