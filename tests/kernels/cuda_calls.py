"""Calls of the accelerator's operations on a device of the tests: emulated, or a CUDA GPU.

Everything that the device may not read is poisoned: the workspace and the outputs hold NaN, the
output's rows lie inside wider rows that have to stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_problems import to_device
from kernel_calls import bits, int32
from reference_attention import Problem

from emulators import EMULATED, needs_cuda
from specdec_ext import ops

NAN, BAD_PAGE, BAD_TREE, BAD_LENGTH = 1, 2, 4, 8  # StatusFlag of backend/ops.h
MASK_WORDS = 4


@dataclasses.dataclass(frozen=True)
class Target:
    """Where an operation runs: the backend's name and the device of its tensors."""

    backend: str
    device: str

    def __str__(self) -> str:
        return self.backend

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


CPU = Target("cpu", "cpu")
CHECKED = Target("cuda-emu", "cpu")  # races, bounds and initialisation checked
FAST = Target("cuda-emu-fast", "cpu")
CUDA = Target("cuda", "cuda")


ON_EMU = pytest.param(CHECKED, id="emu", marks=EMULATED)
ON_EMU_FAST = pytest.param(FAST, id="emu-fast", marks=EMULATED)
ON_CUDA = pytest.param(CUDA, id="cuda", marks=needs_cuda)
every_backend = pytest.mark.parametrize("target", [pytest.param(CPU, id="cpu"), ON_EMU, ON_CUDA])
checked = pytest.mark.parametrize("target", [ON_EMU, ON_CUDA])
fast = pytest.mark.parametrize("target", [ON_EMU_FAST, ON_CUDA])


@contextlib.contextmanager
def environment(name: str, value: object) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = str(value)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def emulated_device(num_sms: int, *, major: int = 9) -> contextlib.AbstractContextManager[None]:
    """While it lasts, the emulated device is this one."""
    shared_bytes = {8: 163, 9: 227}[major] << 10
    return environment("SPECDEC_EMU_LIMITS", f"{major}.0,{num_sms},{shared_bytes}")


def device_mask(problem: Problem) -> torch.Tensor | None:
    """[R, MASK_WORDS] ancestor bits, all ones in the rows of requests that are no tree."""
    if problem.parents is None:
        return None
    mask = torch.full((sum(problem.rows), MASK_WORDS), -1, dtype=torch.int32)
    for b, first in enumerate(problem.cu_rows[:-1]):
        if problem.rows[b] and is_tree(problem, b):
            words = ops.mask_from_parents(problem.parents[b]).view(torch.int32)
            mask[first : first + problem.rows[b]] = 0
            mask[first : first + problem.rows[b], : words.shape[1]] = words
    return mask.view(torch.uint32)


def is_tree(problem: Problem, b: int) -> bool:
    """Chains are given both ways, as a tree with a mask and as a chain without."""
    if problem.parents is None:
        return False
    chain = problem.parents[b] == list(range(-1, problem.rows[b] - 1))
    return not (chain and b % 2 == 1)


def geometry(target: Target, problem: Problem) -> dict[str, Any]:
    """The step as keyword arguments of the attention and the K/V operations."""
    tokens = [c + n for c, n in zip(problem.kv_len, problem.rows, strict=True) if n]
    return {
        "page_table": target.put(problem.page_table),
        "kv_len": target.put(int32(problem.kv_len)),
        "cu_rows": target.put(int32(problem.cu_rows)),
        "max_rows": max(problem.rows),
        "max_kv_len": max(tokens, default=0),
    }


def poisoned_workspace(
    target: Target, problem: Problem, instance: str | None
) -> torch.Tensor | None:
    """Exactly what the call needs, all NaN."""
    heads, kv_heads = problem.q.shape[1], problem.k_pages.shape[1]
    bounds = geometry(target, problem)
    shape = ops.AttentionProblem(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=problem.q.shape[2],
        dtype=problem.q.dtype,
        kv_dtype=problem.k_pages.dtype,
        page_size=problem.k_pages.shape[2],
        num_requests=len(problem.rows),
        num_rows=problem.q.shape[0],
        max_rows=bounds["max_rows"],
        max_kv_len=bounds["max_kv_len"],
    )
    plan = ops.plan_workspace(shape, ops.device_limits(target.backend), instance)
    # Room to begin at a multiple of 256 bytes wherever the allocator puts it.
    return target.put(torch.full((plan["total_bytes"] + 256,), 0xFF, dtype=torch.uint8))


def attend_with_status(
    target: Target,
    problem: Problem,
    *,
    exact: bool = True,
    max_depth: int = 127,
    instance: str | None = None,
) -> tuple[torch.Tensor, list[int]]:
    """The result on the CPU, and each request's status bits."""
    rows, heads, head_dim = problem.q.shape
    wide = torch.full((rows, heads * head_dim + 8), torch.nan, dtype=problem.q.dtype)
    wide = target.put(wide)
    out = wide[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    status = target.put(torch.zeros(len(problem.rows), dtype=torch.int32))
    mask = device_mask(problem)
    on_device = to_device(problem, target.device)
    trees = [is_tree(problem, b) for b in range(len(problem.rows))]
    result = ops.spec_attention(
        on_device.q,
        on_device.k_pages,
        on_device.v_pages,
        **geometry(target, problem),
        mask=None if mask is None else target.put(mask),
        is_tree=target.put(torch.tensor(trees, dtype=torch.uint8)),
        out=out,
        scale=problem.scale,
        sliding_window=problem.sliding_window,
        sink_tokens=problem.sink_tokens,
        first_key=problem.first_key,
        softcap=problem.softcap,
        sinks=on_device.sinks,
        k_scale=on_device.k_scale,
        v_scale=on_device.v_scale,
        exact=exact,
        max_depth=max_depth,
        instance=instance,
        backend=target.backend,
        workspace=poisoned_workspace(target, problem, instance),
        status=status,
    )
    assert result is out
    assert bool(wide[:, heads * head_dim :].isnan().all()), "wrote past the rows of out"
    return out.cpu().clone(), status.tolist()


def attend(target: Target, problem: Problem, **options: Any) -> torch.Tensor:
    """The result on the CPU; no request may be flagged."""
    out, status = attend_with_status(target, problem, **options)
    assert not any(status), f"status {status}"
    return out


def differing(got: torch.Tensor, expected: torch.Tensor) -> int:
    return int((bits(got) != bits(expected)).sum())
