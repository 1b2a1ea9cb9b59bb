"""The stages that prove: build, test, sanitize. Each part is a record of the result file.

Nothing of the package is imported before it is built.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.results import scrub
from benchmarks.gpu.run import ROOT, Run, outcome

SITE = ROOT / "build" / "gpu" / "site"  # where the build stage puts the package
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")


# -- build ----------------------------------------------------------------------------------------


def build(run: Run) -> None:
    """Builds the package with CUDA into build/gpu/site, or the emulated library."""
    if run.emulated:
        run.part("build", "emulator", lambda: _build_emulator(run))
        return
    if not SITE.exists():  # the record is of another machine with the same device
        run.store.cells("build").pop("package", None)
    run.part("build", "package", lambda: _build_package(run))


def _build_emulator(run: Run) -> dict[str, Any]:
    bin_folder = str(Path(sys.executable).parent)
    path = {"PATH": bin_folder + os.pathsep + os.environ["PATH"]}
    for command in (["cmake", "--preset", "emu"], ["cmake", "--build", "--preset", "emu"]):
        status, output = run.call(command, "build-emulator", path)
        if status:
            break
    return outcome(status, output)


def architectures(major: int, minor: int) -> str:
    """Returns what CMake compiles for a device: machine code for all families, so that no kernel is
    compiled by the driver in the middle of a test."""
    real = f"{major}{minor}-real"
    return f"80-virtual;{real};90a-real" if (major, minor) == (9, 0) else f"80-virtual;{real}"


def _build_package(run: Run) -> dict[str, Any]:
    chosen = architectures(*torch.cuda.get_device_capability())
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    command += ["--no-index", "--no-compile", "--upgrade", "--target", str(SITE)]
    command += [f"--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES={chosen}", "."]
    environment = {
        "SPECDEC_CUDA": "ON",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    status, output = run.call(command, "build", environment)
    if status:
        return outcome(status, output)
    ask = "import specdec_ext, json; print(json.dumps(specdec_ext.build_info()))"
    status, output = run.call([sys.executable, "-c", ask], "import", {"PYTHONPATH": str(SITE)})
    return outcome(status, output, scrub(output.strip()[-600:]))


# -- test -----------------------------------------------------------------------------------------

# The first test of all: whether a score depends on its row or column decides about everything else.
FIRST = "rows_do_not_matter or columns_do_not_matter"
# What the emulated mode runs of the same files: `make test` runs all of it.
EMULATED = "same_call_twice or alone_equals or head_dims or argmax_of_one"


def test(run: Run) -> None:
    """The kernel tests on the device, conformance with the emulator, repeated calls."""
    folder = ROOT / "tests" / "kernels"
    files = sorted(file.name for file in folder.glob("test_cuda_*.py"))
    run.part("test", "rows-and-columns", lambda: _pytest(run, files, FIRST, "first"))
    for name in ("conformance", "hopper"):
        if (ROOT / "tests" / "simt" / f"{name}.cu").exists():
            run.part("test", name, partial(_conformance, run, name))
    _repeat(run)
    for file in files:
        stem = Path(file).stem
        run.part("test", stem, partial(_pytest, run, [file], "", "not slow"))
        if not run.quick and not run.emulated:
            run.part("test", f"{stem}-slow", partial(_pytest, run, [file], "", "slow"))
    run.part("test", "device-model", partial(_device_model, run))


# The decoder and the engine on the device: of the emulated ones, `make test` runs all.
DEVICE_TESTS = [
    "tests/model/test_device_model.py",
    "tests/engine/test_device_llm.py",
    "tests/engine/test_run_ahead_llm.py",
    "tests/engine/test_run_ahead_device.py",
]


def _device_model(run: Run) -> dict[str, Any]:
    if importlib.util.find_spec("transformers") is None:
        return {"status": "unavailable", "summary": "transformers is not installed"}
    which = "emu and (buffers_stay or lookahead)" if run.emulated else "not emu"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which]
    command += ["-m", "not slow", "-W", "default", *DEVICE_TESTS]
    status, output = run.call(command, "pytest-device")
    return outcome(status, output, _summary(output))


def _repeat(run: Run) -> None:
    from benchmarks.gpu import determinism
    from benchmarks.gpu.ours import open_backend
    from benchmarks.gpu.problem import RandomPool

    open_backend(run.target)
    pool = RandomPool(run.target.device)
    times = 2 if run.emulated else 200
    for cell in determinism.CELLS:
        small = cell.tiny() if run.emulated else cell
        work = partial(determinism.repeat, small, run.target, pool, times)
        run.part("test", f"again-{small.name}", work)


def _pytest(run: Run, files: Sequence[str], which: str, kind: str) -> dict[str, Any]:
    device = "emu" if run.emulated else "not emu"
    if run.emulated and kind != "first":
        which = EMULATED
    expression = f"({which}) and {device}" if which else device
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", expression]
    if kind in ("slow", "not slow"):
        command += ["-m", kind]
    # What torch warns of on this machine is not what is tested here.
    command += ["--maxfail=3"] if run.emulated else ["-W", "default"]
    command += [f"tests/kernels/{file}" for file in files]
    status, output = run.call(command, f"pytest-{kind}-{files[0]}".replace(" ", "-"))
    summary = _summary(output)
    if status == 5 and (kind == "slow" or run.emulated):  # the file has none of that kind
        return {"status": "ok", "summary": summary}
    return outcome(status, output, summary)


def _summary(output: str) -> str:
    """pytest's last line."""
    last = next((x for x in reversed(output.splitlines()) if re.search(r"\d+ \w+", x)), "")
    return last.strip("= ")


def _conformance(run: Run, name: str) -> dict[str, Any]:
    """Runs a program of every primitive on the device and in the emulator; both print the same."""
    folder = "build/gpu/emu"
    make = ["sh", "tests/simt/mk.sh", f"tests/simt/{name}.cu", name]
    status, output = run.call(make, f"mk-{name}", {"EMU_OUT": folder})
    if status:
        return outcome(status, output)
    status, emulated = run.call([f"{folder}/{name}"], f"{name}-emulated")
    if status or run.emulated:
        return outcome(status, emulated, f"{len(emulated.splitlines())} lines, emulated")
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}a" if (major, minor) == (9, 0) else f"{major}{minor}"
    if name == "hopper" and major != 9:
        return {"status": "unavailable", "summary": "not a Hopper device"}
    program = ROOT / "build" / "gpu" / name
    command = ["nvcc", "-std=c++20", "--expt-relaxed-constexpr", "-Icpp", "-Icuda", "-Itests"]
    command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    status, output = run.call(
        [*command, f"tests/simt/{name}.cu", "-o", str(program)], f"nvcc-{name}"
    )
    if status:
        return outcome(status, output)
    status, device = run.call([str(program)], f"{name}-device")
    if status:
        return outcome(status, device)
    difference = list(
        difflib.unified_diff(
            emulated.splitlines(), device.splitlines(), "emulator", "device", lineterm="", n=0
        )
    )
    lines = len(device.splitlines())
    if difference:
        return {"status": "failed", "summary": "differs", "output": "\n".join(difference)[-3000:]}
    return {"status": "ok", "summary": f"{lines} lines, equal to the emulator's"}


# -- sanitize -------------------------------------------------------------------------------------


def sanitize(run: Run) -> None:
    """The small set under every tool of compute-sanitizer, or under the emulator's checks."""
    if run.emulated:
        command = [sys.executable, "-m", "benchmarks.gpu.small_set", "--backend", "cuda-emu"]

        def checked() -> dict[str, Any]:
            status, output = run.call(command, "small-set")
            return outcome(status, output, f"{len(output.splitlines())} calls")

        run.part("sanitize", "emulator-checks", checked)
        return
    for tool in SANITIZERS:
        run.part("sanitize", tool, partial(_sanitizer, run, tool))


def judge_sanitizer(status: int, output: str) -> dict[str, Any]:
    """Returns the record of a sanitizer's run, from its exit status and output.

    A tool that cannot watch this device says so or gives no summary; that is `unavailable`. A
    finding, or a program that fails under a working tool, is `failed`.
    """
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", output)
    refused = re.search(
        r"[Dd]evice not supported|not supported on|error 999|Unable to|Failed to initialize|"
        r"Internal Sanitizer Error",
        output,
    )
    if refused or not summaries:
        text = refused[0] if refused else "no summary"
        return {"status": "unavailable", "summary": text, "output": scrub(output)[-1000:]}
    clean = re.match(r"0 (?:errors|hazards)", summaries[-1]) is not None
    record = outcome(0 if clean and status == 0 else 1, output, summaries[-1].strip())
    return record


def _sanitizer(run: Run, tool: str) -> dict[str, Any]:
    if shutil.which("compute-sanitizer") is None:
        return {"status": "unavailable", "summary": "compute-sanitizer is not installed"}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    if tool != "initcheck":  # that one has to see torch's kernels write the inputs
        command += ["--kernel-name", "kernel_substring=specdec"]
    program = [sys.executable, "-m", "benchmarks.gpu.small_set"]
    # One allocation per tensor, so that an access past its end is one past an allocation.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    status, output = run.call([*command, *program], f"sanitize-{tool}", environment)
    if "kernel-name" in output and "option" in output.lower():  # this release names it otherwise
        status, output = run.call([*command[:5], *program], f"sanitize-{tool}", environment)
    if status == 124:
        return {"status": "unavailable", "summary": "took longer than the stage has"}
    return judge_sanitizer(status, output)
