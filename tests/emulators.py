"""The emulated devices, for tests of any folder: the CUDA kernels on the CPU (`make emu`)."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specdec_ext import ops
from specdec_ext.ops import _where

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


def use_stream(patch: pytest.MonkeyPatch, stream: int) -> None:
    """Operations on the CPU's tensors are given this stream, as torch's current one on a device."""
    real = _where.stream_of
    for name, module in list(sys.modules.items()):
        if name.startswith("specdec_ext.ops.") and hasattr(module, "stream_of"):
            patch.setattr(
                module,
                "stream_of",
                lambda tensor: real(tensor) if _where.is_cuda(tensor) else stream,
            )


def wait_for(name: str, stream: int, other: int) -> None:
    """What `stream` is given from now on comes behind what `other` was given so far."""
    wait = ctypes.CDLL(str(BUILD / LIBRARIES[name])).specdec_wait_for
    wait(ctypes.c_size_t(stream), ctypes.c_size_t(other))


def synchronize(name: str) -> set[int]:
    """The host waits for all streams; those that it had not waited for. The fast one keeps none."""
    wait = ctypes.CDLL(str(BUILD / LIBRARIES[name])).specdec_synchronize
    wait.restype = ctypes.c_size_t
    streams = (ctypes.c_size_t * 64)()
    return set(streams[: wait(streams, ctypes.c_size_t(64))])


def unrecorded_kernels(name: str) -> list[str]:
    """Kernels that ran and are not in docs/kernels/registers.md: nobody knew their registers."""
    names = ctypes.CDLL(str(BUILD / LIBRARIES[name])).specdec_unrecorded
    names.restype = ctypes.c_char_p
    return str(names().decode()).splitlines()


@dataclasses.dataclass(frozen=True)
class Touched:
    """How often kernels touched an array from one place of the source."""

    writes: bool
    array: str  # as the operation calls it; "shared"
    times: int
    bytes: int
    lines: tuple[str, ...]  # "row_lists.cuh:210", and where that was called, outwards


@contextlib.contextmanager
def tally() -> Iterator[list[Touched]]:
    """Counts what the checked emulation's kernels touch; the list is filled at the end."""
    path = BUILD / LIBRARIES["cuda-emu"]
    library = ctypes.CDLL(str(path))
    library.specdec_end_tally.restype = ctypes.c_char_p
    found: list[Touched] = []
    library.specdec_begin_tally()
    try:
        yield found
    finally:
        rows = [line.split() for line in library.specdec_end_tally().decode().splitlines()]
    places = sorted({row[4] for row in rows if row[4].startswith("0x")})
    command = ["addr2line", "-a", "-i", "-s", "-e", str(path)]
    text = subprocess.run(
        command, input="\n".join(places), text=True, capture_output=True, check=True
    )
    lines: dict[str, tuple[str, ...]] = {}
    for line in text.stdout.splitlines():
        if line.startswith("0x"):
            at = hex(int(line, 16))
            lines[at] = ()
        else:
            lines[at] += (line.split()[0],)
    for what, array, times, size, place in rows:
        at_lines = lines.get(place, (Path(place).name,))
        found.append(Touched(what == "write", array, int(times), int(size), at_lines))


MISSING = load_emulators()
# `make emu-test` runs these; conftest.py skips them where the emulators are not built.
EMULATED = pytest.mark.emulated
# What the checked emulator alone notices, of kernels compiled from their source: not for their PTX.
EMULATOR = pytest.mark.emulator
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# As LLM(device=...) takes them: the emulation everywhere, a GPU where there is one.
devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda-emu-fast", id="emu-fast", marks=EMULATED),
        pytest.param("cuda", id="cuda", marks=needs_cuda),
    ],
)
