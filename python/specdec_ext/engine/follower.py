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
from typing import Any

import numpy as np

from .. import _core
from ..errors import ModelError, SpecdecError
from ..models.load import load_model
from ..models.place import CPU
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


class _Follower:
    def __init__(self, team: Team) -> None:
        self._team = team
        self._plan = _core.StepPlan(max_requests=1, max_rows=1, max_pages_per_request=1)
        self._model: Any = None
        self._pages: KvPages | None = None
        self._host_pool: HostPool | None = None
        self._narrow: list[int] = []
        self._orders: _core.PagePools | None = None  # what follows the plan's orders of pages

    def serve(self) -> bool:
        """Do what the next packet says; False: it is the last."""
        kind, words, rest = self._team.link.hear()
        if kind == FORWARD:
            self._forward(words, rest)
        elif kind == LOAD:
            self._load(json.loads(bytes(words)))
        elif kind == BIND:
            pages, page_size = (int(n) for n in words.view(np.int32))
            self._pages = KvPages(self._model, pages, page_size, CPU)
            self._model.bind_cache(*self._pages.tensors)
            self._host_pool = self._orders = None
            self._narrow = []
        elif kind == NARROW and self._pages is not None:
            self._narrow = words.view(np.int32).tolist()
            self._orders = _core.PagePools([], *self._pages.tensors, self._narrow)
        elif kind == HOST_POOL and self._pages is not None:
            self._host_pool = HostPool(
                self._pages.tensors,
                int(words.view(np.int32)[0]),
                narrow_windows=self._narrow,
            )
            self._orders = self._host_pool.core
        elif kind == RELEASE and self._pages is not None:
            self._pages.release()
            if self._host_pool is not None:
                self._host_pool.release()
        return kind != END

    def _forward(self, words: np.ndarray, rest: np.ndarray) -> None:
        plan, model, link = self._plan, self._model, self._team.link
        plan.unpack(words.view(np.int32))
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

    def _load(self, arguments: dict[str, Any]) -> None:
        number = arguments.pop("number")
        fingerprint, path = arguments.pop("fingerprint"), Path(arguments.pop("path"))
        self._model = self._pages = None  # of an LLM that was closed
        answer = "ok"
        with self._team.alive():
            try:
                found = model_fingerprint(path)
                if found != fingerprint:
                    raise ModelError(
                        f"{path} holds other files here ({found}) than at rank 0 ({fingerprint}); "
                        "copy the same model to every machine"
                    )
                self._model = load_model(path, **arguments, team=self._team)
            except (SpecdecError, OSError, MemoryError) as error:
                answer = str(error) or type(error).__name__
        self._team.say_loaded(number, answer)


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
