"""The stages that prove: build, conformance, every kernel once, the engine, tests, the sanitizer.

A stage is a list of parts (supervise.py). Nothing of the package is imported before it is built,
and nothing here touches a device: that happens in the parts' own processes.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.results import scrub
from benchmarks.gpu.run import ROOT, Target, call, outcome
from benchmarks.gpu.supervise import LIMIT_S, Part

SITE = ROOT / "build" / "gpu" / "site"  # where the build stage puts the package
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
BUILD_S = 480.0
PYTEST_S = 300.0  # one file of tests
SLOW_PYTEST_S = 480.0
SANITIZER_S = 420.0
ENGINE_S = 120.0


def limit(target: Target, seconds: float = LIMIT_S) -> float:
    """Returns a part's limit: the emulator computes on a CPU that others may use."""
    return 10 * seconds if target.emulated else seconds


# -- build ----------------------------------------------------------------------------------------


def build(target: Target) -> list[Part]:
    """Builds the package with CUDA into build/gpu/site, or the emulated library; the programs of
    the conformance stage."""
    package = Part("build", "package", _build_package, BUILD_S, alone=False)
    if target.emulated:
        package = Part("build", "emulator", _build_emulator, BUILD_S * 4)
    programs = [
        Part("build", name, partial(_build_program, name, target), limit(target, 180), alone=False)
        for name in PROGRAMS
    ]
    return [package, *programs]


def _build_emulator() -> dict[str, Any]:
    bin_folder = str(Path(sys.executable).parent)
    path = {"PATH": bin_folder + os.pathsep + os.environ["PATH"]}
    for command in (["cmake", "--preset", "emu"], ["cmake", "--build", "--preset", "emu"]):
        status, output = call(command, path)
        if status:
            break
    return outcome(status, output)


def architectures(major: int, minor: int) -> str:
    """Returns what CMake compiles for a device: its own machine code of all families, so that no
    kernel is compiled by the driver in the middle of a test."""
    return "90a-real" if (major, minor) == (9, 0) else f"{major}{minor}-real"


def _build_package() -> dict[str, Any]:
    chosen = architectures(*torch.cuda.get_device_capability())
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    command += ["--no-index", "--no-compile", "--upgrade", "--target", str(SITE)]
    defined = {"CMAKE_CUDA_ARCHITECTURES": chosen, "SPECDEC_TEST_MODULE": "ON"}  # for the tests
    command += [f"--config-settings=cmake.define.{name}={value}" for name, value in defined.items()]
    command.append(".")
    environment = {
        "SPECDEC_CUDA": "ON",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    status, output = call(command, environment)
    if status:
        return outcome(status, output)
    ask = "import specdec_ext, json; print(json.dumps(specdec_ext.build_info()))"
    status, output = call([sys.executable, "-c", ask], {"PYTHONPATH": str(SITE)})
    return outcome(status, output, scrub(output.strip()[-600:]))


# -- conformance ----------------------------------------------------------------------------------

# The first test of all: whether a score depends on its row or column decides about everything else.
FIRST = "rows_do_not_matter or columns_do_not_matter"


PROGRAMS = ("conformance", "hopper")  # of every primitive; of those of 9.0
PROGRAMS_OUT = ROOT / "build" / "gpu"


def conformance(target: Target) -> list[Part]:
    """Every primitive against the emulator, then whether rows and columns matter."""
    found = [
        Part("conformance", name, partial(_conformance, name, target), limit(target), alone=False)
        for name in PROGRAMS
    ]
    rows = partial(_pytest, _kernel_tests(), target, FIRST)
    seconds = limit(target, 120)
    return [*found, Part("conformance", "rows-and-columns", rows, seconds, alone=False)]


def _build_program(name: str, target: Target) -> dict[str, Any]:
    """Compiles a program of every primitive for the emulator and for the device."""
    make = ["sh", "tests/simt/mk.sh", f"tests/simt/{name}.cu", name]
    status, output = call(make, {"EMU_OUT": f"build/gpu/emu-{name}"})
    if status or target.emulated:
        return outcome(status, output, "emulated")
    if name == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        return {"status": "unavailable", "summary": "not a Hopper device"}
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}a" if (major, minor) == (9, 0) else f"{major}{minor}"
    command = ["nvcc", "-std=c++20", "--expt-relaxed-constexpr", "-Icpp", "-Icuda", "-Itests"]
    command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    command += [f"tests/simt/{name}.cu", "-o", str(PROGRAMS_OUT / name)]
    return outcome(*call(command))


def _conformance(name: str, target: Target) -> dict[str, Any]:
    """Runs such a program on the device and in the emulator; both print the same."""
    program = PROGRAMS_OUT / f"emu-{name}" / name
    if not program.exists():  # the stage was run without `build`
        built = _build_program(name, target)
        if built["status"] != "ok":
            return built
    status, emulated = call([str(program)])
    if status or target.emulated:
        return outcome(status, emulated, f"{len(emulated.splitlines())} lines, emulated")
    if name == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        return {"status": "unavailable", "summary": "not a Hopper device"}
    status, device = call([str(PROGRAMS_OUT / name)])
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


# -- every kernel once ----------------------------------------------------------------------------


def one_tile(target: Target) -> list[Part]:
    """Every kernel but the attention instances that hand registers over, each in its own part."""
    from benchmarks.gpu import small_set

    checks = [*small_set.instances(handing_over=False), *small_set.operations()]
    parts = [_check_part("one-tile", *check, target) for check in _some(checks, target, 9)]
    for name, which in small_set.ONCE.items():
        work = partial(_pytest, [kernel_test(name)], target, which, "not slow")
        parts.append(Part("one-tile", f"once-{name}", work, limit(target), alone=False))
    return parts


def two_tile(target: Target) -> list[Part]:
    """Attention instances and products whose warpgroups hand registers over; repeated calls."""
    from benchmarks.gpu import determinism, small_set

    checks = [*small_set.instances(handing_over=True), *small_set.products_that_hand_over()]
    parts = [_check_part("two-tile", *check, target) for check in _some(checks, target, 6)]
    for cell in determinism.CELLS:
        small = cell.tiny() if target.emulated else cell
        again = partial(determinism.repeat, small, times=2 if target.emulated else 200)
        parts.append(_check_part("two-tile", f"again-{small.name}", again, target))
    return list({part.name: part for part in parts}.values())


def _some(checks: Sequence[Any], target: Target, step: int) -> Sequence[Any]:
    """Emulated, a few of them: `make test` runs them all."""
    return checks[::step] if target.emulated else checks


def _check_part(
    stage: str, name: str, check: Callable[[Target], dict[str, Any]], target: Target
) -> Part:
    return Part(stage, name, partial(_opened, check, target), limit(target), alone=False)


def _opened(check: Callable[[Target], dict[str, Any]], target: Target) -> dict[str, Any]:
    from benchmarks.gpu.ours import open_backend

    open_backend(target)
    record = check(target)
    settle(target)
    return record


def settle(target: Target) -> None:
    """Waits for the device: what a kernel left behind fails the part that launched it."""
    if not target.emulated:
        torch.cuda.synchronize()


# -- engine ---------------------------------------------------------------------------------------


def engine(target: Target) -> list[Part]:
    """The engine on the device with tiny models: plain, each method, texts."""
    if importlib.util.find_spec("transformers") is None:  # it reads configurations
        record = {"status": "unavailable", "summary": "transformers is not installed"}
        return [Part("engine", "engine", lambda: record)]
    from benchmarks.gpu import engine_cells, model_step, spec_step, texts

    decode = next(cell for cell in engine_cells.model_cells() if cell.kind == "decode")
    graphs = next(cell for cell in engine_cells.model_cells() if cell.graphs)
    work: list[tuple[Any, Callable[..., dict[str, Any]]]] = [
        (decode, model_step.measure_decode),
        (graphs, model_step.measure_decode),
    ]
    methods = {cell.method: cell for cell in reversed(engine_cells.speculation_cells())}
    work += [(cell, spec_step.measure) for cell in methods.values()]
    work += [(cell, texts.measure) for cell in engine_cells.texts_cells()]
    parts = []
    for cell, measure in work:
        tiny = cell.tiny()
        run = partial(_engine_part, partial(measure, tiny), target)
        parts.append(Part("engine", tiny.name, run, limit(target, ENGINE_S), alone=False))
    return parts


def _engine_part(measure: Callable[[Target], dict[str, Any]], target: Target) -> dict[str, Any]:
    record = _opened(measure, target)
    # Nobody asks how long these sizes take: the result is that they work.
    return {key: record[key] for key in ("status", "summary", "not_near_ties") if key in record}


# -- tests ----------------------------------------------------------------------------------------

# What the emulated mode runs of the same files: `make test` runs all of it.
EMULATED = "same_call_twice or alone_equals or head_dims or argmax_of_one"
# What else has a CUDA device among its parameters: kernels, the decoder and the engine.
KERNEL_TESTS = (
    "accept_law", "beam_ops", "e4m3_linear", "growth_ops", "linear_sums", "packed_linear",
    "proposed_drafts", "row_ops", "slots", "slots_prompt", "slots_sampled", "unpack_weight",
    "unpacked_products",
)  # fmt: skip
DEVICE_TESTS = (
    "tests/model/test_device_model.py",
    "tests/model/test_device_widths.py",
    "tests/model/test_scored_rows.py",
    "tests/engine/test_device_llm.py",
    "tests/engine/test_device_llm_drafters.py",
    "tests/engine/test_device_sums.py",
    "tests/engine/test_attention_windows.py",
    "tests/engine/test_drafter_contracts.py",
    "tests/engine/test_draft_target.py",
    "tests/engine/test_draft_target_faults.py",
    "tests/engine/test_draft_target_sampling.py",
    "tests/engine/test_draft_target_vocabulary.py",
    "tests/engine/test_eagle3.py",
    "tests/engine/test_eagle3_contracts.py",
    "tests/engine/test_enqueued_steps.py",
    "tests/engine/test_graph_memory.py",
    "tests/engine/test_kv_types.py",
    "tests/engine/test_network_contracts.py",
    "tests/engine/test_preemption.py",
    "tests/engine/test_recorded_passes.py",
    "tests/engine/test_swapping.py",
    "tests/engine/test_vocab_mapping.py",
    "tests/engine/test_window_memory.py",
)


def kernel_test(name: str) -> str:
    return f"tests/kernels/test_{name}.py"


def _kernel_tests() -> list[str]:
    found = sorted((ROOT / "tests" / "kernels").glob("test_cuda_*.py"))
    files = [file.relative_to(ROOT).as_posix() for file in found]
    return files + [kernel_test(name) for name in KERNEL_TESTS]


def tests(target: Target) -> list[Part]:
    """The test files that know a device, each in its own part; slow tests after all others."""
    parts, slow = [], []
    which = EMULATED if target.emulated else ""
    for file in _kernel_tests():
        stem = Path(file).stem
        work = partial(_pytest, [file], target, which, "not slow")
        parts.append(Part("tests", stem, work, limit(target, PYTEST_S), alone=False))
        if not target.emulated:
            work = partial(_pytest, [file], target, "", "slow")
            slow.append(Part("tests", f"{stem}-slow", work, SLOW_PYTEST_S, alone=False))
    if importlib.util.find_spec("transformers") is not None:
        which = "buffers_stay or lookahead" if target.emulated else ""
        for file in DEVICE_TESTS:
            work = partial(_pytest, [file], target, which, "not slow")
            parts.append(Part("tests", Path(file).stem, work, limit(target, PYTEST_S), alone=False))
    return parts + slow


def _pytest(
    files: Sequence[str], target: Target, which: str = "", marked: str = ""
) -> dict[str, Any]:
    device = "emu" if target.emulated else "cuda and not emu"  # the host's tests need no GPU
    expression = f"({which}) and {device}" if which else device
    # -v: the last line of a log is the test that hung.
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", expression]
    if marked:
        command += ["-m", marked]
    # What torch warns of on this machine is not what is tested here.
    command += ["--maxfail=3"] if target.emulated else ["-W", "default"]
    status, output = call([*command, *files])
    summary = _summary(output)
    if status == 5:  # the files have none of that kind
        return {"status": "ok", "summary": summary}
    return outcome(status, output, summary)


def _summary(output: str) -> str:
    """pytest's last line."""
    last = next((x for x in reversed(output.splitlines()) if re.search(r"\d+ \w+", x)), "")
    return last.strip("= ")


# -- sanitize -------------------------------------------------------------------------------------


def sanitize(target: Target) -> list[Part]:
    """The small set under every tool of compute-sanitizer, or under the emulator's checks."""
    if target.emulated:
        return [Part("sanitize", "emulator-checks", _emulator_checks, limit(target))]
    return [
        Part("sanitize", tool, partial(_sanitizer, tool), SANITIZER_S, alone=False)
        for tool in SANITIZERS
    ]


def _emulator_checks() -> dict[str, Any]:
    status, output = call(
        [sys.executable, "-m", "benchmarks.gpu.small_set", "--backend", "cuda-emu"]
    )
    return outcome(status, output, f"{len(output.splitlines())} calls")


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


def _sanitizer(tool: str) -> dict[str, Any]:
    if shutil.which("compute-sanitizer") is None:
        return {"status": "unavailable", "summary": "compute-sanitizer is not installed"}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    if tool != "initcheck":  # that one has to see torch's kernels write the inputs
        command += ["--kernel-name", "kernel_substring=specdec"]
    program = [sys.executable, "-m", "benchmarks.gpu.small_set"]
    # One allocation per tensor, so that an access past its end is one past an allocation.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    status, output = call([*command, *program], environment)
    if "kernel-name" in output and "option" in output.lower():  # this release names it otherwise
        status, output = call([*command[:5], *program], environment)
    return judge_sanitizer(status, output)
