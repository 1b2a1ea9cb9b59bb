"""The interpreter while it serves: threads take turns sooner, and collections are short."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator

__all__ = ["SWITCH_SECONDS", "serving_interpreter"]

# The event loop, the engine's thread and the threads that read prompts share one interpreter. Who
# wants it waits so long for one that computes; Python's 5 ms would be a token's whole delay.
SWITCH_SECONDS = 0.0005

_lock = threading.Lock()
_servers = 0  # that run in this process
_switch_seconds = 0.0  # before the first of them
_unfreezes = False  # nobody had left objects out of collections before


@contextlib.contextmanager
def serving_interpreter() -> Iterator[None]:
    """While a server runs: SWITCH_SECONDS hold, and what was there before it (modules, model,
    tokenizer) is left out of garbage collections, of which a full one stops all threads. Where the
    process had left objects out by itself, they stay out at the end, these with them."""
    global _servers, _switch_seconds, _unfreezes
    with _lock:
        _servers += 1
        if _servers == 1:
            _switch_seconds = sys.getswitchinterval()
            sys.setswitchinterval(min(_switch_seconds, SWITCH_SECONDS))
            _unfreezes = gc.get_freeze_count() == 0
            gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _servers -= 1
            if _servers == 0:
                if _unfreezes:
                    gc.unfreeze()
                sys.setswitchinterval(_switch_seconds)
