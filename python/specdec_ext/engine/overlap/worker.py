"""Work that Ctrl-C cannot tear in two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Worker"]


class Worker:
    """Runs one job after the other, each as a whole.

    Python raises KeyboardInterrupt in the main thread alone. So the main thread has another one do
    the work and waits for it: an interrupt ends the wait and not the job. Other threads work
    themselves. A job whose run() was interrupted may run late, so it has to know whether it is
    still wanted.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        # A pool that is interrupted while it starts its thread may start a second one.
        self._lock = threading.Lock()

    def run(self, job: Callable[[], None]) -> None:
        """Run `job` and return when it is done; interrupted, it runs as a whole or not at all."""
        if threading.current_thread() is not threading.main_thread():
            self._do(job)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="specdec-enqueue")
        self._pool.submit(self._do, job).result()

    def _do(self, job: Callable[[], None]) -> None:
        with self._lock:
            job()
