"""Servers of tiny models, in process or on a loopback port, and what holds an engine still."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from specdec_ext import LLM
from specdec_ext.serve.app import create_app
from specdec_ext.serve.server import Server
from specdec_ext.serve.settings import ServerSettings

NGRAM = {"method": "ngram", "max_draft_len": 4, "adaptive": False}
NAME = "tiny"


def make_llm(path: Path, **scheduler: Any) -> LLM:
    return LLM(
        path,
        speculative_config=NGRAM,
        kv_cache_config={"enable_block_reuse": True},
        scheduler_config=scheduler or None,
    )


def make_app(llm: LLM, **settings: Any) -> FastAPI:
    return create_app(llm, ServerSettings(**{"served_model_names": [NAME], **settings}))


class Gate:
    """Stands in front of an engine's forward passes: closed, they wait."""

    def __init__(self, llm: LLM) -> None:
        self._open = threading.Event()
        self._open.set()
        self._model: Any = llm.engine.model
        self._forward: Callable[..., Any] = self._model.forward
        self.passes = 0
        self._model.forward = self._wait

    def _wait(self, *given: Any) -> Any:
        self._open.wait()
        self.passes += 1
        return self._forward(*given)

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def remove(self) -> None:
        self.open()
        self._model.forward = self._forward


class LiveServer:
    """An application under uvicorn in a thread, on a free loopback port."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, access_log=False, log_level="error", lifespan="off",
            timeout_graceful_shutdown=20, **options,
        )  # fmt: skip
        self.server = Server(config, app)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self) -> LiveServer:
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join()


def wait_until(condition: Callable[[], bool]) -> None:
    """As long as it takes; pytest's `faulthandler_timeout` says where a run hangs."""
    while not condition():
        time.sleep(0.005)


@contextlib.contextmanager
def all_returned(llm: LLM) -> Iterator[None]:
    """Nothing of what is done inside is left behind: no request, no page."""
    yield
    wait_until(lambda: llm.engine.num_unfinished == 0)
    llm.engine.step()  # pages of a request that was cancelled come back with the next plan
    stats = llm.get_metrics()["executor"]
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["free_pages"] == stats["total_pages"]
