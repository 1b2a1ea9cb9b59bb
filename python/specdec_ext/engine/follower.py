"""A rank other than 0: it loads its shard and runs its share of rank 0's forward passes.

`python -m specdec_ext.engine.follower RANK SIZE FILE...` is how rank 0 starts one on its machine;
the files are descriptors of the memory that they share.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .. import _core, ops
from ..errors import ModelError, SpecdecError
from ..models.load import load_model
from ..models.place import CPU, Place, resolve_device
from ..models.sharded_model import finish_ids, finish_scores, run_parts
from ..parallel.fingerprint import model_fingerprint
from ..parallel.link import LostRankError
from ..parallel.team import (
    BIND,
    END,
    FORWARD,
    HOST_POOL,
    LOAD,
    LOST_EXIT_CODE,
    NARROW,
    RELEASE,
    Team,
    enter,
)  # fmt: skip
from .host_pool import HostPool
from .kv_pages import KvPages

__all__ = ["follow"]


def follow(team: Team) -> int:
    """Serve rank 0 until it says that this is all. The exit code of this process."""
    follower = _Follower(team)
    try:
        with team.alive():
            while follower.serve():
                pass
    except LostRankError as lost:
        team.accuse(lost)
        time.sleep(1.0)  # rank 0 reads it, and should not see this rank end first
        if lost.rank == 0 and team.rank == 1 and not lost.silent:
            print("tensor parallel: rank 0 has ended, so all ranks end", file=sys.stderr)
        return LOST_EXIT_CODE
    except Exception as error:
        team.say_why(f"{type(error).__name__}: {error}")
        return 1
    return 0


class Share(Protocol):
    """A loaded part of a model, and what rank 0's packets have it do. `words`: the first array of a
    packet, int32, except where it is said."""

    def bind(self, words: np.ndarray) -> None:
        """Make pages: how many, and of how many tokens."""
        ...

    def forward(self, words: np.ndarray, rest: np.ndarray) -> None:
        """Run this rank's part of a step. rest: bytes, the packet's second array."""
        ...

    def release(self) -> None:
        """Nobody uses the pages: their memory goes back."""
        ...

    def do(self, kind: int, words: np.ndarray) -> None:
        """Whatever else rank 0 says."""
        ...


class HostShare:
    """See Share: on the CPU, where the host runs the steps."""

    def __init__(self, model: Any, team: Team) -> None:
        self._model, self._team = model, team
        self._plan = _core.StepPlan(max_requests=1, max_rows=1, max_pages_per_request=1)
        self._pages: KvPages | None = None
        self._host_pool: HostPool | None = None
        self._narrow: list[int] = []
        self._orders: _core.PagePools | None = None  # what follows the plan's orders of pages

    def bind(self, words: np.ndarray) -> None:
        """See Share."""
        pages, page_size = (int(n) for n in words)
        self._pages = KvPages(self._model, pages, page_size, CPU)
        self._model.bind_cache(*self._pages.tensors)
        self._host_pool = self._orders = None
        self._narrow = []

    def do(self, kind: int, words: np.ndarray) -> None:
        """See Share."""
        if self._pages is None:
            return
        if kind == NARROW:
            self._narrow = words.tolist()
            self._orders = _core.PagePools([], *self._pages.tensors, self._narrow)
        elif kind == HOST_POOL:
            self._host_pool = HostPool(
                self._pages.tensors, int(words[0]), narrow_windows=self._narrow
            )
            self._orders = self._host_pool.core

    def release(self) -> None:
        """See Share."""
        if self._pages is not None:
            self._pages.release()
        if self._host_pool is not None:
            self._host_pool.release()

    def forward(self, words: np.ndarray, rest: np.ndarray) -> None:
        """See Share."""
        plan, model, link = self._plan, self._model, self._team.link
        plan.unpack(words)
        if len(plan.kv_moves):
            _core.move_kv(model.core, plan.kv_moves)
        if self._orders is not None and len(plan.page_orders):
            self._orders.follow(plan.page_orders)
        embedded = rest.view(np.float32).reshape(plan.num_rows, model.hidden_size)
        step = _core.ShardedStep(model.core, plan, embedded)
        gathered = run_parts(step, link)
        if plan.needs_logits:
            finish_scores(step, link, model.shard, gathered, plan)
        else:
            finish_ids(step, link, gathered, plan)


class _Follower:
    def __init__(self, team: Team) -> None:
        self._team = team
        self._share: Share | None = None

    def serve(self) -> bool:
        """Do what the next packet says; False: it is the last."""
        kind, words, rest = self._team.link.hear()
        share = self._share
        if kind == LOAD:
            self._load(json.loads(bytes(words)))
        elif share is not None and kind == FORWARD:
            share.forward(words.view(np.int32), rest)
        elif share is not None and kind == BIND:
            share.bind(words.view(np.int32))
        elif share is not None and kind == RELEASE:
            share.release()
        elif share is not None and kind != END:
            share.do(kind, words.view(np.int32))
        return kind != END

    def _load(self, arguments: dict[str, Any]) -> None:
        number = arguments.pop("number")
        fingerprint, path = arguments.pop("fingerprint"), Path(arguments.pop("path"))
        devices, plugin = arguments.pop("devices"), arguments.pop("plugin")
        self._share = None  # of an LLM that was closed
        answer = "ok"
        try:
            found = model_fingerprint(path)
            if found != fingerprint:
                raise ModelError(
                    f"{path} holds other files here ({found}) than at rank 0 ({fingerprint}); "
                    "copy the same model to every machine"
                )
            place = _place_of(devices[self._team.rank], plugin) if devices else CPU
            model: Any = load_model(path, **arguments, place=place, team=self._team)
            self._share = HostShare(model, self._team)
            if not place.is_cpu:
                from .device_share import DeviceShare

                self._share = DeviceShare(model, place)
        except (SpecdecError, OSError, MemoryError) as error:
            answer = str(error) or type(error).__name__
        self._team.say_loaded(number, answer)


def _place_of(device: str, plugin: str | None) -> Place:
    """This rank's own; plugin: the file of the backend that is no part of this package."""
    if plugin is not None and device not in ops.backend_names():
        ops.load_backend(device, plugin)
    return resolve_device(device)


def _end_with_parent() -> None:
    """Rank 0 holds the other end of this pipe: when that is gone, so is rank 0."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(LOST_EXIT_CODE)

    threading.Thread(target=watch, name="specdec-parent", daemon=True).start()


def main(rank: int, size: int, *files: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    return follow(enter(rank, size, files))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
