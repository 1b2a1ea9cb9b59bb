"""Settings of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_calls import emulated_device

from emulators import LIBRARIES, synchronize, unrecorded_kernels, use_stream
from specdec_ext import ops

STREAM = 5  # any number but that of the default stream


@pytest.fixture(autouse=True, scope="session")
def torch_on_one_thread() -> Iterator[None]:
    """References are many small products: handing them to threads costs far more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[9, 8])
def family(request: pytest.FixtureRequest) -> Iterator[None]:
    """The emulated device is of 9.0 (wgmma), then of 8.0 (mma.sync)."""
    with emulated_device(4, major=request.param):
        yield


@pytest.fixture(autouse=True)
def on_a_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Emulated operations are called on a stream that is not the default one, and every kernel of
    theirs has to be launched there. Their registers have to be known."""
    use_stream(monkeypatch, STREAM)
    loaded = [name for name in LIBRARIES if name in ops.backend_names()]
    for name in loaded:
        synchronize(name)
    yield
    for name in loaded:
        assert synchronize(name) <= {STREAM}, "a kernel was launched on another stream"
        assert unrecorded_kernels(name) == [], "scripts/cuda_check.sh --update records them"
