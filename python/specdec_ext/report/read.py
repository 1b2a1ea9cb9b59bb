"""Result files: what wrote them, what they say of the machine, and which figures they have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import bench_figures, benchmark_figures, gpu_figures, trace_figures, training_figures
from .figures import Figure

__all__ = ["KINDS", "Result", "read_result"]

_Make = Callable[[Mapping[str, Any]], list[Figure]]

# `benchmark` of a file -> (which command writes it, what is drawn of it).
KINDS: Mapping[str, tuple[str, _Make]] = {
    "latency": ("specdec bench latency", bench_figures.pair),
    "throughput": ("specdec bench throughput", bench_figures.pair),
    "sweep": ("specdec bench sweep", bench_figures.sweep),
    "serve": ("specdec bench serve", bench_figures.serve),
    "tune": ("specdec tune", bench_figures.tune),
    "summarize": ("specdec summarize", bench_figures.summarize),
    "trace": ("specdec trace", trace_figures.trace),
    "training": ("specdec train-*", training_figures.training),
    "acceptance": ("benchmarks.acceptance", benchmark_figures.acceptance),
    "end_to_end": ("benchmarks.end_to_end", benchmark_figures.end_to_end),
    "model_drafters": ("benchmarks.model_drafters", benchmark_figures.model_drafters),
    "step_cost": ("benchmarks.step_cost", benchmark_figures.step_cost),
    "gpu": ("benchmarks/gpu/run.sh", gpu_figures.gpu),
}


@dataclass(frozen=True)
class Result:
    """One result file.

    name     of the file
    writer   the command whose result it is
    facts    (word, value) pairs that a reader of its figures must know
    """

    name: str
    writer: str
    facts: list[tuple[str, str]]
    figures: list[Figure]


def read_result(path: Path) -> Result:
    """The figures of a result file. Raises ConfigError for a file that is none of KINDS."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); give result files") from None
    kind = data.get("benchmark") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        said = f"benchmark = {kind!r}" if kind is not None else "no key 'benchmark'"
        raise ConfigError(
            f"{path}: {said}; a report is made of the JSON files of "
            f"{', '.join(writer for writer, _ in KINDS.values())}"
        )
    writer, make = KINDS[kind]
    try:
        return Result(path.name, writer, _facts(data), make(data))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{path}: not as {writer} writes it ({type(error).__name__}: {error}); write it again "
            "with this version"
        ) from None


def _facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the file says of model and machine, in the order in which it is read."""
    machine = data.get("environment") or data.get("machine") or {}
    facts = [
        ("model", data.get("model")),
        ("method", data.get("method")),
        ("dtype", data.get("dtype")),
        ("numerics", data.get("numerics")),
        ("machine", machine.get("device")),
        ("processor", machine.get("cpu")),
        ("threads", machine.get("threads")),
        ("date", (machine.get("date") or "")[:10]),
        ("commit", machine.get("commit")),
        ("load", _load(data, machine)),
        ("tokens equal to plain decoding", _yes(data.get("identical_to_plain"))),
    ]
    if data.get("emulated"):
        facts.append(("emulated", "on a CPU: no times"))
    if data.get("synthetic_acceptance"):
        facts.append(("synthetic acceptance", "drafts were kept at given rates"))
    return [(word, _words(value)) for word, value in facts if value not in (None, "")]


def _load(data: Mapping[str, Any], machine: Mapping[str, Any]) -> str | None:
    """Load averages of one minute, at the start and at the end."""
    times = data.get("clocks") or {}
    marks = [
        machine.get("load_average_start") or (times.get("before") or {}).get("load_average"),
        machine.get("load_average_end") or (times.get("after") or {}).get("load_average"),
    ]
    return " to ".join(f"{mark[0]:.1f}" for mark in marks if mark) or None


def _yes(value: Any) -> str | None:
    return None if value is None else "yes" if value else "NO"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    return str(value)
