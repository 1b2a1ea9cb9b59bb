"""JSON of 20 schemas: masked decoding with speculation against masked plain decoding.

The default model writes an answer to each task of grammar_tasks.json, greedy and one at a time,
held to the task's schema. Texts have to be identical. Also the time that a grammar takes in a step:
what is cut in front of the pass and the masks behind it, by nodes, and of a chain of 13 nodes by
itself, in strings without and with a maxLength.

    python -m benchmarks.grammar [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks import common

TASKS = Path(__file__).with_name("grammar_tasks.json")
METHODS: dict[str, Any] = {
    "plain": None,
    "suffix": {"method": "suffix"},
    "prompt lookup": {"method": "ngram", "max_draft_len": 10, "max_matching_ngram_size": 2},
}
NODES = 13


def open_engines(walks: dict[int, list[float]]) -> dict[str, Any]:
    """An engine per method; the walks of their trees enter `walks`, by nodes, in seconds."""
    from specdec_ext import LLM

    engines = {
        name: LLM(speculative_config=spec, scheduler_config={"max_seq_len": 1024})
        for name, spec in METHODS.items()
    }
    for llm in engines.values():
        time_walks(llm.engine._grammars, walks)
    return engines


def time_walks(grammars: Any, walks: dict[int, list[float]]) -> None:
    """Has every step's cut and masks timed together; one request at a time."""
    constrain, mask = grammars.constrain, grammars.mask
    begun = [0.0]

    def cut() -> None:
        begin = time.perf_counter()
        constrain()
        begun[0] = time.perf_counter() - begin

    def choose(trees: Any, scores: Any, **how: Any) -> None:
        begin = time.perf_counter()
        mask(trees, scores, **how)
        seconds = begun[0] + time.perf_counter() - begin
        walks[sum(len(tree.tokens) for tree in trees)].append(seconds)

    grammars.constrain, grammars.mask = cut, choose


def decode(llm: Any, tasks: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """All tasks, one after another: tokens, seconds behind the first token, passes, forced."""
    from specdec_ext import SamplingParams

    texts, tokens, seconds, passes, forced, complete = [], 0, 0.0, 0, 0, 0
    for task in tasks:
        params = SamplingParams(max_tokens=max_tokens, structured_outputs={"json": task["schema"]})
        message = [{"role": "user", "content": task["task"] + " Answer as JSON."}]
        [output] = llm.chat([message], params, use_tqdm=False)
        m, choice = output.metrics, output.outputs[0]
        texts.append(list(choice.token_ids))
        complete += choice.finish_reason == "stop"
        tokens += m["num_generated_tokens"] - 1
        seconds += (m["mean_itl_ms"] or 0.0) / 1e3 * (m["num_generated_tokens"] - 1)
        passes += m["num_forward_passes"]
        forced += m["accepted_grammar_tokens"]
    return {
        "texts": texts, "tokens_per_s": tokens / seconds, "tokens": tokens, "passes": passes,
        "forced": forced, "complete": complete,
    }  # fmt: skip


def walk_of_a_chain(llm: Any, longest: int | None, repeats: int) -> dict[str, float]:
    """Milliseconds of cut and masks of a greedy chain of NODES nodes that are all allowed and the
    best tokens (but for what follows the last, which is not); `longest`: characters of a string,
    None: any number."""
    from specdec_ext.engine.grammar_masks import _Output, _TreeWalk
    from specdec_ext.request.structured_outputs import check_structured_outputs

    string = {"type": "string"} if longest is None else {"type": "string", "maxLength": longest}
    properties = {"name": string, "age": {"type": "integer"}, "city": string}
    schema = {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip
    written = '{"name": "Anna Maria Smith", "age": 42, "city": "Lyon"}'
    texts = llm.tokenizer.encode(written, add_special_tokens=False)
    constraint = check_structured_outputs({"json": schema})
    output = _Output(llm.engine._compiler.compile(constraint), True)
    root = 4
    output.follow(texts[:root])

    tokens = texts[root - 1 : root - 1 + NODES]
    tree = SimpleNamespace(tokens=tokens, parents=list(range(-1, NODES - 1)), fixed=1)
    scores = np.zeros((NODES, llm.engine.model.num_scores), dtype=np.float32)
    scores[range(NODES - 1), tokens[1:]] = 1.0
    best = [*tokens[1:], output.grammar.end_ids[0]]  # which the head finds as it writes the scores
    scores[-1, best[-1]] = 1.0  # no text ends there: its node needs a mask
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        kept = _TreeWalk(output, tree).run(fill=False)
        walk = _TreeWalk(output, tree)
        walk.follow_best(scores, best)
        times.append((time.perf_counter() - begin) * 1e3)
        if not all(kept) or (walk.masks[:-1] != -1).any() or (walk.masks[-1] == -1).all():
            raise SystemExit("a draft of the model's own text was cut, or a mask is missing")
    return {"median": statistics.median(times), "min": min(times)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four tasks, one round; no file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    common.set_threads(args.threads)
    environment = common.environment(args.threads)
    tasks = json.loads(TASKS.read_text())[: 4 if args.quick else None]
    walks: dict[int, list[float]] = defaultdict(list)
    engines = open_engines(walks)
    programs = {
        name: lambda llm=llm: decode(llm, tasks, 32 if args.quick else 160)
        for name, llm in engines.items()
    }
    found = common.interleave(programs, 1 if args.quick else args.rounds, "grammar")
    plain = found["plain"]
    rows, results = [], {}
    for name, rounds in found.items():
        if any(r["texts"] != plain[0]["texts"] for r in rounds):
            raise SystemExit(f"{name}: a text differs from masked plain decoding")
        pairs = zip(rounds, plain, strict=True)
        speedup = common.median([r["tokens_per_s"] / p["tokens_per_s"] for r, p in pairs])
        speed = common.spread([r["tokens_per_s"] for r in rounds])
        about = {k: v for k, v in rounds[0].items() if k not in ("texts", "tokens_per_s")}
        results[name] = {**about, "tokens_per_s": speed, "speedup": speedup}
        share = about["tokens"] / about["passes"]
        rows.append([name, speed["median"], speedup, share, about["forced"], about["complete"]])
    chains = {
        f"maxLength {longest}" if longest else "free strings": walk_of_a_chain(
            engines["plain"], longest, 300
        )
        for longest in (None, 20, 40)
    }
    per_step = {
        nodes: {"steps": len(times), "median_ms": statistics.median(times) * 1e3}
        for nodes, times in sorted(walks.items())
    }
    tables = [
        common.markdown(
            ["method", "tokens/s", "of plain", "tokens per pass", "forced", "complete"], rows
        ),
        common.markdown(
            ["nodes in a step", "steps", "ms for cut and masks"],
            [[n, r["steps"], f"{r['median_ms']:.3f}"] for n, r in per_step.items()],
        ),
        common.markdown(
            [f"chain of {NODES} nodes, all allowed", "median ms", "least ms"],
            [[n, f"{c['median']:.3f}", f"{c['min']:.3f}"] for n, c in chains.items()],
        ),
        f"Load of the machine at the start: {environment['load_average_start'][0]} on "
        f"{environment['cores']} cores; others worked on it meanwhile.",
    ]
    print("\n\n".join(tables))
    if not args.quick:
        result = {
            "benchmark": "grammar", "environment": environment,
            "dtype": common.width_of(engines["plain"].model), "results": results,
            "mask_ms_by_nodes": per_step, f"mask_ms_chain_of_{NODES}": chains,
        }  # fmt: skip
        common.write_result("grammar", result, tables)
    for llm in engines.values():
        llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
