"""The installation under test: versions, public names, stubs, the command's start."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

import packaging_tools as tools
import specdec_ext

ROOT = tools.ROOT
PACKAGE = ROOT / "python" / "specdec_ext"
HEAVY = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "yaml", "rich")


def test_the_tests_run_against_this_tree() -> None:
    """`make build` installs editable: Python files are the tree's, the core is built from it."""
    assert Path(specdec_ext.__file__).resolve().parent == PACKAGE


def test_versions_agree() -> None:
    from specdec_ext import _core

    assert (
        tools.project_version()
        == specdec_ext.__version__
        == metadata.version("specdec_ext")
        == _core.__version__
    )


def test_build_info_says_what_was_built() -> None:
    info = specdec_ext.build_info()
    assert info["version"] == info["core_version"] == tools.project_version()
    assert info["cpu_isa"] in ("plain", "avx2", "avx512", "avx512_bf16", "amx")
    assert set(info["cuda"]) == {
        "compiled",
        "runtime_version",
        "driver_version",
        "devices",
        "reason",
    }
    assert info["num_threads"] >= 1
    assert info["max_draft_len"] == 127
    assert info["max_step_tokens"] == 128
    json.dumps(info)


def test_the_number_of_threads_has_the_core_s_limit() -> None:
    from specdec_ext import _core
    from specdec_ext.config.limits import MAX_THREADS

    before = specdec_ext.get_num_threads()
    try:
        specdec_ext.set_num_threads(MAX_THREADS)
        assert specdec_ext.get_num_threads() == MAX_THREADS
    finally:
        specdec_ext.set_num_threads(before)
    with pytest.raises(specdec_ext.ConfigError, match=rf"num_threads = {MAX_THREADS + 1}: out of"):
        specdec_ext.set_num_threads(MAX_THREADS + 1)
    with pytest.raises(ValueError, match=rf"give 1\.\.{MAX_THREADS}"):
        _core.set_num_threads(MAX_THREADS + 1)


@pytest.mark.parametrize("name", specdec_ext.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(specdec_ext, name) is not None
    assert name in dir(specdec_ext)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Lookaheed'"):
        specdec_ext.Lookaheed  # noqa: B018


def test_stubs_are_current() -> None:
    done = tools.run(sys.executable, "scripts/make_stubs.py", "--check", check=False)
    assert done.returncode == 0, done.stderr


def test_a_stale_stub_is_found(tmp_path: Path) -> None:
    """The check itself: the current stub passes, one changed line does not."""
    current = PACKAGE / "_core.pyi"
    altered = tmp_path / "_core.pyi"
    check = (sys.executable, "scripts/make_stubs.py", "--check", "--stub")
    assert tools.run(*check, current, check=False).returncode == 0
    altered.write_text(current.read_text().replace("class Executor", "class Execute", 1))
    done = tools.run(*check, altered, check=False)
    assert done.returncode == 1
    assert "make stubs" in done.stderr


# -- the command ----------------------------------------------------------------------------------


def test_help_reads_few_modules() -> None:
    """Starting costs what is imported: counted, since processor time differs from run to run."""
    script = tools.BIN / "specdec"
    assert script.exists(), "the entry point is not installed: make build"
    assert "generate" in tools.run(script, "--help").stdout
    code = """
import sys
before = len(sys.modules)
from specdec_ext.cli import main
main(["--help"])
print(len(sys.modules) - before, file=sys.stderr)
"""
    read = int(tools.run(sys.executable, "-c", code).stderr)
    # Measured: 114 on Python 3.11. importlib.metadata alone adds 48, numpy 140.
    assert read <= 140


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["generate", "--help"], ["inspect", "--help"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from specdec_ext.cli import main
code = main({arguments!r})
print(code, sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)
"""
    done = tools.run(sys.executable, "-c", code)
    assert done.stderr.strip() == "0 []"
    assert done.stdout.strip()


def test_the_module_runs_as_the_command() -> None:
    script = tools.run(tools.BIN / "specdec", "--version").stdout
    module = tools.run(sys.executable, "-m", "specdec_ext", "--version").stdout
    assert script == module == f"specdec {tools.project_version()}\n"
