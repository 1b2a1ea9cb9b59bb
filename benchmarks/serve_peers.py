"""How does the server compare with llama.cpp's on the same file, under AIPerf's load?

Three sides answer the same chats in turn, at every concurrency: this package's server with the
default ("auto"), the same server asked not to speculate, and llama.cpp's, all on the default
model's GGUF file and with the same number of threads. Time to the first token, time per further
token, throughput. AIPerf and its processes share the cores with the server that they measure.

    python -m benchmarks.datasets                              # the prompts
    python -m benchmarks.peers.cpu.environments llama_cpp      # llama.cpp's server; ten minutes
    python3 -m venv build/aiperf && build/aiperf/bin/pip install 'aiperf>=0.13'
    python -m benchmarks.serve_peers --aiperf build/aiperf/bin/aiperf [--concurrency 1 4 16]
        [--prompts 24] [--tokens 64] [--without llama.cpp] [--quick] [--minutes M] [--write]

One concurrency takes a few minutes; `--minutes` ends a call in time, and the same command goes on
with those that are missing. `--without llama.cpp` compares the first two sides alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import common, datasets, serve_tables
from benchmarks.parts import Parts, add_options
from benchmarks.peers.cpu import environments
from benchmarks.serve_tables import AUTO, LLAMA, PLAIN
from specdec_ext.models.default import find_default_gguf

SETS = ("mtbench", "gsm8k", "humaneval")
MAX_PROMPT_CHARS = 1200
CONTEXT = 1024  # tokens of a request


def prompts(count: int) -> list[str]:
    """Different ones, short enough, of all sets in turn."""
    each = [[p.text for p in datasets.load(name) if len(p.text) <= MAX_PROMPT_CHARS]
            for name in SETS]  # fmt: skip
    mixed = [text for row in zip(*each, strict=False) for text in row]
    if len(mixed) < count:
        raise SystemExit(f"--prompts {count}: the sets have {len(mixed)}; ask for fewer")
    return mixed[:count]


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@contextmanager
def running(name: str, command: Sequence[str], port: int, ready: str, log: Path) -> Iterator[str]:
    """A server's address while its process runs. Raises SystemExit if it does not come up."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{name} ended at its start:\n{log.read_text()[-2000:]}")
            try:
                urllib.request.urlopen(url + ready).close()
                break
            except OSError:  # not yet, or not ready
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def servers(
    stack: ExitStack, batch: int, threads: int, folder: Path, sides: Sequence[str]
) -> dict[str, str]:
    """Sides by their addresses, ours first; plain decoding has none of its own."""
    port = free_port()
    ours = [sys.executable, "-m", "specdec_ext", "serve", "--port", str(port), "--max-batch-size",
            str(batch), "--max-seq-len", str(CONTEXT), "--threads", str(threads),
            "--no-enable-prefix-caching"]  # fmt: skip
    first = running("specdec serve", ours, port, "/ready", folder / "ours.log")
    found = {stack.enter_context(first): AUTO, PLAIN: PLAIN}
    if LLAMA in sides:
        port = free_port()
        # Both without their caches: every side gets the same prompts several times.
        llama = [str(environments.tool("llama-server")), "-m", str(find_default_gguf()), "--host",
                 "127.0.0.1", "--port", str(port), "-t", str(threads), "-np", str(batch), "-c",
                 str(batch * CONTEXT), "--no-cache-prompt", "--cache-ram", "0"]  # fmt: skip
        second = running("llama-server", llama, port, "/health", folder / "llama.log")
        found[stack.enter_context(second)] = LLAMA
    return found


def measure(
    args: argparse.Namespace, folder: Path, parts: Parts, sides: Sequence[str]
) -> list[dict[str, Any]]:
    """Reports of `specdec bench serve`, one per concurrency, with the sides by their names; those
    that there was time for."""
    texts = folder / "prompts.jsonl"
    lines = (json.dumps({"prompt": text}) for text in prompts(args.prompts))
    texts.write_text("\n".join(lines) + "\n")
    if missing := [count for count in args.concurrency if parts.get(str(count)) is None]:
        with ExitStack() as stack:
            batch = max(args.concurrency)
            addresses = servers(stack, batch, args.threads, folder, sides)
            ours, *others = addresses
            names = {address.rpartition("://")[2]: side for address, side in addresses.items()}
            report = folder / "report.json"
            for count in missing:
                if not parts.begin():
                    break
                command = [
                    sys.executable, "-m", "specdec_ext", "bench", "serve", "--url", ours,
                    "--compare", *others, "--chat", "--input-file", str(texts), "--concurrency",
                    str(count), "--num-prompts", str(args.prompts), "--output-len",
                    str(args.tokens), "--tool-path", args.aiperf, "--output-json", str(report),
                ]  # fmt: skip
                report.unlink(missing_ok=True)
                done = subprocess.run(command, stdout=subprocess.DEVNULL)
                if done.returncode and not report.exists():  # 1 with one: requests failed
                    raise SystemExit(done.returncode)
                found = json.loads(report.read_text())
                for row in found["rows"]:
                    row["server"] = names[row["server"]]
                    del row["ttfts_ms"], row["tpots_ms"]
                with urllib.request.urlopen(ours + "/v1/models") as card:
                    found["dtype"] = json.load(card)["data"][0]["dtype"]
                parts.put(str(count), found)
    return [found for count in args.concurrency if (found := parts.get(str(count))) is not None]


def llama_version() -> str:
    program = environments.tool("llama-server")
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True)
    return next(iter((done.stdout + done.stderr).splitlines()), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=24, help="at every concurrency")
    parser.add_argument("--tokens", type=int, default=64, help="of every answer")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--aiperf", default="aiperf", help="its program")
    parser.add_argument("--without", choices=[LLAMA], help="a side that is left out")
    parser.add_argument("--quick", action="store_true", help="a try: few requests, no figures")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    add_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.concurrency, args.prompts, args.tokens = [1, 4], 6, 8
    sides = [side for side in (AUTO, PLAIN, LLAMA) if side != args.without]
    beside = str(Path(sys.executable).parent)
    args.aiperf = shutil.which(args.aiperf) or shutil.which(args.aiperf, path=beside)
    if args.aiperf is None:
        raise SystemExit("AIPerf is not here: pip install 'specdec_ext[bench]', or --aiperf FILE")
    if LLAMA in sides and not environments.is_ready("llama_cpp"):
        raise SystemExit("llama.cpp's server is not here; run: python -m benchmarks.peers.cpu."
                         f"environments llama_cpp (or --without {LLAMA})")  # fmt: skip
    settings = {name: getattr(args, name) for name in ("prompts", "tokens", "threads")}
    # Our server holds as many requests as the most at a time, llama.cpp's divides its memory so.
    parts = Parts("serve_peers", {**settings, "batch": max(args.concurrency), "sides": sides},
                  args.minutes)  # fmt: skip
    about: dict[str, Any] = {"environment": common.environment(args.threads),
                             "llama_server": None, "arguments": vars(args)}  # fmt: skip
    if LLAMA in sides:
        about["llama_server"] = llama_version()
        about["llama_model"] = Path(str(find_default_gguf())).name
    with tempfile.TemporaryDirectory() as folder:
        reports = measure(args, Path(folder), parts, sides)
    rows = [row for report in reports for row in report["rows"]]
    if rows:
        print(serve_tables.peers(rows))
    failed = sum(report["failed_requests"] for report in reports)
    print("failed requests:", failed, "loads:", parts.loads)
    for row in rows:
        if row["errors"]:
            print(f"{row['server']}, {row['concurrency']} at a time: {row['errors']}")
    if len(reports) < len(args.concurrency):
        print(f"{len(reports)} of {len(args.concurrency)} concurrencies are measured; "
              "the same command goes on")  # fmt: skip
    elif args.write:
        workload = {**reports[0]["workload"], "concurrency": args.concurrency}
        result = {"benchmark": "serve_peers", **about, "dtype": reports[0]["dtype"],
                  "tool": reports[0]["tool"], "workload": workload, "failed_requests": failed,
                  "rows": rows}  # fmt: skip
        print(common.write_result("serve_peers", result, [serve_tables.peers(rows)]))


if __name__ == "__main__":
    main()
