"""What do K and V in 8 bits cost and bring: bytes, step times by context, perplexity, greedy text?

The built-in model with pages of its own type, fp8 and int8, each loaded once; steps of the three
take turns. Perplexity is that of this repository's documents, in windows of 2048 tokens.

    python -m benchmarks.kv_types [--context 256 4096] [--rows 1 8] [--rounds 40]
                                  [--quantization int4] [--write]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.text_scores import (
    CHUNK,
    PAGE,
    WINDOW,
    document_tokens,
    log_softmax,
    plan,
    scores_of,
)  # fmt: skip
from specdec_ext import LLM, SamplingParams
from specdec_ext.config.engine import pages_for
from specdec_ext.engine.kv_pages import KvPages
from specdec_ext.models import load_model
from specdec_ext.models.default import default_model
from specdec_ext.models.kv_storage import stored_name, token_bytes
from specdec_ext.models.place import CPU
from specdec_ext.text.tokenizer import load_tokenizer

KINDS = ("auto", "fp8", "int8")
QUESTIONS = (
    "Explain how rainbows form.", "Write a Python function that sorts a list of words by length.",
    "What is the capital of Norway, and what is it known for?", "Summarize the plot of Hamlet.",
    "Give me a recipe for pancakes.", "Why is the sky blue?", "Describe the water cycle.",
    "Write a short poem about the sea.", "How does a bicycle stay upright?",
    "List the planets of the solar system in order.",
)  # fmt: skip


def fill(model: Any, tokens: list[int]) -> None:
    """The K/V of a text, in pieces."""
    for first in range(0, len(tokens), CHUNK):
        model.forward(plan(tokens[first : first + CHUNK], first, needs_logits=False))


def step_seconds(model: Any, rows: int, context: int) -> float:
    step = plan([5] * rows, context, needs_logits=False)
    begin = time.perf_counter()
    model.forward(step)
    return time.perf_counter() - begin


def log_loss(model: Any, tokens: list[int]) -> float:
    """Mean of -ln p over the tokens of whole windows, but for each window's first."""
    losses = [
        -log_softmax(scores)[np.arange(len(following)), following]
        for scores, following in scores_of(model, tokens)
    ]
    return float(np.concatenate(losses).mean())


def greedy(kind: str, quantization: str | None) -> list[list[int]]:
    with LLM(
        default_model(), dtype="bfloat16" if quantization is None else "auto",
        quantization=quantization, speculative_config=None,
        kv_cache_config={"dtype": kind, "max_tokens": 4096},
    ) as llm:  # fmt: skip
        messages: Any = [[{"role": "user", "content": text}] for text in QUESTIONS]
        outputs = llm.chat(messages, SamplingParams(max_tokens=64), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def agreement(expected: list[list[int]], found: list[list[int]]) -> tuple[int, float]:
    """Equal texts, and the mean share of a text in front of the first difference."""
    same = [a == b for a, b in zip(expected, found, strict=True)]
    shares = []
    for a, b in zip(expected, found, strict=True):
        common_length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                             min(len(a), len(b)))  # fmt: skip
        shares.append(common_length / max(len(a), 1))
    return sum(same), float(np.mean(shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--context", nargs="+", type=int, default=[256, 4096])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    args = parser.parse_args()
    common.set_threads(args.threads)
    width: dict[str, Any] = {"dtype": "bfloat16"}
    if args.quantization is not None:
        width = {"quantization": args.quantization}
    tokenizer: Any = load_tokenizer(None, default_model())
    tokens = document_tokens(tokenizer)
    room = max(*args.context, WINDOW) + max(*args.rows, CHUNK)
    models = {}
    for kind in KINDS:
        models[kind] = load_model(default_model(), max_rows=CHUNK, kv_cache_dtype=kind, **width)
        pages = KvPages(models[kind], pages_for(room, PAGE), PAGE, CPU)
        models[kind].bind_cache(*pages.tensors)
    losses = {kind: log_loss(model, tokens) for kind, model in models.items()}
    for model in models.values():
        fill(model, tokens[: max(args.context)])
    times: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(args.rounds):
        for context in args.context:
            for rows in args.rows:
                for kind, model in models.items():
                    found = times.setdefault((kind, context, rows), [])
                    found.append(step_seconds(model, rows, context))
    texts = {kind: greedy(kind, args.quantization) for kind in KINDS}
    cells, rows_of = [], []
    for kind, model in models.items():
        stored = str(stored_name(model))
        same, share = agreement(texts["auto"], texts[kind])
        row = {
            "kind": kind, "stored": stored, "bytes_per_token": token_bytes(model, stored),
            "perplexity": float(np.exp(losses[kind])), "equal_texts": same, "equal_share": share,
            "times": [
                {"context": c, "rows": r, **common.spread(times[kind, c, r])}
                for c in args.context for r in args.rows
            ],
        }  # fmt: skip
        rows_of.append(row)
        medians = [
            f"{1e3 * common.median(times[kind, c, r]):.2f} "
            f"({common.median(times['auto', c, r]) / common.median(times[kind, c, r]):.2f}x)"
            for c in args.context
            for r in args.rows
        ]
        cells.append((stored, row["bytes_per_token"], *medians, f"{row['perplexity']:.3f}",
                      f"{same}/{len(QUESTIONS)}, {share:.2f}"))  # fmt: skip
    steps = [f"{r} rows at {c}, ms" for c in args.context for r in args.rows]
    header = ("K/V", "bytes a token", *steps, "perplexity", "texts as auto's")
    table = common.markdown(header, cells)
    print(f"{models['auto'].info.dtype} weights, load {common.load_average()}")
    print(table)
    if args.write:
        about = {"environment": common.environment(args.threads), "arguments": vars(args),
                 "dtype": common.width_of(models["auto"])}  # fmt: skip
        print(common.write_result("kv_types", {**about, "rows": rows_of}, [table]))


if __name__ == "__main__":
    main()
