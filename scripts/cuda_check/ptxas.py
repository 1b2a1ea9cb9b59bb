"""Reads what `ptxas -v` says about each kernel, and names kernels as people do."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class KernelUse:
    """What one kernel takes on one architecture; sizes in bytes."""

    symbol: str
    arch: str
    registers: int
    stack: int
    spill: int
    static_smem: int


def parse(log: str) -> list[KernelUse]:
    """Returns the kernels of a compiler log. Device functions that are not kernels are passed over.

    Raises   ValueError if the report of a kernel is incomplete: the compiler's wording changed.
    """
    found: list[KernelUse] = []
    entry: tuple[str, str] | None = None
    frame: tuple[int, int] | None = None
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            if entry is not None:
                raise ValueError(f"ptxas reported no registers for {entry[0]} ({entry[1]})")
            entry, frame = (match[1], match[2]), None
        elif entry is None:
            continue
        elif frame is None and (match := _FRAME.search(line)):
            frame = int(match[1]), int(match[2]) + int(match[3])
        elif match := _USED.search(line):
            if frame is None:
                raise ValueError(f"ptxas reported no stack frame for {entry[0]} ({entry[1]})")
            shared = _SHARED.search(line)
            found.append(KernelUse(*entry, int(match[1]), *frame, int(shared[1]) if shared else 0))
            entry = None
    if entry is not None:
        raise ValueError(f"ptxas reported no registers for {entry[0]} ({entry[1]})")
    return found


def warnings(log: str) -> list[str]:
    """Returns the compiler's warnings: spills, serialised wgmma and ignored setmaxnreg are such."""
    lines = (line.strip() for line in log.splitlines())
    return [line for line in lines if re.search(r"\bwarning\b|Potential Performance Loss", line)]


def demangle(symbols: Iterable[str]) -> dict[str, str]:
    """Returns a readable name for every symbol: no namespaces of ours, casts or arguments."""
    names = sorted(set(symbols))
    if not names:
        return {}
    done = subprocess.run(
        ["c++filt"], input="\n".join(names) + "\n", capture_output=True, text=True, check=True
    )
    return {name: shorten(text) for name, text in zip(names, done.stdout.splitlines(), strict=True)}


def shorten(name: str) -> str:
    """Returns a demangled kernel name without return type, argument list, casts and namespaces."""
    name = re.sub(r"\((?:anonymous namespace|int|unsigned int|bool|long)\)(?:::)?", "", name)
    name = re.sub(r"_GLOBAL__N__\w+::", "", name)
    name = re.sub(r"\bspecdec::(?:\w+::)*", "", name)
    name = name.removeprefix("void ").replace("__nv_bfloat16", "bf16").replace("__half", "fp16")
    name = name.replace("__nv_fp8_e4m3", "e4m3")
    if name.endswith(")"):
        depth = 0
        for i in range(len(name) - 1, -1, -1):
            depth += {")": 1, "(": -1}.get(name[i], 0)
            if depth == 0:
                return name[:i].strip()
    return name.strip()
