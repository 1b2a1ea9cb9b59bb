"""The ranks of a model: started, greeted, told what to do, and ended together."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..config.ranks import World, world_of
from ..errors import ConfigError, EngineError, ModelError
from .fingerprint import program_fingerprint
from .link import HEARTBEAT_S, Link, LostRankError
from .processes import end_processes, interrupts_wait, is_stopped
from .shared_link import SharedLink, make_memory

if TYPE_CHECKING:
    from .tensor_link import TensorLink

__all__ = [
    "BIND", "COPIES", "END", "FORWARD", "HOST_POOL", "LOAD", "LOST_EXIT_CODE", "MOVES", "NARROW",
    "RECORD", "RECORDED", "RELEASE", "REPLAY", "Team", "enter", "join", "lead",
]  # fmt: skip

# Kinds of packets.
LOAD, BIND, FORWARD, RELEASE, HOST_POOL, NARROW, END = range(7)
MOVES, COPIES, RECORD, RECORDED, REPLAY = range(7, 12)  # of devices
# What a rank ends with that has lost another.
LOST_EXIT_CODE = 75
_START_S = 120.0  # for ranks to start and find each other
_LAST_WORDS_S = 2.0
_BEATS = 8  # in the time of silence after which a rank is lost
_LOOK_S = 0.1  # how often rank 0 looks after the others while it waits for a device


class Team:
    """This process among the ranks.

    rank, size  0 plans and decides; the others run their share of its forward passes
    link        to the others
    devices     of the model that is loaded next, one for each rank, as LLM takes them; empty: the
                CPU
    tensor_links  by device, what link_for() has made
    outlives    it serves one model after another, and ends with the process
    threads_before  of this process, if they are fewer while other ranks run beside it; else 0

    Every method raises EngineError when a rank is lost; all that follow say the same.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        make_link: Callable[[], Link],
        processes: Sequence[Any] = (),
        *,
        outlives: bool = False,
    ) -> None:
        """store      texts by keys: torch's, or a Board
        make_link  called when all ranks have said that they are there
        processes  of the other ranks, where rank 0 has started them
        """
        self.rank, self.size = rank, size
        self.threads_before = 0
        self.outlives = outlives
        self.devices: tuple[str, ...] = ()
        self.tensor_links: dict[str, TensorLink] = {}
        self._store = store
        self._beats: dict[int, tuple[str, float]] = {}  # by rank: the last one, and when it came
        self._looked = 0.0
        self._processes = processes
        self._lost: EngineError | None = None
        self._models = 0
        self._greet()
        with self._talking("they were joining"):
            self.link = make_link()
        self._end = weakref.finalize(self, end_processes, processes)

    def tell(self, kind: int, *parts: Any) -> None:
        """Rank 0: a packet to all others (Link.tell)."""
        with self.step():
            self.link.tell(kind, *parts)

    def load(self, arguments: dict[str, Any]) -> None:
        """Rank 0: the others load their shards of a model, with load_model's arguments."""
        self._models += 1
        words = json.dumps({**arguments, "number": self._models}).encode()
        self.tell(LOAD, np.frombuffer(words, dtype=np.uint8))

    def release_pages(self) -> None:
        """Rank 0: the others give the memory of their pages back, which nobody uses."""
        self.tell(RELEASE)

    def make_host_pool(self, num_pages: int) -> None:
        """Rank 0: the others make room for so many pages of preempted requests, of their heads."""
        self.tell(HOST_POOL, np.array([num_pages], dtype=np.int32))

    def narrow(self, windows: Sequence[int]) -> None:
        """Rank 0, behind bind_cache(): layers with these windows (0: none) give the memory of pages
        back that they have left."""
        self.tell(NARROW, np.array(windows, dtype=np.int32))

    def look(self) -> None:
        """Rank 0, while it loads, too: has a process ended that it has started?"""
        for rank in range(1, self.size):
            if self._exit_code(rank) is not None:
                raise self._lose(rank, silent=False, when="it was loading its weights")

    def watch(self) -> None:
        """Rank 0, as often as it likes while it waits for a device that may wait for the others:
        has a process ended, or given no heartbeat (alive()) for too long?"""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        if self._lost is not None:
            raise self._lost
        for rank in range(1, self.size):
            if self._exit_code(rank) is not None:
                raise self._lose(rank, silent=False, when="a step was running")
            last, heard = self._beats.get(rank, ("", now))
            beat = self._read(f"beat/{rank}")
            if beat != last:
                last, heard = beat, now
            self._beats[rank] = (last, heard)
            if now - heard > HEARTBEAT_S:
                raise self._lose(rank, silent=True, when="a step was running")

    def wait_loaded(self) -> None:
        """Rank 0: until the others have. Raises ModelError with what one of them says."""
        for rank in range(1, self.size):
            text = self._wait(
                f"loaded/{self._models}/{rank}", HEARTBEAT_S, "it was loading its weights"
            )
            if text != "ok":
                raise ModelError(f"rank {rank} of {self.size}: {text}")

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Another rank: heartbeats while the block runs, in which it answers nobody."""
        done = threading.Event()

        def beat() -> None:
            number = 0
            while not done.wait(HEARTBEAT_S / _BEATS):
                number += 1
                with contextlib.suppress(RuntimeError):  # rank 0 has ended
                    self._store.set(f"beat/{self.rank}", str(number))

        thread = threading.Thread(target=beat, name="specdec-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(1.0)  # a store whose rank 0 has gone may keep it

    def say_loaded(self, number: int, text: str) -> None:
        """Another rank: "ok", or why it cannot load the model that was asked for."""
        self._store.set(f"loaded/{number}/{self.rank}", text)

    def say_why(self, text: str) -> None:
        """Another rank, before it ends: what went wrong in it."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"why/{self.rank}", text)

    def accuse(self, lost: LostRankError) -> None:
        """Another rank, before it ends: whom it waited for."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("lost", "", f"{lost.rank} {int(lost.silent)}")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Rank 0: calls of the link that belong together. Ctrl-C comes behind them, as it does
        behind a call of the core: a step that one rank leaves is lost for all."""
        if self._lost is not None:
            raise self._lost
        with self._talking("a step was running"), interrupts_wait():
            try:
                yield
            except (LostRankError, ValueError):
                raise
            except BaseException as error:
                self._lost = EngineError(
                    f"tensor parallel: a step was torn by {type(error).__name__}: {error}; make a "
                    "new LLM"
                )
                self.abort()
                raise

    def close(self) -> None:
        """Rank 0: the others end. May be called twice."""
        if self.rank > 0 or not self._end.alive:
            return
        if self._lost is None:
            with contextlib.suppress(LostRankError):
                self.link.tell(END)
            deadline = time.monotonic() + 5.0
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        self._lost = self._lost or EngineError("the ranks have ended; make a new LLM")
        self.abort()
        if self.threads_before:
            _core.set_num_threads(self.threads_before)
            self.threads_before = 0

    def abort(self) -> None:
        """End the processes that this one has started, whatever they do."""
        self._end()
        for link in self.tensor_links.values():
            link.abort()
        self.tensor_links.clear()

    @property
    def store(self) -> Any:
        """Texts by keys, which all ranks read: torch's, or a Board."""
        return self._store

    def hear_text(self, key: str) -> str:
        """Another rank: the text that rank 0 sets, however long that takes."""
        while not (text := self._read(key)):
            time.sleep(0.02)
        return text

    def _greet(self) -> None:
        """All ranks are there, and run the same program."""
        own = program_fingerprint()
        self._store.set(f"hello/{self.rank}", own)
        if self.rank > 0:
            return
        for rank in range(1, self.size):
            other = self._wait(f"hello/{rank}", _START_S, "it was starting")
            if other != own:
                raise ConfigError(
                    f"rank {rank} runs {other}, rank 0 runs {own}: install the same build of "
                    "specdec_ext for every rank"
                )

    def _wait(self, key: str, seconds: float, when: str) -> str:
        """The text that another rank sets; it has so many seconds from its last heartbeat on, and
        a process of ours that is stopped no more than HEARTBEAT_S."""
        rank = int(key.rpartition("/")[2])
        beat, heard = "", time.monotonic()
        runs = heard
        while True:
            if text := self._read(key):
                return text
            time.sleep(0.02)
            if self._exit_code(rank) is not None:
                raise self._lose(rank, silent=False, when=when)
            now, last = time.monotonic(), self._read(f"beat/{rank}")
            if last != beat:
                beat, heard = last, now
            if not (self._processes and is_stopped(self._processes[rank - 1].pid)):
                runs = now
            if now - heard > seconds:
                raise self._lose(rank, silent=True, when=when, seconds=seconds)
            if now - runs > HEARTBEAT_S:
                raise self._lose(rank, silent=True, when=when)

    @contextlib.contextmanager
    def _talking(self, when: str) -> Iterator[None]:
        try:
            yield
        except LostRankError as lost:
            if self.rank > 0:
                raise
            raise self._explain(lost, when) from None

    def _explain(self, lost: LostRankError, when: str) -> EngineError:
        """Who is to blame: who has ended, else whom another rank waited for, else the silent."""
        deadline = time.monotonic() + _LAST_WORDS_S
        rank, silent = lost.rank, lost.silent
        while not silent and time.monotonic() < deadline:
            ended = [
                r for r in range(1, self.size) if self._exit_code(r) not in (None, LOST_EXIT_CODE)
            ]
            if ended:
                rank = ended[0]
                break
            if claim := self._read("lost"):
                rank, silent = int(claim.split()[0]), claim.endswith("1")
                break
            time.sleep(0.05)
        return self._lose(rank, silent=silent, when=when)

    def _lose(
        self, rank: int, *, silent: bool, when: str, seconds: float | None = None
    ) -> EngineError:
        why = self._read(f"why/{rank}")
        if why:
            what = f"failed: {why}"
        elif silent:
            limit = seconds or HEARTBEAT_S
            what = f"gave no heartbeat for {limit:g} s while {when}: it hangs or was stopped"
        else:
            code = self._exit_code(rank)
            ending = "" if code is None else f" (exit code {code})"
            if code is not None and code < 0:
                ending = f" (killed by {signal.Signals(-code).name})"
            what = f"ended{ending} while {when}"
        remedy = "look at its output, and at the system's log for a lack of memory; make a new LLM"
        self._lost = EngineError(
            f"tensor parallel: rank {rank} of {self.size} {what}. All ranks end; {remedy}"
        )
        if hasattr(self, "_end"):
            self.abort()
        else:
            end_processes(self._processes)
        return self._lost

    def _exit_code(self, rank: int) -> int | None:
        code = self._processes[rank - 1].poll() if self._processes else None
        return None if code is None else int(code)

    def _read(self, key: str) -> str:
        try:
            return str(self._store.get(key).decode()) if self._store.check([key]) else ""
        except RuntimeError:
            return ""


def lead(size: int) -> Team:
    """Rank 0: the other ranks of this machine are started, or torchrun has started them."""
    world = world_of()
    if world is not None:
        return join(world)
    before = _core.num_threads()
    threads = min(before, max(1, len(os.sched_getaffinity(0)) // size))
    if threads != before:
        _core.set_num_threads(threads)
    processes: list[Any] = []
    files = make_memory(size)
    for rank in range(1, size):
        process = subprocess.Popen(
            [sys.executable, "-m", "specdec_ext.engine.follower", *map(str, [rank, size, *files])],
            stdin=subprocess.PIPE,
            pass_fds=files,
            # Ctrl-C of the terminal is for rank 0, which ends the others.
            start_new_session=True,
            env={**os.environ, "SPECDEC_NUM_THREADS": str(threads)},
        )
        processes.append(process)
    link = SharedLink(
        files,
        0,
        size,
        heartbeat_s=HEARTBEAT_S,
        has_ended=lambda rank: processes[rank - 1].poll() is not None,
    )
    try:
        team = Team(link.board, 0, size, lambda: link, processes)
    except BaseException:
        end_processes(processes)
        _core.set_num_threads(before)
        raise
    team.threads_before = before if before != threads else 0
    return team


def enter(rank: int, size: int, files: Sequence[int]) -> Team:
    """Another rank that lead() has started, with the memory that it has inherited."""
    link = SharedLink(files, rank, size, heartbeat_s=HEARTBEAT_S)
    return Team(link.board, rank, size, lambda: link)


_joined: list[Team] = []


def join(world: World) -> Team:
    """The team of the ranks that torchrun has started: one per process, however many models."""
    if _joined:
        return _joined[0]
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, size = next(rendezvous("env://", timeout=datetime.timedelta(seconds=_START_S)))
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConfigError(
            f"tensor parallel: rank {world.rank} cannot meet the others at {address} "
            f"({str(error).splitlines()[0]}); choose a free port (torchrun --master-port)"
        ) from None
    threads = max(1, len(os.sched_getaffinity(0)) // world.local_size)
    if _core.num_threads() > threads:
        _core.set_num_threads(threads)
    store = PrefixStore("specdec_ext", store)

    def make_link() -> Link:
        from .gloo_link import GlooLink

        return GlooLink(store, rank, size, heartbeat_s=HEARTBEAT_S)

    team = Team(store, rank, size, make_link, outlives=True)
    _joined.append(team)
    if rank == 0:
        atexit.register(team.close)
    return team
