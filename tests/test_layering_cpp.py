"""The arrows of docs/architecture.md between C++ and CUDA files, read from their #include lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Layer -> the layers it may include besides itself.
CPP: dict[str, set[str]] = {
    "base": set(),
    "tree": {"base"},
    "kv": {"base"},
    "algo": {"base", "tree"},
    "backend": {"base", "tree", "algo"},
    "engine": {"base", "tree", "kv", "algo", "backend"},
    "runtime": {"base", "backend"},
    # Thin public headers: contracts in words, and the headers that define them.
    "include": {"base", "tree", "kv", "algo", "backend", "engine", "runtime"},
    "bind": {"base", "tree", "kv", "algo", "backend", "engine"},
}
CUDA = {"base", "tree", "algo", "backend", "cuda"}
DLPACK = {"cpp/bind/dlpack_abi.h", "cpp/bind/dlpack_convert.h", "cpp/bind/dlpack_convert.cc"}
# Features are chosen by file, never by #if. What may be conditional, word for word: the marker of
# functions for host and device, and the pause instruction of the spin loop, which no portable
# header spells.
ALLOWED_IF: dict[str, set[str]] = {
    "cpp/base/types.h": {"#if defined(__CUDACC__)"},
    "cpp/base/cpu_relax.h": {"#if defined(__x86_64__) || defined(__i386__)"},
}


def includes(text: str) -> Iterator[str]:
    for match in re.finditer(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE):
        yield match.group(1)


def include_fault(path: str, name: str) -> str | None:
    """What is wrong with `path` including `name`."""
    parts = path.split("/")
    in_cpp = parts[0] == "cpp"
    layer = parts[1] if in_cpp else "cuda"
    allowed = (CPP[layer] | {layer}) if in_cpp else CUDA
    top = name.split("/")[0]
    if top in ("torch", "ATen", "c10"):
        return "torch is not linked"
    if top == "..":
        return "paths are relative to cpp/ or the repository"
    if (top == "pybind11" or name == "Python.h") and layer != "bind":
        return "Python is known to bind alone"
    if in_cpp and (top.startswith("cuda") or name.endswith(".cuh")):
        return "nothing in cpp/ includes CUDA"
    if "dlpack" in name and path not in DLPACK and name != "bind/dlpack_convert.h":
        return "DLPack is known to bind/dlpack_convert alone"
    if not in_cpp and (ROOT / "cuda" / name).is_file():
        return None  # cuda/kv/kv.h is "kv/kv.h" there, and nothing of cpp/kv
    if "/" in name and top in (*CPP, "cuda") and top not in allowed:
        return f"{layer} may not include {top}"
    return None


def cpp_faults(path: str, text: str) -> list[str]:
    """What is wrong with one C++ or CUDA file, by its repository path and text."""
    faults = []
    for name in includes(text):
        if fault := include_fault(path, name):
            faults.append(f"{path} includes {name}: {fault}")
    if path.startswith("cpp/"):
        for match in re.finditer(r"^\s*#\s*if\w*\b.*$", text, re.MULTILINE):
            line = match.group(0).strip()
            if line not in ALLOWED_IF.get(path, ()):
                faults.append(f"{path}: conditional compilation: {line}")
    return faults


def sources(*folders: str) -> list[Path]:
    return sorted(
        file
        for folder in folders
        for suffix in ("*.h", "*.cc", "*.cu", "*.cuh")
        for file in (ROOT / folder).rglob(suffix)
    )


def test_cpp_layers() -> None:
    files = sources("cpp", "cuda")
    assert len(files) > 30
    assert {file.relative_to(ROOT / "cpp").parts[0] for file in sources("cpp")} == set(CPP)
    faults = [
        fault
        for file in files
        for fault in cpp_faults(file.relative_to(ROOT).as_posix(), file.read_text())
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cpp/base/x.h", '#include "tree/draft_tree.h"'),
        ("cpp/tree/x.h", '#include "algo/accept.h"'),
        ("cpp/kv/x.h", '#include "tree/draft_tree.h"'),
        ("cpp/kv/x.h", '#include "../tree/draft_tree.h"'),
        ("cpp/algo/x.h", '#include "engine/request.h"'),
        ("cpp/algo/x.h", '#include "backend/ops.h"'),
        ("cpp/backend/x.h", '#include "kv/page_table.h"'),
        ("cpp/backend/cpu/deep/x.cc", '#  include "engine/step_plan.h"'),
        ("cpp/engine/x.cc", "#include <pybind11/pybind11.h>"),
        ("cpp/engine/x.cc", "#include <Python.h>"),
        ("cpp/engine/x.cc", '#include "bind/registers.h"'),
        ("cpp/backend/x.cc", "#include <cuda_runtime.h>"),
        ("cpp/backend/x.cc", "#include <cuda/std/atomic>"),
        ("cpp/backend/x.cc", '#include "cuda/common/warp_team.cuh"'),
        ("cpp/bind/x.cc", '#include "common/warp_team.cuh"'),
        ("cpp/bind/x.cc", "#include <torch/extension.h>"),
        ("cpp/bind/x.cc", "#include <ATen/core/Tensor.h>"),
        ("cpp/bind/bind_ops.cc", '#include "bind/dlpack_abi.h"'),
        ("cpp/bind/bind_ops.cc", "#include <dlpack/dlpack.h>"),
        ("cpp/engine/x.cc", "#ifdef SPECDEC_WITH_CUDA\n#endif"),
        ("cpp/engine/x.cc", "  # if 0\n#endif"),
        ("cpp/base/types.h", "#ifndef NDEBUG\n#endif"),
        ("cuda/x.cu", '#include "engine/executor.h"'),
        ("cuda/x.cu", '#include "kv/page_table.h"'),
        ("cuda/x.cu", "#include <c10/cuda/CUDAStream.h>"),
    ],
)
def test_a_forbidden_include_is_found(path: str, text: str) -> None:
    assert len(cpp_faults(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cpp/base/x.h", "#pragma once\n#include <vector>"),
        ("cpp/algo/x.h", '#include "team.h"\n#include "tree/draft_tree.h"'),
        ("cpp/bind/bind_ops.cc", '#include <pybind11/numpy.h>\n#include "bind/dlpack_convert.h"'),
        ("cpp/base/types.h", "#if defined(__CUDACC__)\n#else\n#endif"),
        ("cuda/x.cu", '#include "backend/ops.h"\n#include <cuda_fp16.h>\n#if __CUDA_ARCH__\n'),
    ],
)
def test_an_allowed_include_passes(path: str, text: str) -> None:
    assert cpp_faults(path, text) == []
