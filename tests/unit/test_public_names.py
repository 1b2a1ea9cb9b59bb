"""The package's public names are what they say, in whatever order modules are imported."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_ext import ConfigError, KvCacheConfig, _core
from specdec_ext.config import acceptance, engine
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


def test_the_core_has_no_name_that_the_package_does_not_use() -> None:
    """What tests alone need is in _core_testing (tests/bind), which no wheel has."""
    stub = (PACKAGE / "_core.pyi").read_text()
    defined = {
        node.name
        for node in ast.parse(stub).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    imported = re.findall(r"from [\w.]*_core import \(?([\w, \n]+)", source)
    used = set(re.findall(r"_core\.(\w+)", source)) | set(re.findall(r"\w+", " ".join(imported)))
    # Types of what functions and members of the core return.
    used |= set(re.findall(r"\w+", " ".join(re.findall(r"-> ([^:]+):", stub))))
    assert len(defined) > 40 and "Executor" in used
    assert defined - used == set()


def test_limits_stated_before_the_core_is_loaded_are_the_cores() -> None:
    """config/ refuses what does not fit without the core; what it states is what the core has."""
    assert (engine.MAX_STEP_TOKENS, engine.MAX_DRAFT_LEN) == (
        _core.MAX_STEP_TOKENS,
        _core.MAX_DRAFT_LEN,
    )
    assert list(acceptance.ACCEPTANCE_RULES.items()) == list(_core.acceptance_rules().items())
    assert acceptance.POSTERIOR_THRESHOLD == _core.POSTERIOR_THRESHOLD
    assert acceptance.POSTERIOR_ALPHA == _core.POSTERIOR_ALPHA
    assert resolve._MAX_STOP_IDS == _core.MAX_STOP_IDS
    page = _core.MAX_PAGE_SIZE
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
