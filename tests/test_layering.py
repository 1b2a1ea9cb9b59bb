"""The arrows of docs/architecture.md between Python modules, read from their imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "specdec_ext"

# Layer -> (its modules: the first name below the package, the layers it may import besides itself).
PYTHON: dict[str, tuple[set[str], set[str]]] = {
    "errors": ({"errors", "extras", "log", "_version"}, set()),
    "core": ({"_core"}, set()),
    "config": ({"config"}, {"errors"}),
    "request": ({"request"}, {"errors", "config"}),
    "gguf": ({"gguf"}, {"errors", "config", "core"}),
    "text": ({"text"}, {"errors", "config", "request", "gguf"}),
    "info": ({"installation"}, {"errors", "config", "core"}),
    "ops": ({"ops"}, {"errors", "core"}),
    "parallel": ({"parallel"}, {"errors", "config", "core"}),
    "models": ({"models"}, {"errors", "config", "text", "gguf", "core", "ops", "parallel"}),
    "drafters": ({"drafters"}, {"errors", "config", "text", "core", "ops", "models"}),
    "engine": (
        {"engine"},
        {
            "errors",
            "config",
            "request",
            "text",
            "info",
            "core",
            "ops",
            "parallel",
            "models",
            "drafters",
        },
    ),
    "llm": ({"llm"}, {"errors", "config", "request", "text", "models", "engine"}),
    "orchestrate": ({"orchestrate"}, {"errors", "config", "request", "text", "engine", "llm"}),
    "bench": (
        {"bench"},
        {"errors", "config", "request", "text", "info", "drafters", "engine", "llm"},
    ),
    "workflow": (
        {"workflow"},
        {
            "errors",
            "config",
            "request",
            "text",
            "core",
            "models",
            "drafters",
            "engine",
            "llm",
        },
    ),
    "training": (
        {"training"},
        {"errors", "config", "request", "text", "core", "models", "drafters", "engine", "llm"},
    ),
    "report": ({"report"}, {"errors"}),
    "serve": (
        {"serve"},
        {
            "errors",
            "config",
            "request",
            "text",
            "info",
            "models",
            "drafters",
            "engine",
            "llm",
            "orchestrate",
            "bench",
            "training",
            "workflow",
        },
    ),
    "entry": (
        {"cli", "demo", "__main__"},
        {
            "errors",
            "config",
            "request",
            "text",
            "info",
            "models",
            "drafters",
            "engine",
            "llm",
            "orchestrate",
            "bench",
            "training",
            "serve",
            "workflow",
            "report",
        },
    ),
}
LAYER_OF = {module: layer for layer, (modules, _) in PYTHON.items() for module in modules}
# What can be used before torch is there: a configuration is checked without it.
LIGHT = {"errors", "config", "request"}


# What alone may import torch at its top: the native CPU path starts without it. No file imports
# transformers there. (A folder, or the beginning of a file's name.)
TORCH_AT_TOP = (
    "training/",
    "engine/overlap/",
    "models/device_", "models/transformers_adapter", "models/attention_hook", "models/canary",
    "parallel/gloo_link", "parallel/device_links", "parallel/nccl_link", "parallel/tensor_link",
    "models/adapter_taps", "models/host_rows", "models/output_head", "models/packed_modules",
    "drafters/draft_target/device_", "drafters/eagle3/device_", "drafters/medusa/device_",
    "drafters/redrafter/device_",
    "drafters/redrafter/layers",
    # Modules of heads and of the recurrent drafter: for trainers, converters and devices.
    "drafters/medusa/convert", "drafters/medusa/heads",
    "drafters/redrafter/model", "drafters/eagle3/model",
)  # fmt: skip


def heavy_imports(path: str, text: str) -> list[str]:
    """Imports of torch and transformers at the top of a file that may not have them."""
    faults = []
    for node in ast.parse(text).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in (name.split(".")[0] for name in names):
            if name == "transformers" or (name == "torch" and not path.startswith(TORCH_AT_TOP)):
                faults.append(f"{path} imports {name} at its top; import it where it is needed")
    return faults


def test_only_what_needs_torch_imports_it() -> None:
    package = ROOT / "python" / PACKAGE
    files = {file.relative_to(package).as_posix(): file for file in package.rglob("*.py")}
    assert [
        fault for path, file in files.items() for fault in heavy_imports(path, file.read_text())
    ] == []
    for allowed in TORCH_AT_TOP:  # none is stale
        assert any(path.startswith(allowed) for path in files), allowed


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("models/native.py", "import torch", 1),
        ("models/native.py", "from torch.nn import functional", 1),
        ("models/native.py", "def f():\n    import torch", 0),
        ("models/native.py", "if TYPE_CHECKING:\n    import torch", 0),
        ("models/device_model.py", "import torch", 0),
        ("training/run.py", "import torch, transformers", 1),
        ("text/tokenizer.py", "from transformers import AutoTokenizer", 1),
    ],
)
def test_a_heavy_import_is_found(path: str, text: str, count: int) -> None:
    assert len(heavy_imports(path, text)) == count


def python_imports(path: str, text: str) -> Iterator[str]:
    """Dotted names that a file imports at any depth; relative ones made absolute.

    path  inside the package, for example "models/base.py"
    """
    package = [PACKAGE, *path.split("/")[:-1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == PACKAGE:
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def python_faults(path: str, text: str) -> list[str]:
    """What is wrong with one module, by its path inside the package."""
    module = path.split("/")[0].removesuffix(".py")
    layer = "entry" if module == "__init__" else LAYER_OF.get(module)
    if layer is None:
        return [f"{path} is in no layer; add it to PYTHON above and to docs/architecture.md"]
    faults = []
    for name in python_imports(path, text):
        parts = name.split(".")
        if parts[0] != PACKAGE:
            if layer in LIGHT and parts[0] not in sys.stdlib_module_names | {"yaml"}:
                faults.append(f"{path} imports {name}; {layer} works on the standard library")
            continue
        target = parts[1] if len(parts) > 1 else ""
        if module == "__init__":
            if LAYER_OF.get(target) == "entry":
                faults.append(f"{path} imports the entry point {target}")
        elif target not in LAYER_OF:
            faults.append(f"{path} imports {name}, which is in no layer")
        elif LAYER_OF[target] not in PYTHON[layer][1] | {layer}:
            faults.append(f"{path}: {layer} may not import {target} ({LAYER_OF[target]})")
    return faults


def test_python_layers() -> None:
    package = ROOT / "python" / PACKAGE
    files = sorted(package.rglob("*.py"))
    assert len(files) > 10
    assert {file.parent.relative_to(package).parts[:1] for file in files} - {()} == {
        (module,) for module in LAYER_OF if (package / module).is_dir()
    }
    faults = [
        fault
        for file in files
        for fault in python_faults(file.relative_to(package).as_posix(), file.read_text())
    ]
    assert faults == []


def module_graph(package: Path) -> dict[str, set[str]]:
    """File -> the package's files that it imports, at any depth of its text, types included."""
    files = {file.relative_to(package).as_posix(): file for file in package.rglob("*.py")}
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        folder = [PACKAGE, *name.split("/")[:-1]]
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = folder[: len(folder) - node.level + 1] if node.level else []
            parts = [*base, *(node.module.split(".") if node.module else [])]
            if parts[:1] != [PACKAGE]:
                continue
            for alias in node.names:
                inside = "/".join(parts[1:])
                for target in (
                    f"{inside}/{alias.name}.py".lstrip("/"),
                    f"{inside}/{alias.name}/__init__.py".lstrip("/"),
                    f"{inside}.py",
                    f"{inside}/__init__.py".lstrip("/"),
                ):
                    if target in files:
                        graph[name].add(target)
                        break
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Files of which each imports the next and the last the first; empty: there are none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        path.append(name)
        for target in sorted(graph[name]):
            if found := visit(target):
                return found
        path.pop()
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name))), [])


def test_no_files_import_each_other() -> None:
    """A circle inside a layer is one, too; the package's own lazy names are not looked through."""
    graph = module_graph(ROOT / "python" / PACKAGE)
    assert sum(map(len, graph.values())) > 300
    graph["__init__.py"] = set()
    assert cycle(graph) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.py": "from .b import x", "b.py": "from . import a"}, ["a.py", "b.py"]),
        ({"a.py": "def f():\n    from .d.b import x", "d/b.py": "from ..a import y"},
         ["a.py", "d/b.py"]),
        ({"a.py": "from specdec_ext.d import b", "d/__init__.py": "from ..a import y",
          "d/b.py": ""}, []),
        ({"a.py": "from .d import x", "d/__init__.py": "from ..a import y"},
         ["a.py", "d/__init__.py"]),
        ({"a.py": "from .b import x", "b.py": "from .c import x", "c.py": "import a"}, []),
    ],
)  # fmt: skip
def test_a_circle_of_files_is_found(
    tmp_path: Path, files: dict[str, str], expected: list[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cycle(module_graph(tmp_path)) == expected


def test_the_python_layers_form_no_cycle() -> None:
    """The table itself is an order: a layer is allowed only what stands above it."""
    seen: set[str] = set()
    for layer, (_, allowed) in PYTHON.items():
        assert allowed <= seen, layer
        seen.add(layer)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("errors.py", "import specdec_ext.config"),
        ("config/engine.py", "from ..llm import LLM"),
        ("config/engine.py", "from specdec_ext.llm import LLM"),
        ("config/engine.py", "from .. import _core"),
        ("config/parse.py", "def f():\n    import torch"),
        ("request/sampling_params.py", "from numpy import ndarray"),
        ("request/resolve.py", "from ..engine.loop import EngineLoop"),
        ("text/outputs.py", "from ..engine.request_state import RequestState"),
        ("ops/kv.py", "from ..models import load_model"),
        ("models/native.py", "from ..llm import LLM"),
        ("models/native.py", "from .. import engine"),
        ("models/deeper/x.py", "def f():\n    from ...engine.loop import EngineLoop"),
        ("drafters/medusa/slots.py", "from ...engine.step_cost import StepCost"),
        ("engine/loop.py", "from ..llm import LLM"),
        ("llm.py", "from specdec_ext.cli import main"),
        ("llm.py", "from specdec_ext import demo"),
        ("serve/app.py", "from ..cli.common import make_llm"),
        ("llm.py", "from .serve.app import create_app"),
        ("__init__.py", "from .cli import main"),
        ("novelty.py", "import os"),
        ("llm.py", "from .novelty import x"),
    ],
)
def test_a_forbidden_import_is_found(path: str, text: str) -> None:
    assert len(python_faults(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("config/engine.py", "from ..errors import ConfigError\nimport json"),
        ("models/native.py", "from .base import StepModel\nfrom .. import _core\nimport torch"),
        ("cli/generate.py", "from ..llm import LLM\nfrom .common import make_llm"),
        ("__init__.py", "from .llm import LLM"),
    ],
)
def test_an_allowed_import_passes(path: str, text: str) -> None:
    assert python_faults(path, text) == []
