"""The emulated devices, for tests of any folder: the CUDA kernels on the CPU (`make emu`)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from specdec_ext import ops

# The mutation tests put another folder here (tests/simt/mutate.py).
BUILD = Path(os.environ.get("SPECDEC_EMU_FOLDER", Path(__file__).parents[1] / "build" / "emu"))
LIBRARIES = {"cuda-emu": "libspecdec_emu.so", "cuda-emu-fast": "libspecdec_emu_fast.so"}


def load_emulators() -> str:
    """Registers both emulated backends; why they are missing, or nothing."""
    for name, file in LIBRARIES.items():
        path = BUILD / file
        if not path.exists():
            return f"{file} is not built: make emu"
        if name not in ops.backend_names():
            ops.load_backend(name, str(path))
    return ""


def seed_schedule(name: str, seed: int) -> None:
    """Fixes the order in which an emulated backend runs the threads of later launches."""
    ctypes.CDLL(str(BUILD / LIBRARIES[name])).specdec_seed(ctypes.c_uint64(seed))


EMULATED = pytest.mark.skipif(
    bool(missing := load_emulators()) and os.environ.get("SPECDEC_REQUIRE_EMU") != "1",
    reason=missing or "built",
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# As LLM(device=...) takes them: the emulation everywhere, a GPU where there is one.
devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda-emu-fast", id="emu-fast", marks=EMULATED),
        pytest.param("cuda", id="cuda", marks=needs_cuda),
    ],
)
