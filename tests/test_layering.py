"""The architecture's arrows (docs/architecture.md), read from #include lines and Python imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Layer -> the layers it may include beside itself.
CPP: dict[str, set[str]] = {
    "base": set(),
    "tree": {"base"},
    "kv": {"base"},
    "algo": {"base", "tree"},
    "backend": {"base", "tree", "algo"},
    "engine": {"base", "tree", "kv", "algo", "backend"},
    "bind": {"base", "tree", "kv", "algo", "backend", "engine"},
}
CUDA = {"base", "tree", "algo", "backend", "cuda"}
# Preprocessor conditions: the marker of base/types.h, and the pause instruction of the spin loop,
# whose spelling is the compiler's affair. Features are chosen by file, never by #if.
ALLOWED_IF = {"cpp/base/types.h", "cpp/base/thread_pool.cc"}
DLPACK = {"cpp/bind/dlpack_abi.h", "cpp/bind/dlpack_convert.h", "cpp/bind/dlpack_convert.cc"}

# Python module (first part below specdec_ext) -> the modules it may import.
CONFIG = {"config", "config_parse", "sampling_params", "validate", "errors"}
PYTHON: dict[str, set[str]] = {
    "errors": set(),
    "_version": set(),
    "config": {"errors", "validate", "config_parse"},
    "config_parse": {"errors", "validate", "config"},
    "sampling_params": {"errors", "validate", "config", "config_parse"},
    "validate": {"errors"},
    "ops": {"_core", "errors"},
    "models": {"_core", "ops", "errors", "models", "_version", "log", "validate"},
}
ENTRY = {"cli", "demo"}  # nothing of ours imports these, except each other


def includes(text: str) -> Iterator[str]:
    for match in re.finditer(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE):
        yield match.group(1)


def cpp_faults(path: str, text: str) -> list[str]:
    """What is wrong with one C++ or CUDA file, by its repository path and text."""
    faults = []
    parts = path.split("/")
    layer = parts[1] if parts[0] == "cpp" else "cuda"
    allowed = (CPP[layer] | {layer}) if parts[0] == "cpp" else CUDA
    for name in includes(text):
        top = name.split("/")[0]
        if top in ("torch", "ATen", "c10"):
            faults.append(f"{path} includes torch: {name}")
        elif top == "pybind11" and layer != "bind":
            faults.append(f"{path} includes pybind11 outside bind")
        elif name.startswith("cuda") and parts[0] == "cpp":
            faults.append(f"{path} includes CUDA: {name}")
        elif "/" in name and top in (*CPP, "cuda") and top not in allowed:
            faults.append(f"{path}: {layer} may not include {top}")
        elif "dlpack_abi" in name and path not in DLPACK:
            faults.append(f"{path} knows DLPack; only bind/dlpack_convert may")
    if parts[0] == "cpp" and path not in ALLOWED_IF:
        for match in re.finditer(r"^\s*#\s*(if\w*)\b.*$", text, re.MULTILINE):
            faults.append(f"{path}: conditional compilation: {match.group(0).strip()}")
    return faults


def imports(text: str, package: str) -> Iterator[str]:
    """Modules below specdec_ext that a file imports at any level, by their first part."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
            if node.module == package:
                names = [f"{package}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith(package + "."):
                yield name.split(".")[1]


def python_faults(module: str, text: str) -> list[str]:
    faults = []
    for name in imports(text, "specdec_ext"):
        if name == module:
            continue
        if module in PYTHON and name not in PYTHON[module]:
            faults.append(f"{module} may not import {name}")
        if name in ENTRY and module not in ENTRY and module != "__main__":
            faults.append(f"{module} imports the entry point {name}")
    return faults


def sources(*folders: str) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        for suffix in ("*.h", "*.cc", "*.cu", "*.cuh"):
            found += sorted((ROOT / folder).rglob(suffix))
    return found


def test_cpp_layers() -> None:
    files = sources("cpp", "cuda")
    assert len(files) > 30
    faults = [
        fault
        for file in files
        for fault in cpp_faults(file.relative_to(ROOT).as_posix(), file.read_text())
    ]
    assert faults == []


def test_python_layers() -> None:
    package = ROOT / "python" / "specdec_ext"
    files = sorted(package.rglob("*.py"))
    assert len(files) > 10
    faults = []
    for file in files:
        module = file.relative_to(package).parts[0].removesuffix(".py")
        faults += python_faults(module, file.read_text())
    assert faults == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cpp/base/x.h", '#include "tree/draft_tree.h"'),
        ("cpp/kv/x.h", '#include "algo/accept.h"'),
        ("cpp/algo/x.h", '#include "engine/request.h"'),
        ("cpp/backend/x.h", '#include "kv/page_table.h"'),
        ("cpp/engine/x.cc", "#include <pybind11/pybind11.h>"),
        ("cpp/engine/x.cc", '#include "bind/registers.h"'),
        ("cpp/backend/x.cc", "#include <cuda_runtime.h>"),
        ("cpp/backend/x.cc", '#include "cuda/common/warp_team.cuh"'),
        ("cpp/bind/x.cc", "#include <torch/extension.h>"),
        ("cpp/bind/x.cc", '#include "bind/dlpack_abi.h"'),
        ("cpp/engine/x.cc", "#ifdef SPECDEC_WITH_CUDA\n#endif"),
        ("cuda/x.cu", '#include "engine/executor.h"'),
        ("cuda/x.cu", "#include <ATen/ATen.h>"),
    ],
)
def test_a_forbidden_include_is_found(path: str, text: str) -> None:
    assert cpp_faults(path, text)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("config", "from specdec_ext.llm import LLM"),
        ("errors", "import specdec_ext.config"),
        ("ops", "from specdec_ext.models import load_model"),
        ("models", "from specdec_ext import llm"),
        ("llm", "from specdec_ext.cli import main"),
    ],
)
def test_a_forbidden_import_is_found(module: str, text: str) -> None:
    assert python_faults(module, text)
