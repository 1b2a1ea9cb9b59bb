"""Calls on several streams: what nothing orders must not meet in memory, scratch above all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accept_cases import laws_on
from cuda_calls import CHECKED, emulated_device, geometry, poisoned_workspace
from cuda_instances import families, instance_problem, is_fast
from kernel_calls import int32

from emulators import EMULATED, EMULATOR, synchronize, use_stream, wait_for
from reference.sampling_reference import Law
from specdec_ext import ops
from specdec_ext.ops import _where

pytestmark = [EMULATED, EMULATOR]
BESIDE = "unordered with a launch on another stream"
NAME = CHECKED.backend


@dataclasses.dataclass
class Call:
    """An operation that needs scratch: run(workspace, out), and a tensor that it writes."""

    run: Callable[[Any, torch.Tensor], object]
    out: torch.Tensor
    scratch_bytes: int


def argmax() -> Call:
    scores = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(1))
    return Call(
        lambda workspace, out: ops.argmax(scores, out, backend=NAME, workspace=workspace),
        int32([0, 0]),
        1 << 16,
    )


def linear() -> Call:
    """On 8.0, where the depth is cut and its parts are folded."""
    gen = torch.Generator().manual_seed(2)
    x, weight = torch.randn(3, 4160, generator=gen).half(), torch.randn(24, 4160).half()
    return Call(
        lambda workspace, out: ops.linear(x, weight, out=out, backend=NAME, workspace=workspace),
        torch.zeros(3, 24).half(),
        1 << 16,
    )


def sample() -> Call:
    rows = torch.randn(2, 3000, generator=torch.Generator().manual_seed(3))
    laws = laws_on(CHECKED, [Law(1.0), Law(0.7, top_k=5)], [7, 8])
    return Call(
        lambda workspace, out: ops.sample_rows(
            rows, int32([0, 1, 2]), int32([4, 5]), laws, out=out, backend=NAME, workspace=workspace
        ),
        int32([0, 0]),
        1 << 16,
    )


def attention(row: Any) -> Call:
    problem = instance_problem(row, 5, kv_len=[150, 40], rows=[5, 3], page_size=16)
    workspace = poisoned_workspace(CHECKED, problem, row.name)
    assert workspace is not None
    where = geometry(CHECKED, problem)

    def run(workspace: Any, out: torch.Tensor) -> object:
        return ops.spec_attention(
            problem.q, problem.k_pages, problem.v_pages, **where, out=out, scale=problem.scale,
            instance=row.name, backend=NAME, workspace=workspace,
        )  # fmt: skip

    return Call(run, torch.zeros_like(problem.q), workspace.numel())


CALLS: dict[str, Callable[[], Call]] = {"argmax": argmax, "linear": linear, "sample": sample}
CALLS |= {row.family: partial(attention, row) for row in families() if is_fast(row)}
OLD_DEVICE = ("ampere", "linear")


@pytest.fixture(params=sorted(CALLS))
def call(request: pytest.FixtureRequest) -> Any:
    with emulated_device(4, major=8 if request.param in OLD_DEVICE else 9):
        yield CALLS[request.param]()


@pytest.fixture(autouse=True)
def on_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes a stream the current one of operations on the CPU's tensors."""
    synchronize(NAME)
    yield partial(use_stream, monkeypatch)
    synchronize(NAME)


def scratch(call: Call) -> torch.Tensor:
    return torch.full((call.scratch_bytes + 256,), 0xFF, dtype=torch.uint8)


def test_all_kernels_of_a_call_run_on_its_stream(call: Call, on_stream: Any) -> None:
    """Every kernel of one on another stream would meet those of this one in the scratch."""
    on_stream(7)
    shared = scratch(call)
    call.run(shared, call.out)
    call.run(shared, call.out)
    assert synchronize(NAME) == {7}


def test_streams_that_share_scratch_are_refused(call: Call, on_stream: Any) -> None:
    shared, outs = scratch(call), [torch.zeros_like(call.out) for _ in range(2)]
    on_stream(7)
    call.run(shared, outs[0])
    on_stream(8)
    with pytest.raises(RuntimeError, match=BESIDE):
        call.run(shared, outs[1])


def test_streams_that_share_nothing_they_write_are_not(call: Call, on_stream: Any) -> None:
    outs = [torch.zeros_like(call.out) for _ in range(2)]
    scratches = [scratch(call) for _ in range(2)]  # both live: memory given back would be shared
    for stream, out, own in zip((7, 8), outs, scratches, strict=True):
        on_stream(stream)
        call.run(own, out)
    assert torch.equal(*outs)


def test_an_event_orders_them(call: Call, on_stream: Any) -> None:
    shared = scratch(call)
    on_stream(7)
    call.run(shared, call.out)
    on_stream(8)
    wait_for(NAME, 8, 7)
    call.run(shared, call.out)
    on_stream(7)
    with pytest.raises(RuntimeError, match=BESIDE):
        call.run(shared, call.out)


def test_scratch_that_the_module_keeps_belongs_to_one_stream(call: Call, on_stream: Any) -> None:
    """workspace=None: grown and used again on either stream."""
    outs = [torch.zeros_like(call.out) for _ in range(2)]
    for stream, out in zip((7, 8), outs, strict=True):
        on_stream(stream)
        call.run(None, out)
        call.run(None, out)
    assert torch.equal(*outs)
    assert {key[2] for key in _where._workspaces if key[0] == NAME} >= {7, 8}


def test_a_result_is_read_behind_its_stream(on_stream: Any) -> None:
    """As drafts that one stream picks and another one's model reads, without an event between."""
    rows = torch.from_numpy(np.eye(3, 50, dtype=np.float32))
    best, normed = int32([0, 0, 0]), torch.zeros(3, 50)
    on_stream(7)
    ops.rms_norm(rows, torch.ones(50), out=normed, backend=NAME)
    on_stream(8)
    with pytest.raises(RuntimeError, match=BESIDE):
        ops.argmax(normed, best, backend=NAME)
    wait_for(NAME, 8, 7)
    ops.argmax(normed, best, backend=NAME)
    assert best.tolist() == [0, 1, 2]
