"""Several replicas of the server on Ray Serve: `serve run specdec_ext.serve.ray:app`, or
`specdec serve --replicas N`.

A request meets the ingress first, which reads its body and derives an affinity key from what stays
the same in a conversation (affinity.py). Ray's consistent hashing sends equal keys to the same
replica, whose prefix cache has their pages. A replica is the ordinary application; the ingress
passes its answer through, piece by piece. A replica that dies ends its own streams with an error
event, and Ray starts another one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator, Mapping
from inspect import signature
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config.limits import MAX_THREADS
from ..config.parse import parse_kv_cache_config
from ..config.read_text import read_text
from ..config.validate import check_float, check_int, unknown_key
from ..errors import ConfigError
from ..installation import set_num_threads
from ..llm import LLM
from ..log import logger
from .app import create_app
from .forward import make_ingress, replay
from .settings import ServerSettings, name_of_model

__all__ = ["ReplicaOptions", "app", "make_app"]

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
LAST_WORDS_SECONDS = 5.0
LOOK_BACK_SECONDS, MEASURE_SECONDS = 30.0, 10.0  # Ray's own
STARTS = 3  # that fail before a deployment is given up
# Set for a Ray of this machine alone (replicas.py).
LOOPBACK = "SPECDEC_RAY_LOOPBACK"


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """How many replicas there are. Raises ConfigError.

    num_replicas      to begin with, and the least
    max_replicas      the most; None: as many as num_replicas, there is no autoscaling
    target_requests   unfinished requests of a replica, waiting ones included, that more are wanted
                      from on
    max_requests      unfinished requests of a replica; one more goes to the next on the ring
    upscale_seconds, downscale_seconds
                      that another number of replicas is wanted for before it is made so
    num_threads       of the CPU kernels of a replica; None: $SPECDEC_NUM_THREADS, else all CPUs
    num_cpus, num_gpus
                      what Ray reserves for a replica
    """

    num_replicas: int = 1
    max_replicas: int | None = None
    target_requests: int = 32
    max_requests: int = 256
    upscale_seconds: float = 30.0
    downscale_seconds: float = 600.0
    num_threads: int | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        most = self.num_replicas if self.max_replicas is None else self.max_replicas
        for name, value, low in (
            ("num_replicas", self.num_replicas, 1),
            ("max_replicas", most, self.num_replicas),
            ("target_requests", self.target_requests, 1),
            ("max_requests", self.max_requests, 1),
        ):
            check_int(f"ReplicaOptions.{name}", value, ConfigError, low=low, high=65536)
        if self.num_threads is not None:
            check_int("ReplicaOptions.num_threads", self.num_threads, ConfigError,
                      low=1, high=MAX_THREADS)  # fmt: skip
        for name in ("upscale_seconds", "downscale_seconds"):
            check_float(
                f"ReplicaOptions.{name}", getattr(self, name), ConfigError, above=0.0,
                high=86400.0, remedy="seconds",
            )  # fmt: skip

    @property
    def autoscaling(self) -> AutoscalingConfig | None:
        if self.max_replicas is None:
            return None
        return AutoscalingConfig(
            min_replicas=self.num_replicas,
            max_replicas=self.max_replicas,
            target_ongoing_requests=self.target_requests,
            upscale_delay_s=self.upscale_seconds,
            downscale_delay_s=self.downscale_seconds,
            # Queues are looked at over a time no longer than that, or the past would decide.
            look_back_period_s=min(LOOK_BACK_SECONDS, self.upscale_seconds),
            metrics_interval_s=min(MEASURE_SECONDS, self.upscale_seconds / 2),
        )


def _stay_on_loopback() -> None:
    """Keep a process of Ray Serve's from listening on all addresses, where LOOPBACK says so.

    Each opens a port for gRPC between deployments, which is off and which nothing here uses; the
    address is not configurable (Ray 2.60). It is opened after the deployment's constructor.
    """
    if os.environ.get(LOOPBACK) != "1":
        return
    from ray.serve._private import replica

    bind = getattr(replica, "add_port_to_grpc_server", None)
    if bind is None:
        logger.warning("this version of Ray may listen on all addresses; see docs/ray.md")
        return
    replica.add_port_to_grpc_server = lambda server, address: bind(
        server, address.replace("[::]", "127.0.0.1")
    )


class _Replica:
    """One engine and its application."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        settings: ServerSettings,
        num_threads: int | None = None,
    ) -> None:
        _stay_on_loopback()
        if num_threads is not None:
            set_num_threads(num_threads)
        self._app = create_app(LLM(**arguments), settings)

    async def answer(self, scope: Mapping[str, Any], body: bytes) -> AsyncIterator[Message]:
        """The application's messages; a call that is cancelled is a client that goes away."""
        async for message in replay(self._app, scope, body):
            yield message

    def check_health(self) -> None:
        """Ray replaces a replica whose engine has stopped."""
        if not self._app.state.serving.bridge.is_alive:
            raise RuntimeError("the engine has stopped")


class _Ingress:
    """The only way in: reads bodies and chooses replicas; it has no model."""

    def __init__(self, replicas: DeploymentHandle, settings: ServerSettings) -> None:
        _stay_on_loopback()

        def call(scope: Mapping[str, Any], body: bytes, key: str) -> Any:
            options = replicas.options(stream=True, method_name="answer", session_id=key)
            return options.remote(scope, body)

        self._app = make_ingress(call, settings)

    async def __call__(self, request: Request) -> Response:
        return _Passed(self._app)


class _Passed(Response):
    """An answer that an application sends itself."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._answering = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answering(scope, receive, send)


# Ray's own objects, whose types it leaves open.
Replica: Any = serve.deployment(
    name="replica", request_router_config=RequestRouterConfig(request_router_class=ROUTER)
)(_Replica)
Ingress: Any = serve.deployment(name="ingress")(_Ingress)


def make_app(
    arguments: Mapping[str, Any], settings: ServerSettings, options: ReplicaOptions
) -> Application:
    """The application for serve.run: `arguments` are LLM's, reuse of blocks is on.

    Raises ConfigError.
    """
    reuse = parse_kv_cache_config(arguments.get("kv_cache_config"))
    given = {
        **arguments, "kv_cache_config": dataclasses.replace(reuse, enable_block_reuse=True)
    }  # fmt: skip
    replicas = Replica.options(
        num_replicas=options.num_replicas if options.autoscaling is None else None,
        autoscaling_config=options.autoscaling,
        max_ongoing_requests=options.max_requests,
        max_constructor_retry_count=STARTS,
        graceful_shutdown_timeout_s=settings.drain_seconds + LAST_WORDS_SECONDS,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
    )
    ingress = Ingress.options(
        max_ongoing_requests=65536,
        graceful_shutdown_timeout_s=settings.drain_seconds + LAST_WORDS_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    app: Application = ingress.bind(replicas.bind(given, settings, options.num_threads), settings)
    return app


def app(arguments: Mapping[str, Any]) -> Application:
    """`serve run specdec_ext.serve.ray:app NAME=VALUE ...`: the names are those of LLM's arguments,
    ServerSettings and ReplicaOptions; values are read as YAML. Raises ConfigError."""
    parts: dict[str, dict[str, Any]] = {"llm": {}, "settings": {}, "options": {}}
    fields = {field.name: "settings" for field in dataclasses.fields(ServerSettings)}
    fields |= {field.name: "options" for field in dataclasses.fields(ReplicaOptions)}
    fields |= {name: "llm" for name in signature(LLM).parameters if name != "unknown"}
    for name, value in arguments.items():
        if name not in fields:
            raise unknown_key("specdec_ext.serve.ray:app", name, fields, ConfigError)
        parts[fields[name]][name] = read_text(value) if isinstance(value, str) else value
    names = parts["settings"].setdefault(
        "served_model_names", [name_of_model(parts["llm"].get("model"))]
    )
    parts["settings"]["served_model_names"] = [names] if isinstance(names, str) else names
    return make_app(
        parts["llm"], ServerSettings(**parts["settings"]), ReplicaOptions(**parts["options"])
    )
