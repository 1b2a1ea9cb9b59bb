"""Servers of tiny models, in process or on a loopback port, and what holds an engine still."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from specdec_ext import LLM
from specdec_ext.serve.app import create_app
from specdec_ext.serve.server import ThreadServer as LiveServer
from specdec_ext.serve.settings import ServerSettings

__all__ = ["NAME", "Gate", "LiveServer", "all_returned", "make_app", "make_llm", "wait_until"]

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
