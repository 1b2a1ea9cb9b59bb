"""Runs the application under uvicorn, which handles signals: on SIGTERM or Ctrl-C it stops
listening, and ends when the answers that run have ended."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
import time
from typing import Any

import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus

from ..errors import ConfigError, EngineError
from .interpreter import serving_interpreter
from .middleware import access_logger

__all__ = ["Server", "ThreadServer", "run_server"]

# For clients to read their last event after drain_seconds.
LAST_WORDS_SECONDS = 5


class Server(uvicorn.Server):
    """uvicorn's, which tells the application that it shuts down before it waits for answers."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app
        # Streams end when their answers do, not when the signal comes.
        AppStatus.enable_automatic_graceful_drain = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with serving_interpreter():
            await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.serving.bridge.drain()
        await super().shutdown(sockets)


class ThreadServer:
    """The application served from a thread of this process, on a free loopback port.

    Used as a context manager: its end drains the server.
    """

    def __init__(self, app: FastAPI, **options: Any) -> None:
        config = uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            access_log=False,
            log_level="error",
            lifespan="off",
            timeout_graceful_shutdown=int(app.state.serving.settings.drain_seconds)
            + LAST_WORDS_SECONDS,
            **options,
        )
        self.server = Server(config, app)
        self.thread = threading.Thread(target=self.server.run, name="specdec-server", daemon=True)

    def __enter__(self) -> ThreadServer:
        self.thread.start()
        while not self.server.started:
            if not self.thread.is_alive():
                raise EngineError("the server did not start; its log says why")
            time.sleep(0.005)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join()


def run_server(app: FastAPI, **options: Any) -> None:
    """Serve until a signal ends it; returns when the running answers have ended.

    options  uvicorn.Config's: host, port, uds, ssl_keyfile, ssl_certfile, ...

    Raises ConfigError where it could not listen, which it has logged.
    """
    _log_access()
    drain_seconds = app.state.serving.settings.drain_seconds
    config = uvicorn.Config(
        app,
        access_log=False,  # AccessLog writes it
        log_level="info",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(drain_seconds) + LAST_WORDS_SECONDS,
        **options,
    )
    server = Server(config, app)
    gc.collect()  # what a server has at its start it keeps (interpreter.py)
    # When it has shut down uvicorn raises the signal again, for whoever handled it before. Here
    # that is nobody: a drained server has done what it was told, and ends with 0.
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with contextlib.suppress(
            KeyboardInterrupt, SystemExit
        ):  # uvicorn's codes mean other things
            server.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    if not server.started:
        where = options.get("uds") or f"{options.get('host')}:{options.get('port')}"
        raise ConfigError(
            f"the server could not listen on {where}, for the reason in the line above; choose "
            "another address"
        )


def _log_access() -> None:
    """Access lines to stderr, as they are."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access_logger.handlers = [handler]
    access_logger.setLevel(logging.INFO)
    access_logger.propagate = False
