"""What every benchmark shares: the machine's description, interleaved timing, result files.

Timing rules: programs that are compared run in one invocation, interleaved, the order turned round
every round; a ratio is taken inside a round and the median over rounds is reported. The load of the
machine is recorded at the start and the end: figures of a busy machine say so themselves.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from specdec_ext.installation import cpu_name

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results")
T = TypeVar("T")


def cpu_flags() -> list[str]:
    """Returns the instruction sets that decide which kernels run."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    wanted = {"avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"}
    return sorted(wanted & set(flags.split()))


def load_average() -> list[float]:
    """Returns the 1, 5 and 15 minute load averages."""
    return [round(value, 2) for value in os.getloadavg()]


def commit() -> str:
    """Returns the short commit of the working tree, with '+' if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "--short", "HEAD") or "uncommitted"
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def versions() -> dict[str, str]:
    """Returns the versions of the packages that take part."""
    import torch
    import transformers

    import specdec_ext

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "specdec_ext": specdec_ext.__version__,
    }


def _named(word: str) -> str:
    """An argument; of a whole path its last part."""
    return Path(word).name if word.startswith("/") else word


def environment(threads: int) -> dict[str, Any]:
    """Returns everything about the machine and the build that a reader of a figure must know."""
    import specdec_ext

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_name(),
        "cpu_flags": cpu_flags(),
        "cores": os.cpu_count(),
        "threads": threads,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "load_average_start": load_average(),
        "versions": versions(),
        "build": specdec_ext.build_info(),
        # Without folders of this machine.
        "command": " ".join(["python", *(_named(word) for word in sys.orig_argv[1:])]),
    }


def width_of(model: Any) -> str:
    """Returns the width of a loaded model's weights, for example "bfloat16" or "q4_1": which file
    is the default depends on what is installed, so every result file names it, as "dtype"."""
    return str(model.info.dtype).removeprefix("torch.")


def set_threads(threads: int) -> None:
    """Gives torch and this package's kernels the same number of threads."""
    import specdec_ext

    specdec_ext.set_num_threads(threads)


def interleave(
    programs: dict[str, Callable[[], T]], rounds: int, progress: str = ""
) -> dict[str, list[T]]:
    """Runs every program once per round, in alternating order; returns the results per program."""
    results: dict[str, list[T]] = {name: [] for name in programs}
    for round_ in range(rounds):
        names = list(programs) if round_ % 2 == 0 else list(programs)[::-1]
        for name in names:
            started = time.perf_counter()
            results[name].append(programs[name]())
            if progress:
                seconds = time.perf_counter() - started
                print(f"  {progress} round {round_ + 1}/{rounds} {name}: {seconds:.1f} s",
                      file=sys.stderr, flush=True)  # fmt: skip
    return results


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median, smallest and largest of the rounds."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def device_kind() -> str:
    """Returns the host kind that result files are named after, for example 'cpu2'."""
    return f"cpu{os.cpu_count()}"


def write_result(name: str, result: dict[str, Any], tables: Sequence[str] = ()) -> Path:
    """Writes results/<name>-<host>-<date>-<commit>.json, and the tables beside it as .md."""
    result["environment"]["load_average_end"] = load_average()
    env = result["environment"]
    stem = f"{name}-{device_kind()}-{env['date'][:10]}-{env['commit'].rstrip('+')}"
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{stem}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if tables:
        path.with_suffix(".md").write_text(f"# {name}\n\n" + "\n\n".join(tables) + "\n")
    print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
    return path


def markdown(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a markdown table; floats get two digits."""

    def cell(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(map(cell, header)) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell(v) for v in row) + " |" for row in rows]
    return "\n".join(lines)
