"""Breaks the asm of the wrappers in one place at a time: does conformance on the PTX notice?

    make ptx-mutate                      all of tests/ptx/mutants.py; build/ptx is made before
    python tests/ptx/mutate.py wgmma     those whose description holds the word

A mutant is compiled to PTX and run by the interpreter. It is killed if the program's output is not
what it was, if it fails, or if it does not end. Each must change the PTX, and the emulator cannot
see any: what it compiles of the wrappers' files holds no asm.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "ptx"
MACHINE = BUILD / "cmake" / "tests" / "ptx" / "CMakeFiles" / "specdec_ptx_machine.dir"
FLAGS = ["-std=c++20", "--expt-relaxed-constexpr"]
TARGET = ["-gencode", "arch=compute_90a,code=compute_90a", "-no-compress"]
SECONDS = 60  # of the processor; the programs take one


class Stale(Exception):
    """A mutant does not fit the sources, or does not compile."""


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, **options)


def mutated(mutant: Mutant) -> str:
    """The wrappers' file with the mutant in it: the first fitting place behind the anchor."""
    text = (ROOT / mutant.file).read_text()
    start = text.find(mutant.after)
    at = text.find(mutant.old, start)
    if start < 0 or at < 0:
        raise Stale("does not fit the sources any more")
    return text[:at] + mutant.new + text[at + len(mutant.old) :]


def compile_program(program: str, folder: Path) -> tuple[Path, bytes]:
    """The program with the wrappers of a folder, and its PTX."""
    made = folder / f"{program}.o"
    includes = [f"-I{folder}/cuda", "-Icpp", "-Icuda", "-Itests"]
    source = f"tests/simt/{program}.cu"
    done = run(["nvcc", *FLAGS, *includes, *TARGET, "-c", source, "-o", str(made)])
    if done.returncode:
        raise Stale(f"does not compile: {done.stderr.decode()[-2000:]}")
    objects = [str(file) for file in MACHINE.glob("*.o")]
    binary = folder / program
    done = run(["g++", "-o", str(binary), str(made), *objects])
    if done.returncode:
        raise Stale(f"does not link: {done.stderr.decode()[-2000:]}")
    ptx = re.search(rb"\.version .*?\0", made.read_bytes(), re.DOTALL)
    if ptx is None:
        raise Stale("has no PTX")
    # Names hold a hash of how the program was compiled.
    return binary, re.sub(rb"_GLOBAL__N__[0-9a-f]+", b"_GLOBAL__N__", ptx[0])


def output_of(binary: Path) -> tuple[int, bytes]:
    limit = (SECONDS, SECONDS)
    done = run([str(binary)], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, limit))
    return done.returncode, done.stdout + done.stderr


def copy_wrappers(folder: Path) -> None:
    shutil.copytree(ROOT / "cuda" / "gpu", folder / "cuda" / "gpu")


def verdict(mutant: Mutant, originals: dict[str, tuple[bytes, tuple[int, bytes]]]) -> str:
    """Returns how it died, '' if it survived.

    Raises   Stale if it fits nothing, or changes nothing.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_wrappers(folder)
        (folder / mutant.file).write_text(mutated(mutant))
        binary, ptx = compile_program(mutant.program, folder)
        original_ptx, original = originals[mutant.program]
        if ptx == original_ptx:
            raise Stale("does not change the PTX")
        status, output = output_of(binary)
    if (status, output) == original:
        return ""
    lines = output.decode(errors="replace").splitlines()
    # An error of the interpreter says it best, then a line that differs.
    for line in lines:
        if line.lstrip().startswith("what():"):
            return "..." + line[-140:]
    before = set(original[1].decode().splitlines())
    return next((line for line in lines if line not in before), f"exit status {status}")[:140]


def asm_in_emulation() -> list[str]:
    """Returns the programs whose emulated form holds asm: none may."""
    done = run(["nvcc", "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"])
    include = re.search(rb'INCLUDES="-I([^"]*)"', done.stderr)
    system = ["-isystem", include[1].decode()] if include else []
    found = []
    for program in ("conformance", "hopper"):
        source = f"tests/simt/{program}.cu"
        flags = ["-std=c++20", *system, "-Icpp", "-Icuda", "-Itests", "-x", "c++"]
        text = run(["g++", *flags, "-E", "-P", source]).stdout
        if not text or re.search(rb"wgmma\.mma_async|cp\.async\.|mma\.sync", text):
            found.append(program)
    return found


def main() -> int:
    words = sys.argv[1:]
    chosen = [m for m in MUTANTS if all(word in m.what for word in words)]
    failed = 0
    originals = {}
    for program in sorted({m.program for m in chosen}):
        with tempfile.TemporaryDirectory() as name:
            copy_wrappers(Path(name))
            binary, ptx = compile_program(program, Path(name))
            originals[program] = (ptx, output_of(binary))
        if not originals[program][1][1].endswith(b"passed\n"):
            print(f"  {program} does not pass unbroken")
            failed += 1
    for program in asm_in_emulation():
        print(f"  {program}: the emulator compiles asm")
        failed += 1

    def judge(mutant: Mutant) -> tuple[bool, str]:
        try:
            why = verdict(mutant, originals)
        except Stale as error:
            return False, f"STALE, {error}"
        return bool(why), why or "SURVIVED"

    with ThreadPoolExecutor(int(os.environ.get("PTX_JOBS", "2"))) as pool:
        for mutant, (killed, why) in zip(chosen, pool.map(judge, chosen), strict=True):
            print(f"  {mutant.what}: {why}", flush=True)
            failed += not killed
    print(f"ptx-mutate: {'FAILED' if failed else 'ok'}, {len(chosen)} mutants, {failed} faults")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
