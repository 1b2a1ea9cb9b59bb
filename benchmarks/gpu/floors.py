"""What a kernel cannot be faster than: bytes that have to move, operations that have to be done.

The ceilings are those of an H200 as read off such a machine with torch (device copy, bf16 matrix
product of random data). A result file also holds the ceilings measured in its own run; the floor
uses these fixed ones, so that two files are held against the same limit.
"""

from __future__ import annotations

from dataclasses import dataclass

BANDWIDTH = 4.3e12  # bytes per second
FLOPS_16BIT = 790e12  # multiply and add counted, per second
FLOPS_FP8 = 2 * FLOPS_16BIT


@dataclass(frozen=True)
class Work:
    """What one call needs at least: every needed byte crosses device memory once."""

    needed_bytes: int
    flops: int
    peak_flops: float = FLOPS_16BIT

    @property
    def memory_us(self) -> float:
        return self.needed_bytes / BANDWIDTH * 1e6

    @property
    def compute_us(self) -> float:
        return self.flops / self.peak_flops * 1e6

    @property
    def floor_us(self) -> float:
        return max(self.memory_us, self.compute_us)

    @property
    def compute_bound(self) -> bool:
        return self.compute_us > self.memory_us


def attention(
    requests: int,
    rows: int,
    context: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_bytes: int = 2,
    fp8_math: bool = False,
) -> Work:
    """Attention of `rows` draft rows per request to `context` tokens and to one another.

    The products among the drafts are left out, as a prefix that short is nobody's limit; a call
    without a prefix is a causal prompt and all its products count.
    """
    cache = requests * (context + rows) * 2 * num_kv_heads * head_dim * kv_bytes
    queries = requests * rows * num_heads * head_dim * 2 * 2  # read q, write out, 16 bits
    seen = rows * context if context else rows * (rows + 1) // 2
    flops = 4 * num_heads * head_dim * seen * requests
    return Work(cache + queries, flops, FLOPS_FP8 if fp8_math else FLOPS_16BIT)


def moved(read: int, written: int) -> Work:
    """An operation that only moves bytes."""
    return Work(read + written, 0)
