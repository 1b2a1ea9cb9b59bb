"""Fuzzes the extension: hostile arguments, in child processes, and a report of every stop.

    python tests/fuzz/run.py --calls 25000 --core build/sanitized/cpp/bind/_core*.so

A child that dies (signal, sanitizer) or hangs costs its call; the next child goes on behind it.
Exit status 0: no stop, and nothing but refusals (tests/fuzz/targets.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
# Processor time that a child may use; a call that never ends uses it up.
CPU_SECONDS = 1800


def sanitizer_environment(core: str) -> dict[str, str]:
    """The run-time libraries come first; an absurd allocation fails as it does elsewhere."""
    compiler = os.environ.get("CXX", "g++")
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    return {
        "SPECDEC_CORE": core,
        "LD_PRELOAD": " ".join(libraries),
        # Python and torch keep what they allocate until the end.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


def last_call(log: Path) -> tuple[int, str]:
    """Number and text of the call that was running, -1 if the child came to its end."""
    lines = log.read_text(errors="replace").splitlines()
    if not lines or lines[-1] == "end":
        return -1, ""
    at = max(i for i, line in enumerate(lines) if line.startswith("call "))
    return int(lines[at].split(":")[0].removeprefix("call ")), "\n".join(lines[at:])


def run_children(
    calls: int, seed: int, core: str = "", only: str = "", per_child: int = 500, first: int = 0
) -> list[str]:
    """One report for each stop and each child with findings."""
    environment = {**os.environ, **(sanitizer_environment(core) if core else {})}
    reports: list[str] = []
    end = first + calls
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        while first < end:
            count = min(per_child, end - first)
            log.write_text("")
            child = subprocess.run(
                [
                    sys.executable, str(HERE / "child.py"), "--seed", str(seed), "--first",
                    str(first), "--count", str(count), "--log", str(log), "--only", only,
                ],
                env=environment, capture_output=True, text=True, errors="replace",
                preexec_fn=limit_processor_time,
            )  # fmt: skip
            if child.returncode == 0:
                first += count
                continue
            stopped, text = last_call(log)
            reports.append(f"status {child.returncode}\n{text}\n{child.stderr[:4000]}")
            print(reports[-1], end="\n\n", flush=True)
            if stopped < 0 and not log.read_text().endswith("end\n"):
                raise RuntimeError(f"the child did not start:\n{child.stderr}")
            first = first + count if stopped < 0 else stopped + 1
    return reports


def limit_processor_time() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=25000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--per-child", type=int, default=500)
    parser.add_argument("--core", default="", help="a build of the extension under sanitizers")
    parser.add_argument("--only", default="", help="targets whose names begin so")
    given = parser.parse_args()
    reports = run_children(
        given.calls, given.seed, given.core, given.only, given.per_child, given.first
    )
    print(f"{given.calls} targets, {len(reports)} stops or findings")
    return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(main())
