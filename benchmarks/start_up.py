"""How long from the start of a process to its first token, and what does it hold then?

Each run is a fresh Python process that runs nothing else: `import specdec_ext`, an LLM, one token
of a short prompt. Files are in the page cache (one run of each kind goes in front). Reported are
medians over the runs, in seconds from the process's start; the processor time until then; RSS after
the first token, and what of it is not mapped files; and whether torch and transformers were
imported.

    python -m benchmarks.start_up [--rounds 5] [--output file.json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import common
from specdec_ext.installation import cpu_name

PROMPT = "The capital of France is"
# What is started -> the arguments of LLM(), as text.
CASES = {
    "LLM()": "",
    "LLM(default GGUF)": "find_default_gguf()",
    "LLM(), prompt lookup": "speculative_config={'method': 'ngram'}",
    "LLM(), lookahead": "speculative_config={'method': 'lookahead'}",
    "LLM(), draft model": "speculative_config=DraftTargetDecodingConfig(default_drafter())",
    "LLM(), Medusa": "speculative_config={'method': 'medusa'}",
    "LLM(), ReDrafter": "speculative_config={'method': 'redrafter'}",
}
SCRIPT = """
import json, os, sys, time
now = lambda: time.clock_gettime(time.CLOCK_MONOTONIC) - {start}
begun = now()
import specdec_ext
imported = now()
from specdec_ext import LLM, SamplingParams, DraftTargetDecodingConfig
from specdec_ext.models.default import find_default_gguf
from specdec_ext.models.default_drafter import default_drafter
llm = LLM({arguments})
ready = now()
llm.generate({prompt!r}, SamplingParams(max_tokens=1), use_tqdm=False)
first = now()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({{
    "dtype": llm.model.info.dtype,
    "python": begun, "import": imported, "ready": ready, "first_token": first,
    "processor": time.process_time(),
    "rss_mb": int(status["VmRSS"].split()[0]) / 1024,
    "anonymous_mb": int(status["RssAnon"].split()[0]) / 1024,
    "modules": len(sys.modules),
    "heavy": sorted({{"torch", "transformers"}} & set(sys.modules)),
}}))
"""


def environment() -> dict[str, str]:
    """What a fresh process gets: it keeps compiled modules, as an installed package has them."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run_llm(arguments: str) -> dict[str, Any]:
    """One fresh process."""
    start = time.clock_gettime(time.CLOCK_MONOTONIC)
    script = SCRIPT.format(start=start, arguments=arguments, prompt=PROMPT)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run_command() -> dict[str, Any]:
    """`specdec generate` from its start to the end of one token."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "specdec_ext", "generate", "--input_text", PROMPT]
    command += ["--max_output_len", "1"]
    subprocess.run(command, capture_output=True, check=True, env=environment())
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"first_token": seconds, "processor": used}


def measure(rounds: int) -> dict[str, dict[str, Any]]:
    """Medians of every case; rounds are interleaved."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (*CASES, "specdec generate")}
    for number in range(rounds + 1):
        for name, found in runs.items():
            one = run_llm(CASES[name]) if name in CASES else run_command()
            if number:  # the first fills the page cache
                found.append(one)
    return {name: _median(found) for name, found in runs.items()}


def _median(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: value if isinstance(value, (list, str)) else statistics.median(r[key] for r in found)
        for key, value in found[0].items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", help="write the figures as JSON to this file")
    args = parser.parse_args()
    load = common.load_average()
    results = measure(args.rounds)
    head = ("ready, s", "first token, s", "processor, s", "RSS, MB")
    print(f"{'case':24}{head[0]:>10}{head[1]:>16}{head[2]:>14}{head[3]:>10}  imported")
    keys = ("ready", "first_token", "processor")
    for name, row in results.items():
        cells = [f"{row[key]:.2f}" if key in row else "" for key in keys]
        rss = f"{row['rss_mb']:.0f}" if "rss_mb" in row else ""
        heavy = ", ".join(row.get("heavy", []))
        print(f"{name:24}{cells[0]:>10}{cells[1]:>16}{cells[2]:>14}{rss:>10}  {heavy}")
    if args.output:
        about = {
            "commit": common.commit(),
            "cpu": cpu_name(),
            "threads": os.environ.get("SPECDEC_NUM_THREADS", "all"),
            "load_average": [load, common.load_average()],
            "rounds": args.rounds,
        }
        with open(args.output, "w", encoding="utf-8") as file:
            file.write(json.dumps({**about, "results": results}, indent=1) + "\n")
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
