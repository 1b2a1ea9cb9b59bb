"""Runs the PTX of the kernels: conformance, then the kernels' tests. `make ptx-test`.

    python tests/ptx/run.py              everything; build/ptx is made by CMake before
    python tests/ptx/run.py -k linear    only the tests that match

Conformance (tests/simt/conformance.cu, hopper.cu) prints the same lines as in the emulator. The
tests of tests/kernels run on the backend of build/ptx in the emulator's place, against the same
references. In the end every kernel of cuda/ must have run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "ptx"
BACKEND = BUILD / "backend"  # the PTX library under the emulators' names
LAUNCHES = BUILD / "launches.txt"
PROGRAMS = ("conformance", "hopper")
DEVICES = {"conformance": ("9.0", "8.0"), "hopper": ("9.0",)}
OLD_DEVICE_TESTS = ("test_cuda_step.py", "test_cuda_kv.py")  # once more with the PTX of 8.0


def limits(device: str) -> dict[str, str]:
    """The environment of a device of that compute capability."""
    shared_bytes = {"8.0": 163, "9.0": 227}[device] << 10
    return {**os.environ, "SPECDEC_EMU_LIMITS": f"{device},4,{shared_bytes}"}


def lines_of(command: list[str], env: dict[str, str] | None = None) -> list[str]:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    return lines if done.returncode == 0 else [*lines, f"exit status {done.returncode}"]


def misuse() -> list[str]:
    """Returns what the interpreter gets wrong of PTX written by hand."""
    lines = lines_of(["build/ptx/ptx_misuse"])
    print(lines[-1], flush=True)
    return [line for line in lines if line.startswith(("FAIL", "exit"))]


def conformance() -> list[str]:
    """Returns the lines of a conformance program that are not the emulator's."""
    faults = []
    for name in PROGRAMS:
        subprocess.run(["tests/simt/mk.sh", f"tests/simt/{name}.cu", name], cwd=ROOT, check=True)
        wanted = lines_of([f"build/emu/{name}"])
        if wanted[-1] != "passed":
            faults.append(f"{name}: the emulator says {wanted[-1]}")
        for device in DEVICES[name]:
            got = lines_of([f"build/ptx/ptx_{name}"], limits(device))
            pairs = zip([*got, *[""] * len(wanted)], wanted, strict=False)
            faults += [f"{name} {device}: {a!r}, emulated {b!r}" for a, b in pairs if a != b]
            faults += [f"{name} {device}: {line}" for line in got[len(wanted) :]]
    return faults


def without_code() -> list[str]:
    """Returns a fault unless a device that the package was not compiled for is refused by name."""
    ask = (
        "import torch; from specdec_ext import ops; ops.load_backend('ptx', "
        f"{str(BUILD / 'libspecdec_ptx.so')!r}); "
        "ops.argmax(torch.zeros(2, 9), torch.zeros(2, dtype=torch.int32), backend='ptx')"
    )
    environment = {**os.environ, "SPECDEC_EMU_LIMITS": f"7.5,4,{163 << 10}"}
    said = lines_of([sys.executable, "-c", ask], environment)
    wanted = r"launch of \w*argmax\w*: .* no code for a device of compute capability 7\.5.*=75-real"
    return [] if any(re.search(wanted, line) for line in said) else [f"a device of 7.5: {said}"]


def run_tests(arguments: list[str], env: dict[str, str], launches: Path = LAUNCHES) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "ptx.skip_missing", *arguments]
    paths = os.pathsep.join([str(ROOT / "tests"), env.get("PYTHONPATH", "")])
    env = {**env, "PYTHONPATH": paths.rstrip(os.pathsep), "SPECDEC_EMU_FOLDER": str(BACKEND)}
    env |= {"SPECDEC_PTX_LAUNCHES": str(launches), "SPECDEC_REQUIRE_EMU": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def first_hour() -> list[str]:
    """Returns the kernels that the parts of `run.sh first-hour` (benchmarks/gpu/small_set.py) leave
    out, but for attention's, of which every instance is a part."""
    names = BUILD / "first_hour.txt"
    names.unlink(missing_ok=True)
    program = (
        "import torch; from pathlib import Path; from benchmarks.gpu import ours, small_set; "
        "from benchmarks.gpu.run import Target; "
        f"ours.EMULATORS.update(dict.fromkeys(ours.EMULATORS, Path({str(BUILD)!r}) / "
        "'libspecdec_ptx.so')); target = Target('cuda-emu-fast', torch.device('cpu')); "
        "ours.open_backend(target); "
        "parts = [*small_set.operations(), *small_set.products_that_hand_over()]; "
        "skipped = ('attn', 'prompt', 'generic', 'bits', 'whole'); "
        "[check(target) for name, check in parts if not name.startswith(skipped)]"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SPECDEC_PTX_LAUNCHES": str(names)}
    said = lines_of([sys.executable, "-c", program], env)
    faults = said if said and said[-1].startswith("exit status") else []
    sys.path.insert(0, str(ROOT))
    from benchmarks.gpu.small_set import ONCE

    for name, which in ONCE.items():
        chosen = ["-m", "emulated and not emulator and not slow", "-k", which]
        if run_tests([*chosen, f"tests/kernels/test_{name}.py"], env, names) != 0:
            faults.append(f"first hour: {name} -k {which!r} failed")
    text = names.read_text() if names.exists() else ""
    attention = {"ampere_main", "hopper_main", "generic_kernel", "finish", "plan"}
    left = sorted(kernels() - attention - launched(kernels(), text))
    return faults + [f"first hour: no part runs {name}" for name in left]


def kernels() -> set[str]:
    """Returns the names of all kernels in cuda/."""
    found = set()
    for path in (ROOT / "cuda").rglob("*.cu*"):
        text = path.read_text()
        bounds = r"(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?"
        found |= set(re.findall(rf"__global__\s+void\s+{bounds}(\w+)\(", text))
    return found


def launched(names: set[str], text: str) -> set[str]:
    """Returns those kernels whose (mangled) names the backend has written down in `text`."""
    return {name for name in names if re.search(rf"{len(name)}{name}[EI]", text)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", help="only the tests that match, as of pytest")
    parser.add_argument("--jobs", default="2")
    args = parser.parse_args()
    BACKEND.mkdir(parents=True, exist_ok=True)
    for name in ("libspecdec_emu.so", "libspecdec_emu_fast.so"):
        (BACKEND / name).unlink(missing_ok=True)
        (BACKEND / name).symlink_to("../libspecdec_ptx.so")
    LAUNCHES.unlink(missing_ok=True)
    faults = [] if args.k else [*misuse(), *conformance(), *without_code()]
    common = ["-m", "emulated and not emulator and not slow", "-k", args.k]
    parallel = ["-n", args.jobs, "--dist", "loadfile"]
    if run_tests([*parallel, *common, "tests/kernels"], dict(os.environ)) != 0:
        faults.append("tests failed")
    if not args.k:
        old = [f"tests/kernels/{name}" for name in OLD_DEVICE_TESTS]
        if run_tests([*common, *old], limits("8.0")) != 0:
            faults.append("tests failed on a device of 8.0")
        names, text = kernels(), LAUNCHES.read_text() if LAUNCHES.exists() else ""
        faults += [f"{name}: no test ran it" for name in sorted(names - launched(names, text))]
        faults += first_hour()
    for fault in faults:
        print(f"  {fault}")
    used = os.times()
    print(
        f"ptx-test: {'FAILED' if faults else 'ok'}, {len(kernels())} kernels, "
        f"{used.children_user + used.children_system:.0f} s of one processor"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
