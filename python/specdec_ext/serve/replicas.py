"""`specdec serve --replicas N`: a Ray of its own on this machine, for as long as it serves."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

from ..config.build_check import check_model_path
from ..errors import ConfigError, EngineError, ModelError
from .settings import ServerSettings

__all__ = ["run_replicas"]

NAME = "specdec"
OBJECT_STORE_BYTES = 80 << 20  # about the least that Ray takes; answers are small
# Ray reads these when it is imported. No word of its use leaves the machine, and its own processes
# talk over the loopback: what the name says of other systems is the switch for all.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "SPECDEC_RAY_LOOPBACK": "1",
}


def run_replicas(
    arguments: Mapping[str, Any],
    settings: ServerSettings,
    *,
    scaling: Mapping[str, Any],
    host: str,
    port: int,
) -> None:
    """Start Ray on this machine, serve until SIGTERM or Ctrl-C, end what runs.

    scaling  fields of ReplicaOptions (ray.py)

    Raises ConfigError, ModelError, EngineError.
    """
    model = arguments.get("model")
    if model is not None and not Path(check_model_path(model)).expanduser().exists():
        raise ModelError(f"{model}: there is no such folder or file; give a model's")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions

        from .ray import ReplicaOptions, make_app
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--replicas needs {error.name}: pip install 'specdec_ext[ray]'"
        ) from None
    options = ReplicaOptions(**scaling)
    most = options.max_replicas or options.num_replicas
    ray.init(
        num_cpus=max(os.cpu_count() or 1, ceil(most * options.num_cpus)),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=True,
    )
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopped.set())
    try:
        serve.start(http_options=HTTPOptions(host=host, port=port))
        try:
            serve.run(make_app(arguments, settings, options), name=NAME)
        except RuntimeError as error:
            raise EngineError(f"the replicas did not start; the log says why: {error}") from None
        print(f"serving on {host}:{port} with {options.num_replicas} replicas", file=sys.stderr)
        stopped.wait()
        with contextlib.suppress(TimeoutError):  # it waits for a minute at most
            serve.delete(NAME)  # answers that run end; shutdown() alone would cut them
    finally:
        serve.shutdown()
        ray.shutdown()
