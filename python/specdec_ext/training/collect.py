"""What a run trains on, collected into a cache: the target reads texts, or writes them itself.

Texts that any file of the cache holds are taken from there. Under torchrun every rank collects
its share of the shards, on its own device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config.validate import check_int
from ..errors import ConfigError
from .cache import CacheWriter, TextRecord, shard_name
from .interrupts import CHECKPOINT_SECONDS, Interrupts, Stopped
from .passes import TargetPasses
from .ranks import ALONE, Ranks
from .texts import Task

__all__ = ["CollectConfig", "Collector", "collect", "shard_keys"]


@dataclass(frozen=True)
class CollectConfig:
    """What data to collect.

    num_prompts     texts of the built-in prompts; of the user's data the first so many, None: all
    max_new_tokens  most tokens of a continuation
    max_prompt_len  longer prompts are cut at their beginning
    shard_size      texts of one file
    batch_size      texts of one forward pass; decides no text
    """

    num_prompts: int | None = None
    max_new_tokens: int = 160
    max_prompt_len: int = 448
    seed: int = 20261121
    shard_size: int = 64
    batch_size: int = 32

    def __post_init__(self) -> None:
        if self.num_prompts is not None:
            check_int("num_prompts", self.num_prompts, ConfigError, low=1, high=1 << 30)
        for name, low, high in (
            ("max_new_tokens", 2, 1 << 20),
            ("max_prompt_len", 1, 1 << 20),
            ("seed", 0, 2**63 - 1),
            ("shard_size", 1, 1 << 16),
            ("batch_size", 1, 1024),
        ):
            check_int(name, getattr(self, name), ConfigError, low=low, high=high)


def shard_keys(tasks: Sequence[Task], shard_size: int) -> list[list[str]]:
    """The keys of each shard of these tasks."""
    return [
        [task.key for task in tasks[at : at + shard_size]]
        for at in range(0, len(tasks), shard_size)
    ]


class Collector:
    """Completes the shards of `tasks` that are missing; step() is one forward pass or a few."""

    def __init__(
        self,
        writer: CacheWriter,
        passes: TargetPasses,
        tasks: Sequence[Task],
        shard_size: int,
        *,
        ranks: Ranks = ALONE,
    ) -> None:
        self._writer, self._passes = writer, passes
        self._pending = f"pending-{ranks.rank}.safetensors"
        keys = shard_keys(tasks, shard_size)
        missing = [i for i, part in enumerate(keys) if not writer.has(part)]
        mine = missing[ranks.rank :: ranks.world]
        self._keys = {i: keys[i] for i in mine}
        self._shards_of: dict[str, list[int]] = {}
        for i in mine:
            for key in keys[i]:
                self._shards_of.setdefault(key, []).append(i)
        self._ready: dict[str, TextRecord] = writer.known(self._shards_of)
        by_key = {task.key: task for task in tasks}
        todo = [by_key[key] for key in self._shards_of if key not in self._ready]
        self._to_read = deque(task for task in todo if task.answer is not None)
        self._to_write = deque(task for task in todo if task.answer is None)
        self.num_texts = len(tasks) if ranks.world == 1 else len(self._shards_of)
        self.num_done = self.num_texts - len(todo)
        self.num_tokens = 0  # of the continuations of this run
        for i in mine:
            self._complete(i)

    def step(self) -> bool:
        """False when every shard of this rank is written."""
        if not self._keys:
            return False
        if self._to_read:
            count = min(self._passes.batch_size, len(self._to_read))
            records = self._passes.read([self._to_read.popleft() for _ in range(count)])
        else:
            while self._to_write and self._passes.num_running < self._passes.batch_size:
                self._passes.submit(self._to_write.popleft())
            records = self._passes.step()
        for record in records:
            self._ready[record.key] = record
            self.num_done += 1
            self.num_tokens += len(record.continuation)
            for shard in self._shards_of[record.key]:
                self._complete(shard)
        return bool(self._keys)

    def _complete(self, shard: int) -> None:
        """Write the shard if all its texts are there."""
        keys = self._keys.get(shard)
        if keys is None or not all(key in self._ready for key in keys):
            return
        self._writer.write(shard_name(keys), [self._ready[key] for key in keys])
        del self._keys[shard]
        for key in keys:
            self._shards_of[key].remove(shard)
            if not self._shards_of[key]:
                self._ready.pop(key)

    def save(self) -> None:
        """Keep the texts of shards that are not complete."""
        if self._ready:
            self._writer.write(self._pending, list(self._ready.values()))
        else:
            self._writer.drop(self._pending)


def collect(
    collector: Collector,
    *,
    interrupts: Interrupts | None = None,
    time_limit_s: float | None = None,
    on_step: Callable[[Collector], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Complete the shards, or as many as `time_limit_s` allows; saved every minute.

    Raises Stopped when it was interrupted, ModelError when the disk refuses or the model fails.
    """
    begin = saved = clock()
    more = True
    while more:
        more = collector.step()
        now = clock()
        if on_step is not None:
            on_step(collector)
        if more and interrupts is not None and interrupts.asked:
            collector.save()
            raise Stopped(
                f"stopped with {collector.num_done} of {collector.num_texts} texts collected"
            )
        if now - saved > CHECKPOINT_SECONDS:
            collector.save()
            saved = clock()
        if time_limit_s is not None and now - begin > time_limit_s:
            break
    collector.save()
