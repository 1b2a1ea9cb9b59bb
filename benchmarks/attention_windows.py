"""What does a window spare: K/V pages that one long text holds, and time per token, by position?

The built-in model reads a prompt of this repository's documents and goes on to --tokens tokens,
with the whole text in view, a window, and a window with prefix reuse; each plain and with prompt
lookup.
Pages are counted after every step.

    python -m benchmarks.attention_windows [--tokens 4096] [--prompt 2048] [--window 256]
                                           [--sinks 4] [--write]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from specdec_ext import LLM, NGramDecodingConfig, SamplingParams

PAGE = 32
TEXTS = ("docs/usage.md", "docs/scheduling.md", "docs/exactness.md")


def measure(llm: LLM, prompt: list[int], count: int) -> dict[str, Any]:
    """Pages held and seconds of one text of `count` tokens more."""
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    state = llm.engine.submit(llm.engine.resolve(prompt, params))
    reading = after = used = 0
    begin = first = time.perf_counter()
    while not state.finished:
        llm.engine.step()
        stats = llm.get_metrics()["executor"]
        used = stats["total_pages"] - stats["free_pages"]
        if not state.token_ids:
            reading, first = max(reading, used), time.perf_counter()
        elif not state.finished:
            after = max(after, used)
    return {
        "pages_while_reading": reading,
        "pages_while_decoding": after,
        "seconds_to_read": first - begin,
        "seconds_per_token": (time.perf_counter() - first) / count,
        "text": state.token_ids,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder (default: the built-in model)")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    args = parser.parse_args()
    common.set_threads(args.threads)
    root = Path(__file__).parents[1]
    windowed = {"max_attention_window": args.window, "sink_token_length": args.sinks}
    caches: dict[str, dict[str, Any]] = {
        "everything": {},
        "window": windowed,
        "window, reuse": {**windowed, "enable_block_reuse": True},
    }
    results = []
    for name, cache in caches.items():
        texts = []
        for method in (None, NGramDecodingConfig(max_draft_len=4)):
            with LLM(
                args.model,
                speculative_config=method,
                device="cpu",
                kv_cache_config={"tokens_per_block": PAGE, "max_tokens": 2 * args.tokens, **cache},
                scheduler_config={"max_batch_size": 1, "max_seq_len": args.tokens},
            ) as llm:
                text = "\n".join((root / file).read_text() for file in TEXTS)
                prompt = [int(i) for i in llm.tokenizer.encode(text)[: args.prompt]]
                found = measure(llm, prompt, args.tokens - len(prompt))
                width = common.width_of(llm.model)
            texts.append(found.pop("text"))
            found["equal_to_plain"] = texts[-1] == texts[0]
            row = {"pages": name, "method": "plain" if method is None else "ngram", **found}
            results.append(row)
            print(row, flush=True)
    header = ("K/V", "method", "pages behind each chunk of the prompt", "while decoding",
              "s to read", "ms per token", "text as plain")  # fmt: skip
    table = common.markdown(
        header,
        [
            (
                r["pages"], r["method"], r["pages_while_reading"], r["pages_while_decoding"],
                f"{r['seconds_to_read']:.1f}", f"{1e3 * r['seconds_per_token']:.1f}",
                "yes" if r["equal_to_plain"] else "no",
            )
            for r in results
        ],
    )  # fmt: skip
    print(f"load {common.load_average()}")
    print(table)
    if args.write:
        about = {"environment": common.environment(args.threads), "arguments": vars(args),
                 "dtype": width}  # fmt: skip
        print(common.write_result("attention_windows", {**about, "rows": results}, [table]))


if __name__ == "__main__":
    main()
