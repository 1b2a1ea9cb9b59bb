"""Programs that put load on a server and measure it: AIPerf and GuideLLM.

Each gets a file with one prompt per request and leaves its report in a folder, which is read here.
They count tokens as the server says, so that a model's tokenizer is not needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ..errors import SpecdecError
from ..extras import MissingPackageError, missing
from ..text.metrics import SpecCounter

__all__ = ["TOOLS", "Load", "LoadTool", "LoadToolError", "acceptance", "find_tool"]

LOG_LINES = 15
END_SECONDS = 10.0
NUM_ERRORS = 5  # of those that a report names
ERROR_CHARS = 300


class LoadToolError(SpecdecError):
    """The tool failed, or its report is not as this version knows it."""


@dataclass(frozen=True)
class Load:
    """What a server is asked, `concurrency` requests at a time.

    prompts  of every request, in order
    body     fields of every request besides model, prompt, max_tokens and stream
    """

    url: str
    model: str
    prompts: Sequence[str]
    concurrency: int
    output_len: int
    is_chat: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    api_key: str | None = None


class LoadTool(ABC):
    """One program. Raises LoadToolError."""

    name: ClassVar[str]

    def __init__(self, executable: str) -> None:
        self.executable = executable

    def measure(self, load: Load, folder: Path) -> dict[str, Any]:
        """Run it in `folder`, which keeps its files and log, and return what it measured:

        requests, failed_requests, ttft_ms, tpot_ms, latency_ms ({"mean", "p50", "p90", "p99"} of
        the answers), output_tokens_per_second, requests_per_second, mean_output_tokens, ttfts_ms,
        tpots_ms (of every answer), speculative_decoding (None: the answers tell nothing of it),
        errors (what failed requests were told, and how often).
        """
        folder.mkdir(parents=True, exist_ok=True)
        command = self._command(load, folder)
        log = folder / f"{self.name}.log"
        code = _run(command, folder, log, self._environment(folder))
        try:
            return self._read(folder)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise LoadToolError(
                f"{self.name} ended with {code} and left no report that can be read "
                f"({type(error).__name__}: {error}). The end of its log:\n{_tail(log)}"
            ) from None

    def version(self) -> str:
        """As it says; empty if it does not."""
        try:
            done = subprocess.run(
                [self.executable, "--version"], capture_output=True, text=True, timeout=120
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.strip().rpartition(" ")[2] if done.returncode == 0 else ""

    @abstractmethod
    def _command(self, load: Load, folder: Path) -> list[str]:
        """Writes its configuration into the folder and returns the command."""

    @abstractmethod
    def _read(self, folder: Path) -> dict[str, Any]:
        """What it measured, from its report."""

    def _environment(self, folder: Path) -> dict[str, str]:
        return {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1"}


class AIPerf(LoadTool):
    name = "aiperf"

    def _command(self, load: Load, folder: Path) -> list[str]:
        prompts = folder / "prompts.jsonl"
        _write_lines(prompts, ({"text": text} for text in load.prompts))
        key = [] if load.api_key is None else ["--api-key", load.api_key]
        return [
            self.executable, "profile", "--model", load.model, "--url", load.url,
            "--endpoint-type", "chat" if load.is_chat else "completions", "--streaming",
            "--concurrency", str(load.concurrency), "--request-count", str(len(load.prompts)),
            "--input-file", str(prompts), "--custom-dataset-type", "single-turn",
            "--dataset-sampling-strategy", "sequential", "--osl", str(load.output_len),
            "--use-legacy-max-tokens", "--extra-inputs", json.dumps(dict(load.body)),
            "--use-server-token-count", "--tokenizer", str(_byte_tokenizer(folder)),
            "--random-seed", str(load.seed), "--artifact-dir", str(folder), "--ui", "none",
            "--no-gpu-telemetry", *key,
        ]  # fmt: skip

    def _environment(self, folder: Path) -> dict[str, str]:
        # Told to be offline it takes every tokenizer for a name in the cache, folders too.
        offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        return {k: v for k, v in super()._environment(folder).items() if k not in offline}

    def _read(self, folder: Path) -> dict[str, Any]:
        lines = (folder / "profile_export.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        errors = [record["error"] for record in records if record.get("error")]
        if len(errors) == len(records):  # it writes no report then
            raise ValueError(_none_answered(len(records), errors))
        report = _read_json(folder / "profile_export_aiperf.json")
        answers = [record["metrics"] for record in records if not record.get("error")]

        def value(name: str) -> float:
            return float(report[name]["avg"]) if name in report else 0.0

        def spread(name: str) -> dict[str, float]:
            found = report[name]
            return {"mean": found["avg"], **{key: found[key] for key in ("p50", "p90", "p99")}}

        def every(name: str) -> list[float]:
            return [float(answer[name]["value"]) for answer in answers if name in answer]

        histogram = report.get("pooled_spec_decode_acceptance_histogram") or {}
        spec = None
        if "total_spec_decode_steps" in report:
            depth = max(map(int, histogram), default=0)
            spec = acceptance(
                steps=value("total_spec_decode_steps"),
                drafts=value("total_draft_tokens"),
                accepted=value("total_accepted_draft_tokens"),
                histogram=[histogram.get(str(j), 0) for j in range(depth + 1)],
            )
        good = int(value("request_count"))
        return {
            "requests": good,
            "failed_requests": int(value("completed_request_count")) - good,
            "ttft_ms": spread("time_to_first_token"),
            "tpot_ms": spread("inter_token_latency"),
            "latency_ms": spread("request_latency"),
            "output_tokens_per_second": value("output_token_throughput"),
            "requests_per_second": value("request_throughput"),
            "mean_output_tokens": value("output_sequence_length"),
            "ttfts_ms": every("time_to_first_token"),
            "tpots_ms": every("inter_token_latency"),
            "speculative_decoding": spec,
            "errors": _counted(errors),
        }


class GuideLLM(LoadTool):
    name = "guidellm"

    def _command(self, load: Load, folder: Path) -> list[str]:
        prompts = folder / "prompts.jsonl"
        _write_lines(prompts, ({"prompt": text} for text in load.prompts))
        backend: dict[str, Any] = {
            "kind": "openai_http", "target": load.url, "model": load.model,
            "request_format": "/v1/chat/completions" if load.is_chat else "/v1/completions",
            "max_tokens": load.output_len, "extras": {"body": dict(load.body)},
        }  # fmt: skip
        if load.api_key is not None:
            backend["api_key"] = load.api_key
        return [
            self.executable, "run", "--backend", json.dumps(backend),
            "--profile", json.dumps({"kind": "concurrent", "streams": [load.concurrency]}),
            "--constraint", json.dumps({"kind": "max_requests", "count": len(load.prompts)}),
            "--data", json.dumps({"kind": "json_file", "path": str(prompts)}),
            "--seed", json.dumps({"kind": "static", "value": load.seed}),
            "--output", json.dumps({"kind": "json", "path": str(folder / "report.json")}),
            "--disable-console",
        ]  # fmt: skip

    def _environment(self, folder: Path) -> dict[str, str]:
        # What it reads as a data set is copied into a cache, otherwise the user's.
        return {**super()._environment(folder), "HF_DATASETS_CACHE": str(folder / "cache")}

    def _read(self, folder: Path) -> dict[str, Any]:
        [run] = _read_json(folder / "report.json")["benchmarks"]
        metrics, totals = run["metrics"], run["metrics"]["request_totals"]
        answers = run["requests"]["successful"]
        errors = [failed["info"]["error"] for failed in run["requests"]["errored"]]
        if not answers:
            raise ValueError(_none_answered(totals["total"], errors))

        def spread(name: str, scale: float = 1.0) -> dict[str, float]:
            found = metrics[name]["successful"]
            points = {key: found["percentiles"][key] for key in ("p50", "p90", "p99")}
            return {k: scale * v for k, v in {"mean": found["mean"], **points}.items()}

        def every(name: str) -> list[float]:
            return [float(answer[name]) for answer in answers if answer[name] is not None]

        return {
            "requests": totals["successful"],
            "failed_requests": totals["total"] - totals["successful"],
            "ttft_ms": spread("time_to_first_token_ms"),
            "tpot_ms": spread("inter_token_latency_ms"),
            "latency_ms": spread("request_latency", 1e3),
            "output_tokens_per_second": metrics["output_tokens_per_second"]["successful"]["mean"],
            "requests_per_second": metrics["requests_per_second"]["successful"]["mean"],
            "mean_output_tokens": metrics["output_token_count"]["successful"]["mean"],
            "ttfts_ms": every("time_to_first_token_ms"),
            "tpots_ms": every("inter_token_latency_ms"),
            "speculative_decoding": _sum_of(answer["response_metrics"] for answer in answers),
            "errors": _counted(errors),
        }


TOOLS: Mapping[str, type[LoadTool]] = {tool.name: tool for tool in (AIPerf, GuideLLM)}


def find_tool(name: str, path: str | None) -> LoadTool:
    """The tool at `path`, else beside this Python, else on PATH. Raises MissingPackageError."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(path) if path else shutil.which(name, path=beside) or shutil.which(name)
    if found is None and path:
        raise MissingPackageError(f"--tool-path {path!r} is no program that can be run")
    if found is None:
        asks = f"specdec bench serve --tool {name}"
        raise MissingPackageError(f"{missing(name, asks)}, or name the program with --tool-path")
    return TOOLS[name](os.path.abspath(found))


def acceptance(
    *, steps: float, drafts: float, accepted: float, histogram: Iterable[float]
) -> dict[str, Any]:
    """`speculative_decoding` (docs/metrics.md) of sums."""
    bins = [round(count) for count in histogram]
    return SpecCounter(
        len(bins) - 1,
        keep_steps=False,
        num_spec_steps=round(steps),
        num_drafts=round(drafts),
        num_accepted=round(accepted),
        histogram=bins,
    ).to_dict()


def _sum_of(metrics: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The acceptance of all answers whose metrics tell of it."""
    known = [spec for m in metrics if m and (spec := m.get("speculative_decoding"))]
    if not known:
        return None
    longest = max(len(spec["acceptance_histogram"]) for spec in known)
    bins = [0] * longest
    for spec in known:
        for j, count in enumerate(spec["acceptance_histogram"]):
            bins[j] += count
    return acceptance(
        steps=sum(spec["num_spec_steps"] for spec in known),
        drafts=sum(spec["num_draft_tokens"] for spec in known),
        accepted=sum(spec["num_accepted_draft_tokens"] for spec in known),
        histogram=bins,
    )


def _none_answered(count: int, errors: Sequence[Any]) -> str:
    return f"none of {count} requests was answered: {errors[0] if errors else 'none was sent'}"


def _counted(errors: Iterable[Any]) -> dict[str, int]:
    """The commonest errors, and how often each came. AIPerf's are objects with a message."""
    texts = (error.get("message", error) if isinstance(error, dict) else error for error in errors)
    return dict(Counter(str(text)[:ERROR_CHARS] for text in texts).most_common(NUM_ERRORS))


def _byte_tokenizer(folder: Path) -> Path:
    """A folder with a tokenizer of bytes: AIPerf loads one even if it counts nothing with it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = folder / "tokenizer"
    path.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(path / "tokenizer.json"))
    config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    (path / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return path


def _run(command: Sequence[str], folder: Path, log: Path, environment: dict[str, str]) -> int:
    """Its exit code. It and the processes that it starts end with this one's interrupt."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            with contextlib.suppress(ProcessLookupError):  # nobody of them is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES:])


def _write_lines(path: Path, values: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
