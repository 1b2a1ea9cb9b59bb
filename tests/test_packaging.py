"""The wheel, the sdist, and the build's own refusals."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

import pybind11
import pytest

import packaging_tools as tools
import specdec_ext
from specdec_ext.extras import EXTRA_OF

ROOT = tools.ROOT
PACKAGE = ROOT / "python" / "specdec_ext"


# -- the wheel ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wheel:
    path: Path
    source: Path
    cpu_seconds: float

    @property
    def names(self) -> list[str]:
        with zipfile.ZipFile(self.path) as archive:
            return [name for name in archive.namelist() if not name.endswith("/")]

    def read(self, suffix: str) -> bytes:
        (name,) = [name for name in self.names if name.endswith(suffix)]
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(name)


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def make_wheel(folder: Path, source: Path, *options: str) -> Wheel:
    """As `pip wheel` makes it, without the CUDA part."""
    begin = children_cpu_s()
    env = {**os.environ, "SPECDEC_CUDA": "OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
    tools.pip("wheel", "--no-deps", *options, "-w", folder / "out", source, env=env, cwd=folder)
    used = children_cpu_s() - begin
    (path,) = (folder / "out").glob("*.whl")
    return Wheel(path, source, used)


@pytest.fixture(scope="module")
def clean_wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """Built in isolation from a clean copy, as `pip install .` builds it: all of it is compiled."""
    folder = tmp_path_factory.mktemp("wheel")
    return make_wheel(folder, tools.copy_of_the_tree(folder / "source"))


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """The same without compiling again: pip packs the Python part, and what `make build` has
    compiled is installed into it (test_a_clean_copy_builds_the_same_wheel)."""
    version = "".join(map(str, sys.version_info[:2]))
    built = list((ROOT / "build").glob(f"cp{version}-*"))
    if len(built) != 1 or specdec_ext.build_info()["cuda"]["compiled"]:
        made: Wheel = request.getfixturevalue("clean_wheel")
        return made
    folder = tmp_path_factory.mktemp("wheel")
    packed = make_wheel(folder, ROOT, "--no-build-isolation", "-Cwheel.cmake=false")
    installed = folder / "installed"
    tools.run(tools.BIN / "cmake", "--install", built[0], "--prefix", installed, "--strip")
    with zipfile.ZipFile(packed.path, "a", zipfile.ZIP_DEFLATED) as archive:
        for file in installed.rglob("*"):
            # Bindings for tests alone: an editable build has them, no wheel has.
            if file.is_file() and not file.name.startswith("_core_testing"):
                archive.write(file, file.relative_to(installed))
    return packed


# What one compiler call takes on the machine that the limit was set on, in processor seconds.
# Shared machines differ by a factor of two from one hour to the next, in processor time too.
REFERENCE_COMPILE_S = 6.0
REFERENCE_SOURCE = """
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
PYBIND11_MODULE(reference, m) { m.def("size", [](const std::vector<int>& v) { return v.size(); }); }
"""


def reference_compile_s(folder: Path) -> float:
    """Processor seconds of compiling a fixed file against the headers that the build reads most."""
    source = folder / "reference.cc"
    source.write_text(REFERENCE_SOURCE)
    include = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    begin = children_cpu_s()
    subprocess.run(
        ["c++", "-O3", "-std=c++20", "-fPIC", *include, "-c", source, "-o", folder / "reference.o"],
        check=True,
    )
    return children_cpu_s() - begin


@pytest.mark.slow
def test_the_build_takes_under_ninety_seconds_on_two_cores(
    clean_wheel: Wheel, tmp_path: Path
) -> None:
    """By processor time, and by this machine's speed while it is measured."""
    slower = max(1.0, reference_compile_s(tmp_path) / REFERENCE_COMPILE_S)
    assert clean_wheel.cpu_seconds < 2 * 90 * slower


@pytest.mark.slow
def test_a_clean_copy_builds_the_same_wheel(wheel: Wheel, clean_wheel: Wheel) -> None:
    assert sorted(clean_wheel.names) == sorted(wheel.names)
    for file in ("METADATA", "entry_points.txt"):
        assert clean_wheel.read(f".dist-info/{file}") == wheel.read(f".dist-info/{file}")
    assert str(clean_wheel.source).encode() not in clean_wheel.read(".so")


def cpp_runtime_files() -> set[str]:
    """The headers of all layers but the bindings, the public ones, the library, CMake's package."""
    files = {
        "lib/libspecdec.a",
        "cmake/specdecConfig.cmake",
        "cmake/specdecConfigVersion.cmake",
    }
    public = ROOT / "cpp" / "include"
    for file in (ROOT / "cpp").rglob("*.h"):
        if file.is_relative_to(public):
            files.add(f"include/{file.relative_to(public).as_posix()}")
        elif not file.is_relative_to(ROOT / "cpp" / "bind"):
            files.add(f"include/specdec/core/{file.relative_to(ROOT / 'cpp').as_posix()}")
    return {f"specdec_ext/{name}" for name in files}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Wheel) -> None:
    names = set(wheel.names)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    expected = {
        f"specdec_ext/{file.relative_to(PACKAGE).as_posix()}"
        for pattern in ("*.py", "*.pyi", "py.typed", "config/*.json", "serve/*.html", "data/**/*")
        for file in PACKAGE.rglob(pattern)
        if file.is_file()
        if not any(part.startswith(".") for part in file.relative_to(PACKAGE).parts)
    }
    expected.add(f"specdec_ext/_core{suffix}")
    expected |= cpp_runtime_files()
    assert {"specdec_ext/py.typed", "specdec_ext/_core.pyi"} <= expected
    info = f"specdec_ext-{tools.project_version()}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == expected
    assert {name.removeprefix(info) for name in names if name.startswith(info)} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }
    # Trained drafters for the default model, at most 12 MB each (an EAGLE-3 head's format wants 9.4
    # MB of the target's own output head besides), and 4 MiB for everything else.
    trained = {
        folder.name: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        for folder in (PACKAGE / "data").glob("*")
        if folder.is_dir()
    }
    limits = {name: 18_000_000 if name == "eagle3" else 12_000_000 for name in trained}
    assert all(size <= limits[name] for name, size in trained.items())
    assert wheel.path.stat().st_size < (4 << 20) + sum(trained.values())


def test_the_wheel_describes_itself(wheel: Wheel) -> None:
    about = HeaderParser().parsestr(wheel.read(".dist-info/METADATA").decode())
    assert about["Name"] == "specdec_ext"
    assert about["Version"] == tools.project_version()
    assert about["Requires-Python"] == ">=3.10"
    assert about["License-Expression"] == "Apache-2.0"
    needs = {re.split(r"[\s<>=!;\[]", item)[0] for item in about.get_all("Requires-Dist", [])}
    assert {"torch", "numpy", "safetensors", "transformers", "tokenizers"} <= needs
    always = {
        re.split(r"[\s<>=!;\[]", item)[0]
        for item in about.get_all("Requires-Dist", [])
        if "extra ==" not in item
    }
    assert not {"torch", "transformers"} & always, "the native CPU path needs neither"
    assert b"specdec = specdec_ext.cli:main" in wheel.read(".dist-info/entry_points.txt")


def imported_distributions() -> set[str]:
    """Distributions that the package's Python files import, whoever else brings them too."""
    modules: set[str] = set()
    for path in (ROOT / "python").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules.add(node.module.split(".")[0])
    modules -= {*sys.stdlib_module_names, "specdec_ext"}
    triton = "nvidia-pytriton"
    distributions = {
        "yaml": "pyyaml", "tritonclient": triton, "triton_python_backend_utils": triton,
    }  # fmt: skip
    return {distributions.get(name, name).lower().replace("_", "-") for name in modules}


def test_what_is_imported_is_declared_and_nothing_else(wheel: Wheel) -> None:
    about = HeaderParser().parsestr(wheel.read(".dist-info/METADATA").decode())
    declared = about.get_all("Requires-Dist", [])
    names = {re.split(r"[\s<>=!;\[]", item)[0] for item in declared}
    # transformers imports tokenizers, uvicorn what makes it fast: of those the version is declared.
    # The load tools are programs that are run. An extra may name others of this package.
    others = {"tokenizers", "httptools", "uvloop", "aiperf", "guidellm"}
    assert imported_distributions() | others == names - {"specdec_ext", "specdec-ext"}


def test_the_extension_links_no_torch_and_names_no_build_folder(wheel: Wheel) -> None:
    core = wheel.read(".so")
    for library in (b"libtorch", b"libc10", b"libcuda.so", b"libcudart.so", b"libgomp"):
        assert library not in core, library
    assert str(wheel.source).encode() not in core


def test_the_wheel_works_where_it_is_installed(wheel: Wheel, tmp_path: Path) -> None:
    tools.pip("install", "--no-deps", "--target", tmp_path, wheel.path, cwd=tmp_path)
    # -S: no .pth file runs, so the editable install cannot answer for the wheel.
    code = f"""
import json, sys
sys.path[:0] = [{str(tmp_path)!r}]
sys.path.append({sysconfig.get_path("purelib")!r})
import specdec_ext
from specdec_ext import _core
config = specdec_ext.LookaheadDecodingConfig(7, 7, 7)
print(json.dumps([specdec_ext.__file__, _core.__file__, specdec_ext.build_info(),
                  config.max_draft_len]))
"""
    done = tools.run(sys.executable, "-I", "-S", "-c", code, cwd=tmp_path)
    package, core, info, drafts = json.loads(done.stdout)
    assert Path(package).is_relative_to(tmp_path)
    assert Path(core).is_relative_to(tmp_path)
    assert info["version"] == info["core_version"] == tools.project_version()
    assert info["cuda"]["compiled"] is False
    assert "CUDA" in info["cuda"]["reason"]
    assert drafts == 83


@pytest.mark.slow  # the packages it depends on come from an index
def test_the_wheel_in_a_bare_environment(clean_wheel: Wheel, tmp_path: Path) -> None:
    """It and what it depends on, nothing else: no torch, no transformers."""
    tools.run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    tools.run(python, "-m", "pip", "install", "-q", clean_wheel.path, cwd=tmp_path)
    script = shutil.copy(ROOT / "tests" / "wheel_smoke.py", tmp_path)
    done = tools.run(python, "-I", script, tmp_path / "smoke", cwd=tmp_path)
    assert "smoke test passed" in done.stdout
    assert "specdec train-medusa needs torch" in done.stderr
    installed = tools.run(python, "-m", "pip", "list", "--format=freeze").stdout
    assert not re.search(r"^(torch|transformers)==", installed, re.MULTILINE)


def test_the_sdist_builds(tmp_path: Path) -> None:
    """It holds what a build reads and no results, and a wheel's sources are all in it."""
    source = tools.copy_of_the_tree(tmp_path / "source")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    tools.run(sys.executable, "-c", code, tmp_path, cwd=source)
    (path,) = tmp_path.glob("specdec_ext-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "pyproject.toml", "LICENSE", "PKG-INFO"} <= names
    for folder in ("cmake", "cpp", "cuda", "python"):
        for file in (source / folder).rglob("*"):
            assert not file.is_file() or file.relative_to(source).as_posix() in names, file
    assert not any(name.startswith("benchmarks/results/") for name in names)


def test_every_extra_that_an_error_names_exists() -> None:
    """And brings the package that the error names."""
    text = (ROOT / "pyproject.toml").read_text()
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for distribution, extra in EXTRA_OF.values():
        (content,) = re.findall(rf"^{extra} = \[(.*?)\]$", extras, re.MULTILINE | re.DOTALL)
        assert f'"{distribution}>=' in content
    (train,) = re.findall(r"^train = \[(.*?)\]$", extras, re.MULTILINE)
    assert '"torch>=' in train and '"transformers>=' in train


# -- the build's refusals -------------------------------------------------------------------------


def configure(tmp_path: Path, *defines: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and output of a CMake configuration; no CUDA compiler is found without `env`."""
    import pybind11

    done = tools.run(
        "cmake",
        *("-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        *defines,
        env=env or tools.environment_without_nvcc(tmp_path),
        check=False,
    )
    return done.returncode, re.sub(r"\s+", " ", done.stdout + done.stderr)


AS_SCIKIT_BUILD = ("-DSKBUILD=2", "-DSKBUILD_PROJECT_VERSION=1.2.3")


def test_cuda_on_without_nvcc_stops_with_our_sentence(tmp_path: Path) -> None:
    code, text = configure(tmp_path, *AS_SCIKIT_BUILD, "-DSPECDEC_CUDA=ON")
    assert code != 0
    assert "SPECDEC_CUDA=ON but no CUDA compiler was found. Put nvcc on PATH or set CUDACXX" in text


@pytest.mark.parametrize(
    ("cuda", "reason"), [("OFF", "SPECDEC_CUDA=OFF"), ("AUTO", "no nvcc found; set CUDACXX")]
)
def test_without_nvcc_the_build_is_for_the_cpu(tmp_path: Path, cuda: str, reason: str) -> None:
    code, text = configure(tmp_path, *AS_SCIKIT_BUILD, f"-DSPECDEC_CUDA={cuda}")
    assert code == 0, text
    assert "specdec_ext 1.2.3" in text
    assert f"CUDA backend: OFF ({reason}" in text


@pytest.mark.parametrize(
    ("smi", "built"), [("OFF", "OFF (no NVIDIA driver here"), ("/bin/true", "ON (found ")]
)
def test_auto_builds_cuda_where_a_compiler_and_a_driver_are(
    tmp_path: Path, smi: str, built: str
) -> None:
    """One rule for pip and make: the Makefile adds none of its own."""
    defines = (*AS_SCIKIT_BUILD, "-DSPECDEC_CUDA=AUTO", f"-DSPECDEC_NVIDIA_SMI={smi}")
    path = f"{tools.BIN}{os.pathsep}{os.environ['PATH']}"
    code, text = configure(tmp_path, *defines, env={**os.environ, "PATH": path})
    assert code == 0, text
    has_compiler = shutil.which("nvcc") is not None
    assert f"CUDA backend: {built if has_compiler else 'OFF (no nvcc found'}" in text
    assert "export SPECDEC_CUDA" not in (ROOT / "Makefile").read_text()


def test_an_unknown_cuda_choice_is_refused(tmp_path: Path) -> None:
    code, text = configure(tmp_path, *AS_SCIKIT_BUILD, "-DSPECDEC_CUDA=MAYBE")
    assert code != 0
    assert "SPECDEC_CUDA=MAYBE: expected AUTO, ON or OFF" in text


def test_a_bare_cmake_run_says_what_to_do_instead(tmp_path: Path) -> None:
    code, text = configure(tmp_path)
    assert code != 0
    assert "Build the package with 'pip install .'" in text
    assert "cmake --preset tests" in text
