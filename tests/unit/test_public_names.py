"""The package's public names are what they say, in whatever order modules are imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from specdec_ext import ConfigError, KvCacheConfig, _core, _core_testing
from specdec_ext.config import acceptance, limits
from specdec_ext.request import resolve

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "specdec_ext"

SCRIPT = """
import importlib, pkgutil, types, specdec_ext
for module in pkgutil.walk_packages(specdec_ext.__path__, "specdec_ext."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # what runs in other servers imports these at its top
        assert error.name in ("ray", "triton_python_backend_utils"), error
        assert module.name.startswith("specdec_ext.serve."), module.name
# Importing a submodule binds its name in the package: it must not hide a public function.
hidden = [n for n in specdec_ext.__all__ if isinstance(getattr(specdec_ext, n), types.ModuleType)]
assert not hidden, hidden
"""


def test_no_module_hides_a_public_name() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def names_of_core(source: str) -> set[str]:
    """Names of _core that a file's code uses; what its comments and docstrings say is no use."""
    tree = ast.parse(source)
    names: set[str] = set()
    called = {"_core"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[-1] == "_core":
                names |= {alias.name for alias in node.names}
            called |= {alias.asname or "_core" for alias in node.names if alias.name == "_core"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in called:
            names.add(node.attr)
    return names


def unused_names(stub: str, sources: Iterable[str]) -> set[str]:
    """Functions, classes and constants of the stub that no source uses, but for types that a
    signature of a used name names: they have to be registered where that name is."""
    defined = {}
    for node in ast.parse(stub).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined[node.target.id] = node
    waiting = {name for source in sources for name in names_of_core(source)} & {*defined}
    used: set[str] = set()
    while waiting:
        name = waiting.pop()
        used.add(name)
        inner = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
        waiting |= (inner & {*defined}) - used
    return {*defined} - used - {"__all__", "__version__"}


def test_the_core_has_no_name_that_the_package_does_not_use() -> None:
    """What tests alone need is in _core_testing (tests/bind), which no wheel has."""
    stub = (PACKAGE / "_core.pyi").read_text()
    assert len(names_of_core(stub)) == 0 and "class Executor" in stub
    assert unused_names(stub, (path.read_text() for path in PACKAGE.rglob("*.py"))) == set()


@pytest.mark.parametrize(
    ("source", "unused"),
    [
        ("from . import _core\n_core.make()", {"LIMIT", "spare"}),
        ("from ._core import make, LIMIT", {"spare"}),
        ("from . import _core as core\ncore.spare(core.make())", {"LIMIT"}),
        ("import specdec_ext._core\nx = specdec_ext._core.LIMIT", {"Made", "make", "spare"}),
        ('"""Draw with _core.spare."""\nfrom ._core import LIMIT, make', {"spare"}),
    ],
)
def test_an_unused_name_is_found(source: str, unused: set[str]) -> None:
    stub = "LIMIT: int\nclass Made: ...\ndef make() -> Made: ...\ndef spare() -> None: ..."
    assert unused_names(stub, [source]) == unused


def test_limits_stated_before_the_core_is_loaded_are_the_cores() -> None:
    """config/ refuses what does not fit without the core; what it states is what the core has."""
    assert limits.MAX_STEP_TOKENS == _core.MAX_STEP_TOKENS
    assert limits.MAX_DRAFT_LEN == _core_testing.MAX_DRAFT_LEN
    assert limits.MAX_KNOWN_DRAFTS == _core_testing.KNOWN_DRAFTS
    assert limits.MAX_WEIGHED_DRAFTS == _core_testing.WEIGHED_DRAFTS
    assert list(acceptance.ACCEPTANCE_RULES.items()) == list(_core.acceptance_rules().items())
    assert acceptance.POSTERIOR_THRESHOLD == _core_testing.POSTERIOR_THRESHOLD
    assert acceptance.POSTERIOR_ALPHA == _core_testing.POSTERIOR_ALPHA
    assert resolve._MAX_STOP_IDS == _core_testing.MAX_STOP_IDS
    page = _core_testing.MAX_PAGE_SIZE
    assert KvCacheConfig(tokens_per_block=page).tokens_per_block == page
    with pytest.raises(ConfigError, match=f"{2 * page}"):
        KvCacheConfig(tokens_per_block=2 * page)


@pytest.mark.parametrize("first", ["specdec_ext", "torch"])
def test_threads_are_those_of_torch_whenever_it_is_imported(first: str) -> None:
    program = (
        f"import {first}, sys, specdec_ext; specdec_ext.set_num_threads(1);"
        f"assert ('torch' in sys.modules) == ({first!r} == 'torch');"
        "import torch; print(specdec_ext.get_num_threads(), torch.get_num_threads())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.split() == ["1", "1"], run.stderr
