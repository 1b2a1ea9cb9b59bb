"""Is it faster than the other programs that decode on a CPU, on the same file and width?

The default model in five widths: this package, llama.cpp, OpenVINO GenAI, vLLM's CPU build and
transformers, two threads each, plain and with the speculation each has. A cell is one program in a
fresh process: prompts of five kinds, a prefill of 512 tokens, 8 prompts at once, memory, loading,
and the time from the start of the process to its first token. Programs of a width take turns,
in an order that turns round every round; the slow ones (vLLM, transformers) run in the first round.

    python -m benchmarks.peers.cpu.environments        # once: installs and builds the peers
    python -m benchmarks.peers_cpu --minutes 5.5       # again and again, until all cells are there

Every cell is kept below the peers' folder as it ends, so that the next call goes on. The last call
writes the result files; --write does so with the cells there are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common, datasets, peers_cpu_tables, runners
from benchmarks.peers.cpu import environments
from benchmarks.peers.cpu.job import FAST, now

BATCH, BATCH_TOKENS, PREFILL = 8, 64, 512
MAX_PROMPT = 1200
CELL_SECONDS = 3600
# The guess for a cell that has not run yet.
GUESS_SECONDS = {"vllm": 240.0, "transformers": 180.0}
GUESS_SECONDS_OF_OTHERS = 75.0
SLOW = ("vllm", "transformers")


@dataclass(frozen=True)
class Program:
    """One line of the comparison. `neighbour`: the niceness of a process that spins beside it."""

    width: str
    peer: str
    method: str
    neighbour: int | None = None

    @property
    def key(self) -> str:
        beside = "" if self.neighbour is None else f" beside nice {self.neighbour}"
        return f"{self.width}/{self.peer} {self.method}{beside}"

    @property
    def is_busy(self) -> bool:
        return self.neighbour is not None


def plan() -> list[Program]:
    """All programs, those of one width one after the other."""
    programs = []
    for width in ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1"):
        programs += [Program(width, "ours", m) for m in ("plain", "lookup", "default")]
        if width != "F32":  # which numerics="fast" leaves as it is
            programs += [Program(width, "ours", m) for m in (f"{FAST}plain", f"{FAST}default")]
        programs += [Program(width, "llama_cpp", m) for m in ("plain", "lookup", "map")]
        programs += [Program(width, "openvino", m) for m in ("plain", "lookup")]
        if width == "BF16":
            programs += [Program(width, peer, m) for peer in SLOW for m in ("plain", "lookup")]
    for niceness in (10, 0):
        programs += [Program("Q4_0", p, "plain", niceness) for p in ("ours", "llama_cpp")]
    return programs


def model_of(program: Program) -> Path:
    """The file or folder that the program is given."""
    if program.peer in SLOW:
        import specdec_ext

        return Path(specdec_ext.default_model())
    # OpenVINO's reader has no BF16; its sums are in bfloat16 all the same (`precision`).
    is_half = program.peer == "openvino" and program.width == "BF16"
    return environments.gguf("F16" if is_half else program.width)


def make_job(program: Program, texts: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What the worker is asked to do."""
    prompts = texts["prompts"]
    return {
        "model": str(model_of(program)),
        "method": program.method,
        "precision": "f32" if program.width == "F32" else "bf16",
        "threads": args.threads,
        "version": "" if program.peer == "ours" else environments.version_of(program.peer),
        "prompts": prompts[::5] if program.is_busy else prompts,
        "short": texts["short"],
        "prefill": texts["prefill"],
        "max_tokens": args.tokens,
        "batch": texts["batch"] if "plain" in program.method and not program.is_busy else [],
        "batch_tokens": BATCH_TOKENS,
        "started": now(),
    }


def run_cell(program: Program, texts: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """One fresh process; {"failed": why} when it does not end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1",
                   "PYTHONPATH": str(common.ROOT)}  # fmt: skip
    # A passive wait suits our tests; at every operation it would put llama.cpp's threads to sleep.
    environment.pop("OMP_WAIT_POLICY", None)
    if program.peer == "llama_cpp":
        environment["LLAMA_SERVER"] = str(environments.tool("llama-server"))
    python = sys.executable if program.peer == "ours" else environments.python_of(program.peer)
    command = [str(python), "-m", f"benchmarks.peers.cpu.run_{program.peer}"]
    load = common.load_average()[0]
    spinning = None
    if program.neighbour is not None:
        spin = f"import os; os.nice({program.neighbour})\nwhile True: pass"
        spinning = subprocess.Popen([sys.executable, "-c", spin])
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, input=json.dumps(make_job(program, texts, args)), capture_output=True,
            text=True, env=environment, cwd=common.ROOT, timeout=CELL_SECONDS,
        )  # fmt: skip
    finally:
        if spinning is not None:
            spinning.kill()
            spinning.wait()
    result: dict[str, Any] = {"wall_s": time.monotonic() - began, "load_average": load}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {**result, "failed": lines[-1][:300]}
    return {**result, **json.loads(done.stdout)}


def make_texts(args: argparse.Namespace) -> dict[str, Any]:
    """Token ids of everything that is generated from, the same for all programs."""
    _, tokenizer = runners.default_model(args.threads)
    prompts, sets = [], []
    for name in datasets.SETS:
        for _, ids in datasets.load_ids(tokenizer, name, args.prompts, MAX_PROMPT):
            prompts.append(ids)
            sets.append(name)
    long = [ids for name in ("squad", "news")
            for _, ids in datasets.load_ids(tokenizer, name, 20, 4000)]  # fmt: skip
    batch = [ids for i in range(4) for name in datasets.SETS
             for ids in [datasets.load_ids(tokenizer, name, 4, MAX_PROMPT)[i][1]]]  # fmt: skip
    return {
        "prompts": prompts,
        "sets": sets,
        "short": tokenizer("The capital of France is")["input_ids"],
        "prefill": [i for ids in long for i in ids][:PREFILL],
        "batch": batch[:BATCH],
    }


def read_state(path: Path, settings: dict[str, Any], fresh: bool) -> dict[str, Any]:
    """The cells measured so far; SystemExit if they were measured with other settings."""
    if fresh or not path.is_file():
        return {"settings": settings, "cells": {}}
    state: dict[str, Any] = json.loads(path.read_text())
    if state["settings"] != settings:
        raise SystemExit(
            f"{path}: measured with {state['settings']}, now asked for {settings}: "
            "give the same options, or --fresh to begin again"
        )
    return state


def pending(args: argparse.Namespace, cells: dict[str, Any]) -> list[tuple[str, Program]]:
    """Cells that are missing, in the order in which they run, under their keys."""
    found = []
    programs = [p for p in plan() if p.width in args.widths]
    usable = [p for p in programs if p.peer == "ours" or environments.is_ready(p.peer)]
    for width in args.widths:
        for round_ in range(args.rounds):
            turn = [p for p in usable if p.width == width and not (p.peer in SLOW and round_)]
            for program in turn if round_ % 2 == 0 else turn[::-1]:
                key = f"{program.key}/{round_}"
                if key not in cells:
                    found.append((key, program))
    return found


def work(args: argparse.Namespace, state: dict[str, Any], path: Path) -> int:
    """Runs what is missing while the time lasts; returns how many cells are missing still."""
    texts = make_texts(args)
    state["sets"] = texts["sets"]
    state["prompt_tokens"] = [len(ids) for ids in texts["prompts"]]
    state.setdefault("environment", common.environment(args.threads))
    deadline = time.monotonic() + 60 * args.minutes
    cells = state["cells"]
    todo = pending(args, cells)
    while todo:
        key, program = todo[0]
        earlier = [c["wall_s"] for k, c in cells.items() if k.rsplit("/", 1)[0] == program.key]
        expected = max(earlier, default=GUESS_SECONDS.get(program.peer, GUESS_SECONDS_OF_OTHERS))
        if time.monotonic() + expected > deadline:
            break
        cells[key] = run_cell(program, texts, args)
        state["environment"]["load_average_end"] = common.load_average()
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(state))
        unfinished.replace(path)
        said = cells[key].get("failed", f"{cells[key]['wall_s']:.0f} s")
        print(f"{len(todo)} to go: {key}: {said}", file=sys.stderr, flush=True)
        todo.pop(0)
    return len(todo)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    widths = list(dict.fromkeys(p.width for p in plan()))
    parser.add_argument("--widths", nargs="+", default=widths, choices=widths)
    parser.add_argument("--prompts", type=int, default=3, help="per set")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens per prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600.0, help="end before so many")
    parser.add_argument("--folder", help="of the peers (default: $SPECDEC_PEERS or build/peers)")
    parser.add_argument("--fresh", action="store_true", help="forget the cells measured so far")
    parser.add_argument(
        "--write", action="store_true",
        help="measure nothing: write the results of the cells that there are, with their settings",
    )  # fmt: skip
    args = parser.parse_args()
    if args.folder:
        os.environ["SPECDEC_PEERS"] = args.folder
    settings = {
        "commit": common.commit(),
        **{name: getattr(args, name) for name in ("prompts", "tokens", "rounds", "threads")},
    }
    path = environments.root() / "peers_cpu-cells.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if args.write and path.is_file():
        settings = json.loads(path.read_text())["settings"]
        vars(args).update({name: settings[name] for name in settings if name != "commit"})
    state = read_state(path, settings, args.fresh)
    missing = len(pending(args, state["cells"])) if args.write else work(args, state, path)
    if missing and not args.write:
        print(f"{missing} cells are missing: give the same command again")
        return 0
    absent = [peer for peer in environments.PEERS if not environments.is_ready(peer)]
    result = {
        "benchmark": "peers_cpu",
        "environment": state["environment"],
        "model": "SmolLM2-135M-Instruct",
        "prompts_per_set": args.prompts,
        "max_tokens": args.tokens,
        "rounds": args.rounds,
        "missing_cells": missing,
        "not_installed": absent,
        "prompt_tokens": state["prompt_tokens"],
        "results": peers_cpu_tables.summarise(state["cells"], state["sets"]),
    }
    tables = peers_cpu_tables.tables_of(result)
    print("\n\n".join(tables))
    common.write_result("peers_cpu", result, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
