"""What every worker does with its engine. Standard library alone: it runs in the peers' Pythons.

A worker is a fresh process: it reads a job (JSON) from stdin and writes what it measured to stdout.
An engine is a class:

    Engine(job)                          loads job["model"], ready to generate
    version                              of the peer
    generate(ids, max_tokens) -> ids     greedy, ends where the model ends its answer
    generate_batch(prompts, max_tokens) -> list of ids, or None where the peer has no batches
    pids                                 processes whose memory counts (default: this one)
    close()
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

FAST = "fast_"  # in front of a method of ours: with numerics="fast"


def now() -> float:
    """Seconds on a clock that all processes share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def resident_mb(pids: list[int]) -> float:
    """Resident memory of the processes together."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            total += next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))
    return total / 1024


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and what it returned."""
    started = now()
    result = call()
    return now() - started, result


def measure(engine_class: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Everything that one cell of the benchmark records about one engine.

    first_token_s  from the start of the process to the first token of a short prompt
    prompt_s       per prompt: one token, which is the time of its prompt
    total_s        per prompt: the whole answer, prompt included
    prefill_s      of job["prefill"], three times
    """
    begun = now()
    engine = engine_class(job)
    loaded = now()
    engine.generate(job["short"], 1)
    first = now()
    engine.generate(job["short"], 16)  # what is calibrated or compiled late
    prompt_s, total_s, tokens = [], [], []
    for ids in job["prompts"]:
        prompt_s.append(timed(lambda ids=ids: engine.generate(ids, 1))[0])
        seconds, answer = timed(lambda ids=ids: engine.generate(ids, job["max_tokens"]))
        total_s.append(seconds)
        tokens.append([int(i) for i in answer])
    resident = resident_mb(getattr(engine, "pids", [os.getpid()]))
    prefill_s = [timed(lambda: engine.generate(job["prefill"], 1))[0] for _ in range(3)]
    result = {
        "version": engine.version,
        "load_s": loaded - begun,
        "first_token_s": first - job["started"],
        "rss_mb": resident,
        "prompt_s": prompt_s,
        "total_s": total_s,
        "tokens": tokens,
        "prefill_s": prefill_s,
    }
    if job["batch"]:
        engine.generate_batch(job["batch"][:2], 4)
        seconds, answers = timed(lambda: engine.generate_batch(job["batch"], job["batch_tokens"]))
        if answers is not None:
            result["batch_s"] = seconds
            result["batch_tokens"] = sum(len(answer) for answer in answers)
    engine.close()
    return result


def serve(engine_class: Any) -> None:
    """The main function of a worker. Peers may print what they like: it goes to stderr."""
    job = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)
    result = measure(engine_class, job)
    with os.fdopen(out, "w") as file:
        json.dump(result, file)
