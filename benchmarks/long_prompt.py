"""What does a long prompt cost those who decode beside it?

N requests decode plainly; then a prompt of many tokens comes. Measured are the times between
tokens of the N while it is read, against those before it came, and the time to its first token; for
each `max_prefill_slowdown`, in turns.

    python -m benchmarks.long_prompt [--decoding 31] [--prompt-len 7936] [--slowdown none 2 4 8]
                                     [--rounds 3] [--write]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks import common
from specdec_ext import LLM, SamplingParams, _core

WARM_STEPS = 24
LASTING = 600  # tokens of those who decode: more than steps in which the prompt is read


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def measure(llm: LLM, decoding: int, prompt_len: int) -> dict[str, float]:
    """Seconds: of steps before and beside the prompt, and to the prompt's first token."""
    engine = llm.engine
    vocab = llm.model.vocab_size
    plain = SamplingParams(max_tokens=LASTING, ignore_eos=True)
    prompts = [[(31 * i + 7 * j) % vocab for j in range(16)] for i in range(decoding)]
    states = [engine.submit(engine.resolve(prompt, plain)) for prompt in prompts]
    before: list[float] = []
    for _ in range(WARM_STEPS):
        begin = time.perf_counter()
        engine.step()
        before.append(time.perf_counter() - begin)
    text = [(17 * j + j * j) % vocab for j in range(prompt_len)]
    came = time.perf_counter()
    late = engine.submit(engine.resolve(text, SamplingParams(max_tokens=1, ignore_eos=True)))
    beside: list[float] = []
    while not late.finished:
        begin = time.perf_counter()
        engine.step()
        beside.append(time.perf_counter() - begin)
    ttft = time.perf_counter() - came
    for state in states:
        engine.cancel(state)
    while engine.step():
        pass
    usual = statistics.median(before[WARM_STEPS // 2 :])
    return {
        "usual_s": usual, "p50_s": quantile(beside, 0.5), "p99_s": quantile(beside, 0.99),
        "max_s": max(beside), "ttft_s": ttft, "steps": len(beside),
        "factor_p50": quantile(beside, 0.5) / usual, "factor_p99": quantile(beside, 0.99) / usual,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--decoding", type=int, default=31)
    parser.add_argument("--prompt-len", type=int, default=7936)
    parser.add_argument("--slowdown", nargs="+", default=["none", "2", "4", "8"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in args.slowdown}
    for _ in range(args.rounds):
        for name in args.slowdown:
            scheduler: dict[str, Any] = {
                "max_batch_size": args.decoding + 1,
                "max_prefill_slowdown": None if name == "none" else float(name),
            }
            pages = {"max_tokens": args.prompt_len + 64 + (LASTING + 64) * args.decoding}
            with LLM(
                speculative_config=None, scheduler_config=scheduler, kv_cache_config=pages
            ) as llm:
                width = common.width_of(llm.model)
                runs[name].append(measure(llm, args.decoding, args.prompt_len))
    rows = []
    for name, found in runs.items():
        middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
        rows.append({"max_prefill_slowdown": name, **middle})
    header = ("limit", "usual step, ms", "p50, ms", "p99, ms", "x p50", "x p99", "first token, s")
    cells = []
    for row in rows:
        times = [f"{1e3 * row[key]:.1f}" for key in ("usual_s", "p50_s", "p99_s")]
        ratios = [f"{row[key]:.2f}" for key in ("factor_p50", "factor_p99", "ttft_s")]
        cells.append((row["max_prefill_slowdown"], *times, *ratios))
    table = common.markdown(header, cells)
    print(table)
    if args.write:
        about = {"environment": common.environment(_core.num_threads()), "arguments": vars(args),
                 "dtype": width}  # fmt: skip
        print(common.write_result("long_prompt", {**about, "rows": rows}, [table]))


if __name__ == "__main__":
    main()
