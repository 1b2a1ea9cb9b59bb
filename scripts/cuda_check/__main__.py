"""Compiles every CUDA source and holds the result against what the tree says about it."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from scripts.cuda_check import build, handover, loops, ptxas, registers, sass

ALLOWED = build.ROOT / "scripts" / "cuda_check" / "allowed_spills.txt"
MAX_BUILD_SECONDS = 480  # of two cores
GENERATOR = build.ROOT / "scripts" / "gen_instances.py"


def compile_all(
    names: Sequence[str], nvcc: str, tools: sass.Tools | None, jobs: int
) -> tuple[list[build.Object], list[str]]:
    """Returns the objects and the errors of those sources that do not compile."""
    objects, errors = [], []

    def compile_one(name: str) -> build.Object | str:
        try:
            return build.compile_source(name, nvcc, tools)
        except build.CompileError as error:
            return str(error)

    build.OUT.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        for name, done in zip(names, pool.map(compile_one, names), strict=True):
            if isinstance(done, str):
                errors.append(done)
                continue
            objects.append(done)
            if done.fresh:
                print(f"  {name}: {done.seconds:.1f} s", flush=True)
    return objects, errors


def local_memory_faults(
    kernels: dict[tuple[str, str], ptxas.KernelUse],
    opcodes: dict[tuple[str, str], dict[str, int]],
    entries: dict[str, str],
) -> list[str]:
    """Returns the kernels that use local memory without a reason, and reasons without a kernel."""
    found, used = [], set()
    for key, use in kernels.items():
        accesses = sass.local_memory(opcodes.get(key, {}))
        if not (use.spill or use.stack or accesses):
            continue
        matching = {pattern for pattern in entries if re.search(pattern, key[0])}
        used |= matching
        if not matching:
            found.append(
                f"{key[0]} ({key[1]}) uses local memory: {use.spill} bytes spilled, "
                f"{use.stack} bytes of stack, {accesses} accesses"
            )
    found += [f"allowed_spills.txt: nothing needs {p!r} any more" for p in entries.keys() - used]
    return found


def generated_faults() -> list[str]:
    """Returns what the generator of instance files says if they are not current."""
    command = [sys.executable, str(GENERATOR), "--check"]
    done = subprocess.run(command, cwd=build.ROOT, capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else [f"gen_instances.py --check: {done.stdout}{done.stderr}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/cuda_check.sh", description=__doc__)
    parser.add_argument(
        "--update", action="store_true", help=f"rewrite {registers.PAGE.name} and {loops.PAGE.name}"
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--only",
        default="",
        help="sources that match this expression; compared with nothing, but --update renews the "
        "rows of their kernels",
    )
    parser.add_argument(
        "--without-machine-code",
        action="store_true",
        help="where the toolkit has no cuobjdump: what only the machine code shows is not checked",
    )
    args = parser.parse_args(argv)
    started = time.perf_counter()
    nvcc = build.nvcc_version()
    if not nvcc:
        print("cuda-check: skipped, no nvcc on PATH")
        return 0
    tools = sass.find_tools()
    if tools is None and not args.without_machine_code:
        print(
            "cuda-check: no cuobjdump and nvdisasm on PATH, so that machine code cannot be read: "
            "install them, or pass --without-machine-code"
        )
        return 1
    names = [name for name in build.sources() if re.search(args.only, name)]
    objects, faults = compile_all(names, nvcc, tools, args.jobs)

    # Device tests only have to compile: their kernels are not recorded.
    package = [o for o in objects if o.source.startswith("cuda/")]
    uses = [use for o in package for use in ptxas.parse(o.log)]
    readable = ptxas.demangle(use.symbol for use in uses)
    kernels = {(readable[use.symbol], use.arch): use for use in uses}
    # One would stand for the other in the tables.
    shared = {name: n for name, n in Counter(readable.values()).items() if n > 1}
    faults += [f"{name}: {n} kernels have this name, rename them" for name, n in shared.items()]
    symbols = {(use.symbol, use.arch): key for key, use in kernels.items()}
    opcodes = {
        symbols[symbol, arch]: counts
        for o in package
        for arch, functions in o.opcodes.items()
        for symbol, counts in functions.items()
        if (symbol, arch) in symbols
    }
    for o in package:
        faults += [f"{o.source}: {text}" for text in ptxas.warnings(o.log)]
    # A device test that hangs is as bad as a kernel that does.
    faults += [f"{o.source}: {text}" for o in objects for text in handover.faults(o.handovers)]
    faults += [f"{o.source}: {text}" for o in objects for text in o.refused]
    seconds = sum(o.seconds for o in objects) / 2
    if seconds > MAX_BUILD_SECONDS:
        faults.append(
            f"all sources take {seconds:.0f} s of two cores, more than {MAX_BUILD_SECONDS}"
        )
    table = registers.table_of(kernels)
    recorded_with, recorded = registers.read()
    counted = {
        symbols[symbol, "sm_90a"][0]: found
        for o in package
        for symbol, found in o.loop_counts.items()
        if (symbol, "sm_90a") in symbols
    }
    if args.only and args.update:
        registers.write(dict(sorted({**recorded, **table}.items())), nvcc)
        loops.write({**loops.read(), **counted})
    if not args.only:
        entries = registers.allowed(ALLOWED.read_text())
        faults += local_memory_faults(kernels, opcodes, entries)
        if tools is not None:
            faults += sass.faults(opcodes)
            if args.update:
                loops.write(counted)
            elif recorded_with in ("", nvcc):
                faults += loops.differences(loops.read(), counted)
        faults += generated_faults()
        if args.update:
            registers.write(table, nvcc)
        elif recorded_with in ("", nvcc):
            faults += registers.differences(recorded, table)
        else:
            print(f"  registers.md is of nvcc {recorded_with}, this is {nvcc}: not compared")
    for fault in faults:
        print(f"  {fault}")
    fresh = sum(o.fresh for o in objects)
    spilled = sum(use.spill > 0 for use in kernels.values())
    print(
        f"cuda-check: {'FAILED, ' + str(len(faults)) + ' faults' if faults else 'ok'}: "
        f"{len(objects)} sources ({fresh} compiled now; all of them take "
        f"{seconds:.0f} s of two cores), "
        f"{len(kernels)} kernels, {spilled} with spills, most registers "
        f"{max((u.registers for u in uses), default=0)}, machine code "
        f"{'read' if tools else 'not read (no cuobjdump)'}, {time.perf_counter() - started:.0f} s"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
