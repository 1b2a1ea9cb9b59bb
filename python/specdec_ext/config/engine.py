"""The K/V cache and the scheduler of an engine: frozen dataclasses that are valid once they exist.

Nothing in this folder imports more than the standard library (and yaml), so that `specdec --help`
answers and configuration files are checked without torch. parse.py reads dicts, JSON, YAML and
lists. What the engine does not do in this version is refused with UnsupportedConfigError: a
parameter is honoured or refused, never ignored.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..errors import ConfigError
from .attention import check_sinks, check_window
from .base import Spellings, _Config
from .dtypes import normalize_kv_dtype
from .limits import MAX_OVERLAP_DEPTH
from .validate import check_bool, check_choice, check_float, check_int

__all__ = ["POLICIES", "KvCacheConfig", "SchedulerConfig", "bytes_of_gib", "pages_for"]


def bytes_of_gib(where: str, value: Any) -> int:
    """A number of GiB in bytes. Raises ConfigError that begins with `where`."""
    return int(check_float(where, value, ConfigError, low=0.0, high=2.0**32,
                           remedy="it is a number of GiB") * 2**30)  # fmt: skip


def _swap_space(name: str, value: Any) -> int:
    return bytes_of_gib(f"KvCacheConfig.{name}", value)


@dataclass(frozen=True)
class KvCacheConfig(_Config):
    """The paged KV cache.

    tokens_per_block          page size in tokens, a power of two, 1..128
    max_tokens                tokens that the page pool holds; None: see docs/usage.md, "Memory"
    free_gpu_memory_fraction  the pool's limit as a fraction of the free memory of the device that
                              holds it (on CPU the host's available memory), (0, 1]
    enable_block_reuse        prefix reuse: a request uses the K/V of full blocks that an earlier
                              request with the same text and `cache_salt` has computed
    max_attention_window      the most tokens that a row sees, its own included: one number for all
                              layers, or a list by layer (a shorter list is repeated). Pages behind
                              the window are given back (docs/attention_windows.md). None: the
                              model's own windows
    sink_token_length         number of first tokens of a text that rows see in addition to their
                              window
    dtype                     "auto" (the model's), "fp8" (e4m3 with the checkpoint's scales, else
                              1), "int8" (on the CPU; a scale per token and K/V head), or the name
                              of the model's own type (docs/kv_cache.md)
    host_cache_size           bytes of host memory for the K/V of preempted requests. It is copied
                              out and back if that is faster than computing it again
                              (docs/scheduling.md). Only with policy="max_utilization". 0: none.
                              Another spelling: vLLM's swap_space, in GiB
    host_link_gb_per_s        speed of these copies in 10^9 bytes per second; None: measured when
                              the engine is made
    """

    spellings: ClassVar[Spellings] = {"swap_space": ("host_cache_size", _swap_space)}

    tokens_per_block: int = 32
    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = False
    max_attention_window: int | tuple[int, ...] | None = None
    sink_token_length: int = 0
    dtype: str = "auto"
    host_cache_size: int = 0
    host_link_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        where = "KvCacheConfig."
        page = check_int(where + "tokens_per_block", self.tokens_per_block, ConfigError,
                         low=1, high=128)  # fmt: skip
        if page & (page - 1):
            raise ConfigError(
                f"{where}tokens_per_block = {page}: must be a power of two in 1..128; "
                f"use {1 << (page.bit_length() - 1)} or {min(128, 1 << page.bit_length())}"
            )
        max_tokens = self.max_tokens
        if max_tokens is not None:
            max_tokens = check_int(where + "max_tokens", max_tokens, ConfigError, low=1)
            if max_tokens < page:
                raise ConfigError(
                    f"{where}max_tokens = {max_tokens} is less than one page "
                    f"(tokens_per_block = {page}); raise max_tokens or lower tokens_per_block"
                )
        self._set(
            tokens_per_block=page,
            max_tokens=max_tokens,
            free_gpu_memory_fraction=check_float(
                where + "free_gpu_memory_fraction", self.free_gpu_memory_fraction, ConfigError,
                above=0.0, high=1.0,
            ),
            dtype=normalize_kv_dtype(where + "dtype", self.dtype),
        )  # fmt: skip
        check_bool(where + "enable_block_reuse", self.enable_block_reuse, ConfigError)
        self._set(
            max_attention_window=check_window(
                where + "max_attention_window", self.max_attention_window
            ),
            sink_token_length=check_sinks(where + "sink_token_length", self.sink_token_length),
            host_cache_size=check_int(
                where + "host_cache_size", self.host_cache_size, ConfigError, low=0, high=2**62
            ),
        )
        speed = self.host_link_gb_per_s
        if speed is not None:
            speed = check_float(where + "host_link_gb_per_s", speed, ConfigError, above=0.0,
                                remedy="or None to measure it")  # fmt: skip
            self._set(host_link_gb_per_s=speed)

    @property
    def attention_windows(self) -> tuple[int, ...]:
        """max_attention_window as a pattern over the layers; empty: the model's own."""
        window = self.max_attention_window
        if window is None:
            return ()
        return (window,) if isinstance(window, int) else window


def pages_for(tokens: int, page_size: int) -> int:
    """Pages of the K/V cache that hold so many tokens."""
    return -(-tokens // page_size)


POLICIES = ("guaranteed_no_evict", "max_utilization")


def _depth_of_run_ahead(name: str, value: Any) -> Any:
    return "auto" if value is None else value


def _depth_of_async_scheduling(name: str, value: Any) -> int:
    return int(check_bool(f"SchedulerConfig.{name}", value, ConfigError))


def _depth_of_disabled_overlap(name: str, value: Any) -> int | str:
    return 0 if check_bool(f"SchedulerConfig.{name}", value, ConfigError) else "auto"


@dataclass(frozen=True)
class SchedulerConfig(_Config):
    """Which requests run together.

    max_batch_size          the most requests that decode at once, 1..1024
    max_seq_len             the most prompt + output tokens of one request; None: the model's limit,
                            lowered to what the page pool holds
    max_input_len           the most prompt tokens of one request; None: as many as max_seq_len has
                            room for
    max_num_tokens          the most rows (step tokens) of one forward pass; None: docs/usage.md,
                            "Memory"
    max_queued_requests     the most unfinished requests, waiting ones included, 1..2^20; one more
                            raises QueueFullError
    policy                  "guaranteed_no_evict": a request starts only when it can finish.
                            "max_utilization": it starts when its prompt fits. When K/V pages run
                            out, the newest request gives its pages back; it later computes its K/V
                            again, or has it copied back (KvCacheConfig.host_cache_size;
                            docs/scheduling.md). Texts are the same under both
    enable_chunked_prefill  split prompts over several steps
    max_prefill_slowdown    while requests decode, prompt rows may make a step at most this many
                            times as long as without them, >= 1 (docs/scheduling.md); prompts are
                            split. None: no limit
    overlap_depth           how many steps are enqueued while one is read, 0..2 (docs/overlap.md).
                            "auto": 1 on a CUDA device in the native decoder; else none, each step
                            is read before the next is planned. Other spellings: run_ahead (None is
                            "auto"), vLLM's async_scheduling (True is 1, False is 0), TensorRT-LLM's
                            disable_overlap_scheduler (True is 0)
    enforce_eager           False: on a CUDA device the native decoder's steps without prompts are
                            recorded as CUDA graphs, whose passes wait for no launches. True: the
                            host launches every kernel. "auto": False with one device, True with
                            several
    """

    spellings: ClassVar[Spellings] = {
        "run_ahead": ("overlap_depth", _depth_of_run_ahead),
        "async_scheduling": ("overlap_depth", _depth_of_async_scheduling),
        "disable_overlap_scheduler": ("overlap_depth", _depth_of_disabled_overlap),
    }

    max_batch_size: int = 32
    max_seq_len: int | None = None
    max_input_len: int | None = None
    max_num_tokens: int | None = None
    max_queued_requests: int = 65536
    policy: str = "guaranteed_no_evict"
    enable_chunked_prefill: bool = True
    max_prefill_slowdown: float | None = 4.0
    overlap_depth: int | Literal["auto"] = "auto"
    enforce_eager: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        where = "SchedulerConfig."
        self._set(
            max_batch_size=check_int(
                where + "max_batch_size", self.max_batch_size, ConfigError, low=1, high=1024
            ),
            max_queued_requests=check_int(
                where + "max_queued_requests",
                self.max_queued_requests,
                ConfigError,
                low=1,
                high=2**20,
            ),
            policy=check_choice(where + "policy", self.policy, POLICIES, ConfigError),
        )
        # A sequence needs a prompt token and an output token; a step needs one row.
        for name, low in (("max_seq_len", 2), ("max_input_len", 1), ("max_num_tokens", 1)):
            value = getattr(self, name)
            if value is not None:
                self._set(**{name: check_int(where + name, value, ConfigError, low=low,
                                             high=2**31 - 1)})  # fmt: skip
        if self.max_prefill_slowdown is not None:
            slowdown = check_float(where + "max_prefill_slowdown", self.max_prefill_slowdown,
                                   ConfigError, low=1.0, remedy="or None for no limit")  # fmt: skip
            self._set(max_prefill_slowdown=slowdown)
        check_bool(where + "enable_chunked_prefill", self.enable_chunked_prefill, ConfigError)
        if self.enforce_eager != "auto":
            check_bool(where + "enforce_eager", self.enforce_eager, ConfigError)
        if self.overlap_depth != "auto":
            depth = check_int(where + "overlap_depth", self.overlap_depth, ConfigError, low=0,
                              high=MAX_OVERLAP_DEPTH, remedy="or 'auto'")  # fmt: skip
            self._set(overlap_depth=depth)

    @property
    def resolved_depth(self) -> int:
        """Steps that are enqueued while one is read; "auto" is none (see with_depth)."""
        return 0 if self.overlap_depth == "auto" else self.overlap_depth

    def with_depth(self, depth: int) -> SchedulerConfig:
        """The same with `depth` in the place of "auto"."""
        if self.overlap_depth != "auto":
            return self
        return dataclasses.replace(self, overlap_depth=depth)
