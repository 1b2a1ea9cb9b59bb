"""Tensors of other libraries, and what a call keeps of its tensors: nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ops_arguments import H, K, R, call, good, int32, refused

from specdec_ext import _core


class Wrapped:
    """A tensor that has __dlpack__ and no exchange table; counts the exports that are alive."""

    def __init__(self, tensor: torch.Tensor, versioned: bool) -> None:
        self.tensor, self.versioned = tensor, versioned

    def __dlpack__(self, **options: Any) -> object:
        if options and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.tensor.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
def test_any_dlpack_producer_is_read(versioned: bool) -> None:
    torch.manual_seed(0)
    arguments = good()
    for name in ("q", "k_pages", "v_pages"):
        arguments[name] = torch.randn_like(arguments[name])
    expected = torch.zeros(R, H, K)
    call(**{**arguments, "out": expected})
    wrapped = {
        name: Wrapped(value, versioned) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    call(**wrapped)
    assert torch.equal(arguments["out"], expected)
    assert bool((expected != 0).any())


class OnDevice(Wrapped):
    """Says that it lies on a device, and keeps what it was asked for."""

    def __init__(self, tensor: torch.Tensor, versioned: bool, device: tuple[int, int]) -> None:
        super().__init__(tensor, versioned)
        self.device, self.asked = device, list[dict[str, Any]]()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> object:
        self.asked.append(options)
        if "max_version" in options and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.tensor.__dlpack__()


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(("kind", "stream"), [(2, -1), (13, -1), (1, None), (3, None)])
def test_a_producer_on_a_gpu_is_asked_not_to_synchronise(
    kind: int, stream: int | None, versioned: bool
) -> None:
    scores = OnDevice(torch.tensor([[0.0, 2.0, 1.0]]), versioned, (kind, 0))
    out = torch.zeros(1, dtype=torch.int32)
    _core.argmax(scores, out)
    assert out.tolist() == [1]
    assert len(scores.asked) == (1 if versioned else 2)
    for options in scores.asked:
        assert options.get("stream") == stream
        assert ("stream" in options) == (stream is not None)


def test_numpy_arrays_are_read_and_read_only_ones_not_written() -> None:
    scores = np.array([[0.0, 2.0, 1.0]], dtype=np.float32)
    out = np.zeros(1, dtype=np.int32)
    _core.argmax(scores, out)
    assert out.tolist() == [1]
    out.flags.writeable = False
    with pytest.raises((ValueError, TypeError), match=r"read-?only"):
        _core.argmax(scores, out)


def test_a_call_keeps_no_reference() -> None:
    import gc
    import sys

    arguments = good()
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    for _ in range(3):
        call(**arguments)
        refused(
            ValueError, "cu_rows[0] = 1", lambda: call(**{**arguments, "cu_rows": int32(1, 3, 5)})
        )
    gc.collect()
    assert [sys.getrefcount(tensor) for tensor in tensors] == before
