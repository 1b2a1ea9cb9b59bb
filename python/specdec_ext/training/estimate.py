"""What a run will need, before it starts: memory, disk, time. Refused where it cannot fit.

Memory is counted from shapes. Times follow from two rates of the machine that are measured first:
matrix products and memory traffic; a real run reaches about `EFFICIENCY` of them.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..engine.memory_plan import available_memory_bytes
from ..errors import ConfigError
from .loss import DRAWN, FREQUENT
from .passes import SELF_MAX_TOKENS, pass_rows
from .taps import kept_bytes

__all__ = ["Estimate", "Machine", "Work", "estimate_run", "measure_machine", "words_of_seconds"]

EFFICIENCY = 0.5
# What the host takes for a pass of the target, and for a step of training.
_PASS_SECONDS, _STEP_SECONDS = 0.005, 0.02
# Kernels, library workspaces and what an allocator loses between blocks.
_FIXED_BYTES, _SLACK = 768 << 20, 1.10
# Bytes that a row of an activation of the trained network takes until its gradient is there: the
# value and its gradient, in both precisions.
_ROW_BYTES = 16


@dataclass(frozen=True)
class Machine:
    """Free bytes and measured rates of where a run happens.

    device_bytes  memory of the accelerator; None: the host's is used
    """

    host_bytes: int
    disk_bytes: int
    flops: float
    bytes_per_second: float
    device_bytes: int | None = None


@dataclass(frozen=True)
class Work:
    """What is to be done, in numbers.

    target_bytes, target_parameters, kv_token_bytes
                      of the target; K/V of one token in all layers
    write_tokens      that the target writes; read_tokens: that it reads, prompts included
    cache_tokens      whose hidden states the cache takes
    trained           parameters; widths: outputs of all trained layers, in elements of a row
    embeds            the target's embedding table is needed
    rows              of one part of a step, and those that go through the trained network
    step_rows         of a whole step, of all ranks
    state_tokens      of texts whose states of inner layers training reads from the target, on the
                      CPU; state_bytes: what it would keep of all of them
    epochs            how often training meets a text
    """

    product: str
    hidden_size: int
    vocab_size: int
    target_bytes: int
    target_parameters: int
    kv_token_bytes: int
    write_tokens: int
    read_tokens: int
    cache_tokens: int
    max_prompt_len: int
    max_new_tokens: int
    batch_size: int
    draft_vocab_size: int
    trained: int
    widths: int
    embeds: bool
    rows: int
    trained_rows: int
    step_rows: int
    steps: int
    ranks: int = 1
    state_tokens: int = 0
    state_bytes: int = 0
    epochs: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds; parts: name -> bytes, of the larger of the two phases."""

    collect_bytes: int
    train_bytes: int
    disk_bytes: int
    collect_seconds: float
    train_seconds: float
    collect_parts: Mapping[str, int]
    train_parts: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, machine: Machine) -> list[str]:
        """For people, with what the machine has."""
        memory = machine.host_bytes if machine.device_bytes is None else machine.device_bytes
        where = "memory" if machine.device_bytes is None else "device memory"
        return [
            f"collecting: about {words_of_seconds(self.collect_seconds)}, "
            f"{_gb(self.collect_bytes)} of {_gb(memory)} {where} ({_parts(self.collect_parts)}), "
            f"{_gb(self.disk_bytes)} of {_gb(machine.disk_bytes)} disk",
            f"training: about {words_of_seconds(self.train_seconds)}, {_gb(self.train_bytes)} of "
            f"{_gb(memory)} {where} ({_parts(self.train_parts)})",
        ]

    def check(self, machine: Machine, cache_dir: Path) -> None:
        """Raises ConfigError, with the numbers, where memory or disk cannot hold it."""
        memory = machine.host_bytes if machine.device_bytes is None else machine.device_bytes
        where = "memory is" if machine.device_bytes is None else "device memory is"
        for phase, need, parts, remedy in (
            ("collecting", self.collect_bytes, self.collect_parts,
             "lower --collect-batch, --max-new-tokens or --max-prompt-len"),
            ("training", self.train_bytes, self.train_parts,
             "lower --batch-texts, raise --accumulation, or lower --draft-vocab-size, --num-heads "
             "or --num-layers"),
        ):  # fmt: skip
            if need > memory:
                raise ConfigError(
                    f"{phase} needs {_gb(need)} ({_parts(parts)}), {_gb(memory)} of {where} free; "
                    f"{remedy}, or take a larger device"
                )
        if self.disk_bytes > machine.disk_bytes:
            raise ConfigError(
                f"{cache_dir}: the cache needs {_gb(self.disk_bytes)}, {_gb(machine.disk_bytes)} "
                "are free; free space, give another --cache-dir, or lower --num-prompts"
            )


def estimate_run(work: Work, machine: Machine) -> Estimate:
    """Pure arithmetic."""
    w = work
    positions = w.max_prompt_len + max(w.max_new_tokens, SELF_MAX_TOKENS)
    rows = pass_rows(w.batch_size, w.max_prompt_len)
    collect = {
        "weights": w.target_bytes,
        "K/V": w.batch_size * positions * w.kv_token_bytes,
        "a pass": rows * (4 * w.hidden_size * 8 + 4 * min(w.vocab_size, 1 << 16)),
    }
    scored = min(w.draft_vocab_size, FREQUENT + DRAWN + w.step_rows)
    train = {
        "weights, gradients, Adam": 16 * w.trained,
        "bf16 weights": 2 * w.trained,
        "head": 6 * w.draft_vocab_size * w.hidden_size + 2 * scored * w.hidden_size,
        "embeddings": 4 * w.vocab_size * w.hidden_size if w.embeds else 0,
        "rows": 8 * w.rows * w.hidden_size
        + 2 * w.rows * scored
        + _ROW_BYTES * w.trained_rows * (w.widths + 4 * w.hidden_size),
    }
    kept = min(w.state_bytes, kept_bytes(machine.host_bytes))
    if machine.device_bytes is None and kept:
        train["states of the target"] = kept
    rate = EFFICIENCY * machine.flops
    traffic = EFFICIENCY * machine.bytes_per_second
    passes = math.ceil(w.write_tokens / max(1, w.batch_size))
    one_pass = max(w.target_bytes / traffic, 2 * w.target_parameters * w.batch_size / rate)
    collect_seconds = (
        passes * (one_pass + _PASS_SECONDS) + 2 * w.target_parameters * w.read_tokens / rate
    )
    parts = max(1, round(w.step_rows / max(1, w.rows)))
    products = 6 * w.trained * w.trained_rows * parts
    products += (2 * w.step_rows + 4 * w.trained_rows * parts) * scored * w.hidden_size
    step = products / w.ranks / rate + 32 * w.trained / traffic + _STEP_SECONDS
    share = kept / max(1, w.state_bytes)  # of the texts, which are read once
    reads = share * min(1.0, w.epochs) + (1 - share) * w.epochs
    state_seconds = 2 * w.target_parameters * w.state_tokens * reads / rate
    return Estimate(
        collect_bytes=_whole(collect),
        train_bytes=_whole(train),
        disk_bytes=2 * w.cache_tokens * w.hidden_size + 4 * (w.cache_tokens + w.read_tokens),
        collect_seconds=collect_seconds / w.ranks,
        train_seconds=w.steps * step + state_seconds,
        collect_parts=collect,
        train_parts=train,
    )


def _whole(parts: Mapping[str, int]) -> int:
    return int(sum(parts.values()) * _SLACK) + _FIXED_BYTES


def measure_machine(device: torch.device, cache_dir: Path) -> Machine:
    """Free bytes and the two rates, measured in a fraction of a second."""
    on_cuda = device.type == "cuda"
    size = 4096 if on_cuda else 512
    flops = 0.0
    for dtype in (torch.bfloat16, torch.float32):  # the faster of them is not the same everywhere
        a = torch.ones(size, size, device=device, dtype=dtype)
        flops = max(flops, 2 * size**3 / _seconds(partial(torch.matmul, a, a), device))
    block = torch.ones((256 if on_cuda else 16) << 20, dtype=torch.uint8, device=device)
    traffic = 2 * block.numel() / _seconds(lambda: block.clone(), device)
    there = next(path for path in (cache_dir, *cache_dir.parents) if path.exists())
    free = None
    if on_cuda:
        del a, block
        torch.cuda.empty_cache()
        free = int(torch.cuda.mem_get_info(device)[0])
    return Machine(
        host_bytes=available_memory_bytes(),
        disk_bytes=shutil.disk_usage(there).free,
        flops=flops,
        bytes_per_second=traffic,
        device_bytes=free,
    )


def _seconds(work: Any, device: torch.device) -> float:
    """The fastest of a few runs."""
    best = math.inf
    for _ in range(4):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gb(count)}" for name, count in parts.items() if count)


def words_of_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
