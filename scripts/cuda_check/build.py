"""Compiles the CUDA sources, once per change of anything they read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from scripts.cuda_check import handover, loops, refused, sass
from scripts.cuda_check.loops import Loop

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "cuda-check"
FLAGS = ["-std=c++20", "--expt-relaxed-constexpr", "-Icpp", "-Icuda", "-Itests"]
# The targets of the package (CMakeLists.txt): machine code for 8.x and 9.0, PTX for the rest.
AMPERE = ["-gencode", "arch=compute_80,code=[sm_80,compute_80]"]
HOPPER = ["-gencode", "arch=compute_90a,code=sm_90a"]
# Kernels whose numbers have the bits of the host's: nothing is fused (cuda/CMakeLists.txt).
UNFUSED = "cuda/accept/"


@dataclass
class Object:
    """One compiled source: what the compiler said and which instructions came out."""

    source: str
    log: str
    seconds: float  # of processor time
    deps: dict[str, str]
    key: str
    opcodes: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    handovers: list[dict[str, Any]] = field(default_factory=list)  # handover.HandOver
    refused: list[str] = field(default_factory=list)  # refused.found_in, a line for each
    loop_counts: dict[str, list[Loop]] = field(default_factory=dict)  # of sm_90a, by symbol
    disassembled: bool = False
    fresh: bool = False  # compiled in this run


class CompileError(RuntimeError):
    """The compiler's output."""


def sources() -> list[str]:
    """Returns every CUDA source of the package and of the device tests, by repository path."""
    files = [*(ROOT / "cuda").rglob("*.cu"), *(ROOT / "tests" / "simt").glob("*.cu")]
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def targets(source: str) -> list[str]:
    """Returns the compiler's target options, as cuda/CMakeLists.txt sets them.

    Hopper's own instructions exist on sm_90a alone; there the Ampere family runs from its PTX.
    """
    if Path(source).name.startswith("ampere_"):
        return AMPERE
    text = (ROOT / source).read_text()
    uses_hopper = re.search(r'^#include "\S*hopper\S*"', text, re.MULTILINE)
    return HOPPER if uses_hopper else [*AMPERE, *HOPPER]


def nvcc_version() -> str:
    """Returns the release of nvcc, for example '13.0', or '' if there is no nvcc."""
    if shutil.which("nvcc") is None:
        return ""
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release ([\d.]+)", text)
    return match[1] if match else "unknown"


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def _dependencies(path: Path) -> Iterator[str]:
    """Files below the repository that a dependency file names."""
    text = path.read_text().replace("\\\n", " ")
    for name in text.partition(": ")[2].split():
        file = (ROOT / name).resolve()
        if file.is_relative_to(ROOT):
            yield file.relative_to(ROOT).as_posix()


def _load(path: Path, key: str) -> Object | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        found = Object(**record)
    except (OSError, ValueError, TypeError):
        return None
    current = all(_digest(ROOT / name) == digest for name, digest in found.deps.items())
    return found if found.key == key and current else None


def _execute(command: list[str]) -> tuple[int, float, str]:
    """Runs a command; returns its status, processor seconds and output."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        _, status, use = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace").replace(f"{ROOT}/", "")
    return process.returncode, use.ru_utime + use.ru_stime, text


def _read_code(result: Object, tools: sass.Tools, obj: Path) -> None:
    code = sass.dump(tools, obj, "sass")
    result.opcodes = sass.parse(code)
    kernels = handover.parse_code(code)
    if kernels:
        handover.add_launch(kernels, sass.dump(tools, obj, "elf"))
    result.handovers = [vars(kernel) for kernel in kernels]
    result.refused = [f"{name} ({arch}) holds {why}" for name, arch, why in refused.found_in(code)]
    result.loop_counts = {
        symbol: loops.loops_of(text)
        for (symbol, arch), text in loops.parse(code).items()
        if arch == "sm_90a"
    }
    result.disassembled = True


def compile_source(source: str, nvcc: str, tools: sass.Tools | None) -> Object:
    """Compiles one source unless nothing it reads has changed; disassembles if the tools exist.

    Raises   CompileError with the compiler's output.
    """
    stem = OUT / source.replace("/", "__")
    obj, record, deps = (Path(f"{stem}{suffix}") for suffix in (".o", ".json", ".d"))
    flags = [*FLAGS, "-fmad=false"] if source.startswith(UNFUSED) else FLAGS
    command = ["nvcc", *flags, *targets(source), "-Xptxas", "-v,-warn-spills", "-MMD"]
    command += ["-MF", str(deps), "-c", source, "-o", str(obj)]
    kept = [one.name for one in fields(Object)]
    readers = [_digest(path) for path in sorted(Path(__file__).parent.glob("*.py"))]
    key = hashlib.sha256(f"{nvcc}\n{command}\n{kept}\n{readers}".encode()).hexdigest()[:16]
    result = _load(record, key)
    if result is not None and (result.disassembled or tools is None):
        result.fresh = False
        return result
    if result is None or not obj.exists():
        status, seconds, log = _execute(command)
        if status != 0:
            raise CompileError(
                "\n    ".join([f"{source} does not compile:", *log.splitlines()[:20]])
            )
        digests = {name: _digest(ROOT / name) for name in {source, *_dependencies(deps)}}
        result = Object(source, log, seconds, digests, key, fresh=True)
    if tools is not None:
        _read_code(result, tools, obj)
        obj.unlink()  # several megabytes each; what is wanted of it is in the record
    record.write_text(json.dumps(vars(result)))
    return result
