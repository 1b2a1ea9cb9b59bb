"""Who waits how long when requests arrive as they please?

A trace of requests (benchmarks.arrivals: Poisson arrivals, lengths of the evaluation sets, a clock
that skips idle time) is replayed at three loads: plain decoding and "auto", each under both
policies, and vLLM's steps on the CPU where it is installed. The pool of K/V is scarce, so that the
policies differ. Reported are tokens per second, p50 and p99 of the time to the first token (from
the arrival) and of the time per token (of a request, behind its first).

A load is a share of the requests per second that plain decoding ends when all of them are there at
once, under guaranteed_no_evict. Texts of "auto" and of every policy must be plain decoding's.

    python -m benchmarks.trace_replay [--requests 2000] [--loads 0.5 0.8 1.1] [--minutes M]
                                      [--programs plain auto vllm] [--policies ...] [--rate R]
    python -m benchmarks.trace_replay --quick

A cell is one program under one policy at one load; it cannot be interrupted. `--minutes` ends a
call in time; the same command goes on with the cells that are missing, at the rate that the first
call has measured (parts.py), and a result file is written when none is. `--programs plain auto`
leaves vLLM out; where it is not installed it is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common, datasets
from benchmarks.arrivals import Served, figures, gaps, replay
from benchmarks.parts import Parts, add_options
from benchmarks.peers.cpu import environments
from specdec_ext import LLM, SamplingParams, _core

POLICIES = ("guaranteed_no_evict", "max_utilization")
PROGRAMS = ("plain", "auto", "vllm")
SEED = 7


def make_prompts(tokenizer: Any, count: int, longest: int) -> list[list[int]]:
    """Token ids, drawn as benchmarks.arrivals says."""
    sets = [
        [ids for _, ids in datasets.load_ids(tokenizer, name, None, longest)]
        for name in datasets.SETS
    ]
    rng = random.Random(f"prompts-{SEED}")
    return [rng.choice(rng.choice(sets)) for _ in range(count)]


class Ours:
    """One engine of this package."""

    def __init__(self, args: argparse.Namespace, program: str, policy: str) -> None:
        self.llm = LLM(
            args.model,
            dtype=args.dtype,
            device="cpu",
            speculative_config=None if program == "plain" else "auto",
            scheduler_config={
                "policy": policy, "max_batch_size": args.batch, "max_seq_len": args.seq_len,
            },
            kv_cache_config={"max_tokens": args.pool},
        )  # fmt: skip
        self.params = SamplingParams(max_tokens=args.max_tokens)
        # Warm: weights are in memory, what is measured while serving begins.
        self.run([[1, 2, 3]] * 4, [0.0] * 4)

    def run(self, prompts: list[list[int]], arrivals: list[float]) -> dict[str, Any]:
        """What replay() returns, and a digest of all texts."""
        engine = self.llm.engine
        running: dict[int, Any] = {}
        texts: list[list[int]] = [[] for _ in prompts]
        before = self.llm.get_metrics()["executor"]

        def submit(index: int) -> None:
            running[index] = engine.submit(engine.resolve(prompts[index], self.params))

        def step() -> list[Served]:
            engine.step()
            ended = []
            for index in [i for i, state in running.items() if state.finished]:
                state = running.pop(index)
                if state.finish_reason == "error":
                    raise RuntimeError(f"request {index}: {state.error}")
                texts[index] = list(state.token_ids)
                timer = state.timer
                ended.append(Served(index, timer.first_token, timer.last_token, len(texts[index])))
            return ended

        found = replay(arrivals, submit, step)
        after = self.llm.get_metrics()["executor"]
        return {
            **found,
            "preemptions": after["preemptions"] - before["preemptions"],
            "texts": hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16],
        }

    def close(self) -> None:
        self.llm.close()


def run_vllm(
    args: argparse.Namespace, prompts: list[list[int]], arrivals: list[float]
) -> dict[str, Any]:
    """The same of vLLM, in its own process and environment."""
    from specdec_ext.models.default import default_model

    trace = {
        "model": str(args.model or default_model()), "dtype": args.dtype, "prompts": prompts,
        "arrivals": arrivals, "max_tokens": args.max_tokens, "max_seq_len": args.seq_len,
        "max_batch_size": args.batch, "pool_tokens": args.pool, "threads": _core.num_threads(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "trace.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(trace))
        runner = Path(environments.__file__).with_name("replay_vllm.py")
        python = environments.python_of("vllm")
        subprocess.run([str(python), str(runner), str(asked), str(answer)], check=True)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def measured_rate(args: argparse.Namespace, prompts: list[list[int]]) -> float:
    """Requests per second of plain decoding when all of them are there."""
    engine = Ours(args, "plain", POLICIES[0])
    some = prompts[: max(3 * args.batch, len(prompts) // 20)]
    found = engine.run(some, [0.0] * len(some))
    engine.close()
    return len(some) / float(found["seconds"])


def cells_of(args: argparse.Namespace) -> list[tuple[str, str, float]]:
    """Program, policy and load of each run; vLLM has one policy, which preempts."""
    cells = []
    for load in args.loads:
        for policy in args.policies:
            cells += [(name, policy, load) for name in args.programs if name != "vllm"]
        if "vllm" in args.programs:
            cells.append(("vllm", "its own", load))
    return cells


def measure(args: argparse.Namespace, prompts: list[list[int]], parts: Parts) -> list[Any]:
    """A row of figures for each cell, in cells_of()'s order; None where there was no time."""
    if parts.get("rate") is None and not parts.begin():
        return [None for _ in cells_of(args)]
    if parts.get("rate") is None:
        parts.put("rate", args.rate or measured_rate(args, prompts))
    rate = float(parts.get("rate"))
    print(f"load 1 is {rate:.3f} requests/s", file=sys.stderr, flush=True)
    times = gaps(args.requests, SEED)
    for program, policy, load in cells_of(args):
        name = f"{program}, {policy}, {load:g}"
        if parts.get(name) is not None:
            continue
        if not parts.begin():
            break
        arrivals = [time / (load * rate) for time in times]
        if program == "vllm":
            found = run_vllm(args, prompts, arrivals)
        else:
            engine = Ours(args, program, policy)
            found = engine.run(prompts, arrivals)
            engine.close()
        extra = {k: found[k] for k in ("preemptions", "texts", "version") if k in found}
        row = {"program": program, "policy": policy, "load": load, "rate": load * rate}
        parts.put(name, {**row, **figures(found), **extra})
        print(f"  {name}: {found['busy_s']:.0f} s", file=sys.stderr, flush=True)
    return [parts.get(f"{program}, {policy}, {load:g}") for program, policy, load in cells_of(args)]


def table_of(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    header = (
        "load", "requests/s", "program", "policy", "tokens/s", "first token p50, s", "p99, s",
        "per token p50, ms", "p99, ms", "preemptions",
    )  # fmt: skip
    cells = [
        (
            f"{row['load']:g}", f"{row['rate']:.2f}", row["program"], row["policy"],
            f"{row['tokens_per_second']:.1f}", f"{row['ttft_p50_s']:.2f}",
            f"{row['ttft_p99_s']:.2f}", f"{1e3 * row['tpot_p50_s']:.1f}",
            f"{1e3 * row['tpot_p99_s']:.1f}", row.get("preemptions", "-"),
        )
        for row in rows
    ]  # fmt: skip
    return common.markdown(header, cells)


def check_texts(rows: list[dict[str, Any]]) -> None:
    """Every program of ours, policy and load gives the same texts."""
    digests = {row["texts"] for row in rows if "texts" in row}
    if len(digests) > 1:
        raise SystemExit("texts differ between programs, policies or loads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.1])
    parser.add_argument("--rate", type=float, help="requests/s of load 1; else it is measured")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--model", help="a folder; else the default model")
    parser.add_argument("--dtype", default="bfloat16", help="of all programs")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--longest-prompt", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pool", type=int, default=4096, help="tokens of K/V")
    parser.add_argument("--quick", action="store_true", help="24 requests, one load; no file")
    add_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.requests, args.loads, args.max_tokens = 24, [0.8], 32
        args.batch, args.pool = 4, 1024
    if "vllm" in args.programs and not environments.is_ready("vllm"):
        print(
            "vLLM is left out: it is not installed "
            "(python -m benchmarks.peers.cpu.environments vllm installs it)",
            file=sys.stderr,
        )
        args.programs = [name for name in args.programs if name != "vllm"]
    args.seq_len = args.longest_prompt + args.max_tokens
    with LLM(args.model, dtype=args.dtype, device="cpu", speculative_config=None) as llm:
        prompts = make_prompts(llm.tokenizer, args.requests, args.longest_prompt)
    trace = {
        name: getattr(args, name)
        for name in ("requests", "dtype", "max_tokens", "longest_prompt", "batch", "pool", "model")
    }
    environment = common.environment(_core.num_threads())
    key = {**trace, "rate": args.rate, "threads": environment["threads"]}
    parts = Parts("trace_replay", key, args.minutes)
    rows = [row for row in measure(args, prompts, parts) if row is not None]
    missing = len(cells_of(args)) - len(rows)
    check_texts(rows)
    if rows:
        print(table_of(rows))
    if missing:
        print(f"{missing} cells are missing: the same command goes on with them")
    elif not args.quick:
        result = {
            "environment": environment, "trace": trace, "rows": rows, "part_loads": parts.loads,
        }  # fmt: skip
        common.write_result("trace_replay", result, [table_of(rows)])


if __name__ == "__main__":
    main()
