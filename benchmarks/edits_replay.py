"""What a prediction is worth beside suffix decoding, by replay at given step times.

The default model's answers to the tasks of code_edit_cases.py are decoded once; the executor then
decodes them again with an oracle that answers what the text says (lookup_replay.py), one behind the
other, and its steps are charged T(rows) of three kinds: measured for whole passes of the default
file and of bfloat16 on an AMD EPYC (Zen 4), and for matrices in bfloat16 with tiles. So drafts are
compared without the noise of a machine. Predictions are the code to be changed, which no answer
begins with, and the answer itself with one token in 25 changed behind the first three. Rows that
are verified with the prompt are charged, too.

    python -m benchmarks.edits_replay [--texts FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.code_edit_cases import code_edits
from benchmarks.lookup_replay import make_executor, replay

# Rows of a pass, milliseconds.
STEP_COSTS = {
    "4 bits": ([1, 4, 7, 11, 16, 32, 64, 128], [3.2, 3.8, 5.5, 8.3, 11.6, 22.6, 45.0, 90.0]),
    "bfloat16": ([1, 4, 7, 11, 16, 32, 64, 128], [9.6, 10.2, 10.7, 11.4, 15.0, 23.5, 47.0, 94.0]),
    "tiles": ([1, 4, 7, 11, 16, 32, 64, 128], [10.1, 11.3, 11.3, 12.3, 12.8, 14.9, 20.8, 36.0]),
}
MAX_TOKENS = 320
# Prompt, answer, code.
Case = tuple[list[int], list[int], list[int]]


def decode(threads: int) -> list[Case]:
    """The cases' tokens."""
    import specdec_ext

    specdec_ext.set_num_threads(threads)
    params = specdec_ext.SamplingParams(max_tokens=MAX_TOKENS)
    cases = []
    with specdec_ext.LLM() as llm:
        for edit in code_edits():
            message = {"role": "user", "content": edit.message}
            [output] = llm.chat([message], params, use_tqdm=False)
            code = llm.tokenizer.encode(edit.source, add_special_tokens=False)
            answer = list(output.outputs[0].token_ids)
            cases.append((list(output.prompt_token_ids), answer, list(code)))
    return cases


def nearly(answer: list[int], seed: int) -> list[int]:
    """The answer with one token in 25 changed, but for the first three."""
    source = random.Random(seed)
    return answer[:3] + [
        t if source.random() > 0.04 else source.randrange(40000) for t in answer[3:]
    ]


def speeds(cases: list[Case], cost: Any, options: dict[str, Any], predictions: Any) -> list[float]:
    """Plain decoding's time over each answer's. All are decoded by one executor, which learns."""
    from specdec_ext import _core

    seconds = _core.StepCost(dict(zip(*cost, strict=True)))
    longest = max(len(prompt) + len(answer) for prompt, answer, _ in cases)
    executor = make_executor(longest, options, cost)
    found = []
    for (prompt, answer, _), prediction in zip(cases, predictions, strict=True):
        beside, steps = replay(executor, (prompt, answer), prediction)
        spent = sum(seconds(rows) for rows in steps)
        spent += seconds(len(prompt) + beside) - seconds(len(prompt))
        found.append((len(answer) - 1) * seconds(1) / spent)
    return found


def main() -> int:
    from specdec_ext import SuffixDecodingConfig
    from specdec_ext.engine.drafting_arguments import drafting_arguments

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=Path, help="JSON of the cases: read it, or write it")
    args = parser.parse_args()
    environment = common.environment(args.threads)
    if args.texts is not None and args.texts.exists():
        cases: list[Case] = json.loads(args.texts.read_text())
    else:
        cases = decode(args.threads)
        if args.texts is not None:
            args.texts.write_text(json.dumps(cases))
    suffix = drafting_arguments(SuffixDecodingConfig())
    nothing: list[list[int]] = [[] for _ in cases]
    kinds = {
        "the code": [code for _, _, code in cases],
        "the answer, nearly": [nearly(answer, i) for i, (_, answer, _) in enumerate(cases)],
    }
    results: dict[str, Any] = {}
    rows: list[list[Any]] = []
    for name, cost in STEP_COSTS.items():
        alone = speeds(cases, cost, suffix, nothing)
        results[name] = {"suffix": alone}
        for kind, predictions in kinds.items():
            with_suffix = speeds(cases, cost, suffix, predictions)
            only = speeds(cases, cost, {}, predictions)
            results[name] |= {f"{kind}, beside suffix": with_suffix, kind: only}
            ratios = [a / b for a, b in zip(with_suffix, alone, strict=True)]
            means = [statistics.geometric_mean(s) for s in (alone, only, with_suffix, ratios)]
            rows.append([name, kind, *means, common.median(ratios), min(ratios)])
    header = ["T(rows)", "prediction", "suffix, of plain", "prediction, of plain",
              "both, of plain", "both, of suffix: mean", "median", "least"]  # fmt: skip
    table = common.markdown(header, rows)
    print(table)
    result = {
        "benchmark": "edits_replay", "environment": environment, "model": "SmolLM2-135M-Instruct",
        "dtype": "q4_1", "step_costs_ms": STEP_COSTS, "cases": len(cases), "results": results,
    }  # fmt: skip
    common.write_result("edits_replay", result, [table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
