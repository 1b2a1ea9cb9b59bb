"""The process while it serves: threads take turns sooner, collections are short, freed memory is
used again."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator

__all__ = ["COLLECTIONS", "SWITCH_SECONDS", "serving_interpreter", "share_arenas"]

# The event loop, the engine's thread and the threads that read prompts share one interpreter. Who
# wants it waits so long for one that computes; Python's 5 ms would be a token's whole delay.
SWITCH_SECONDS = 0.0005

# gc.set_threshold's. A collection of the second generation looks at what so many of the first one
# have left: of ten, Python's own number, it stopped all threads for 2 ms, and every token of that
# step was late. Those of the third come as often as before.
COLLECTIONS = (700, 3, 33)
_PYTHONS_COLLECTIONS = (700, 10, 10)

# glibc gives up to eight arenas per core to threads, and what is free in one serves no other: under
# changing load a server's memory grew for hours (6 MB a minute) while what it used did not. Few of
# its threads allocate at a time, because they hold the interpreter.
MALLOC_ARENAS = 2
_M_ARENA_MAX = -8  # of mallopt(3)

_lock = threading.Lock()
_servers = 0  # that run in this process
_switch_seconds = 0.0  # before the first of them
_collections = _PYTHONS_COLLECTIONS  # the same
_froze = False  # they have left objects out of collections, who had none left out before


def share_arenas() -> None:
    """From now on no more malloc arenas than MALLOC_ARENAS, where the C library has such and nobody
    has said else. What threads have by then stays: the sooner it is called the better."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"} & os.environ.keys():
        mallopt(_M_ARENA_MAX, MALLOC_ARENAS)


@contextlib.contextmanager
def serving_interpreter() -> Iterator[None]:
    """While a server runs: SWITCH_SECONDS hold, and what was there before it (modules, model,
    tokenizer) is left out of garbage collections, of which a full one stops all threads; others
    come in smaller parts, unless the process has thresholds of its own. Where the process has left
    objects out by itself, it stays at that: what is left out with them is there for ever, every
    application of a server that has ended. From the first server on the process has few malloc
    arenas."""
    global _collections, _froze, _servers, _switch_seconds
    with _lock:
        _servers += 1
        if _servers == 1:
            _switch_seconds = sys.getswitchinterval()
            sys.setswitchinterval(min(_switch_seconds, SWITCH_SECONDS))
            share_arenas()
            _collections = gc.get_threshold()
            if _collections == _PYTHONS_COLLECTIONS:
                gc.set_threshold(*COLLECTIONS)
            _froze = gc.get_freeze_count() == 0
            if _froze:
                gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _servers -= 1
            if _servers == 0:
                if _froze:
                    gc.unfreeze()
                gc.set_threshold(*_collections)
                sys.setswitchinterval(_switch_seconds)
