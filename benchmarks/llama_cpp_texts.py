"""Does the same GGUF file say the same here as in llama.cpp?

Greedy texts of 20 prompts, four of each set, plain decoding in both. Where a text differs, it does
at one token first: both programs have read the same up to there, and each has its own best token.
Near-tie: in either program's scores its own choice is ahead of the other's by no more than the two
programs differ in their log-probabilities elsewhere. A greater difference would be a mistake in one
of them, not rounding.

Differences are those of log-probabilities of the tokens that are among the ten best in both, at all
places up to the first difference.

    python -m benchmarks.peers.cpu.environments llama_cpp    # once
    python -m benchmarks.llama_cpp_texts
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from benchmarks import common, datasets, runners
from benchmarks.peers.cpu import environments
from benchmarks.peers.cpu.run_llama_cpp import Server

PROMPTS, TOKENS, BEST = 4, 64, 10
MAX_PROMPT = 1200


def make_prompts(threads: int) -> list[tuple[str, list[int]]]:
    _, tokenizer = runners.default_model(threads)
    return [
        (name, ids)
        for name in datasets.SETS
        for _, ids in datasets.load_ids(tokenizer, name, PROMPTS, MAX_PROMPT)
    ]


def theirs_of(width: str, prompts: list[list[int]], threads: int) -> list[list[dict[int, float]]]:
    """For each prompt and place the ten best tokens and their log-probabilities, the chosen one
    first."""
    job = {"model": str(environments.gguf(width)), "threads": threads, "method": "plain"}
    server = Server(job, 1)
    try:
        return [server.scored(ids, TOKENS, BEST) for ids in prompts]
    finally:
        server.close()


def ours_of(
    width: str, prompts: list[list[int]], theirs: list[list[dict[int, float]]]
) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Our greedy text of each prompt, and our scores along llama.cpp's text."""
    from specdec_ext import LLM, SamplingParams

    with LLM(environments.gguf(width), speculative_config=None) as llm:
        greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0, detokenize=False)
        inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        texts = llm.generate(inputs, greedy, use_tqdm=False)
        scored = SamplingParams(max_tokens=1, prompt_logprobs=BEST, detokenize=False)
        found = []
        for ids, places, text in zip(prompts, theirs, texts, strict=True):
            whole = [*ids, *(next(iter(place)) for place in places)]
            [output] = llm.generate([{"prompt_token_ids": whole}], scored, use_tqdm=False)
            along = output.prompt_logprobs[len(ids) :]
            scores = [{token: x.logprob for token, x in place.items()} for place in along]
            found.append((list(text.outputs[0].token_ids), scores))
        return found


def compare(
    text: list[int], scores: list[dict[int, float]], theirs: list[dict[int, float]]
) -> dict[str, Any]:
    """One prompt: the differences, and what happened at the first token that is not the same."""
    their_text = [next(iter(place)) for place in theirs]
    same = next((i for i, (a, b) in enumerate(zip(text, their_text, strict=False)) if a != b), None)
    if same is None and len(text) != len(their_text):
        same = min(len(text), len(their_text))
    read = len(their_text) if same is None else min(same + 1, len(scores), len(theirs))
    differences = [
        abs(scores[i][token] - logprob)
        for i in range(read)
        for token, logprob in theirs[i].items()
        if token in scores[i]
    ]
    found: dict[str, Any] = {"tokens": len(text), "differences": differences, "first": same}
    if same is not None and same < len(text) and same < len(their_text):
        ours, other = text[same], their_text[same]
        least_ours, least_theirs = min(scores[same].values()), min(theirs[same].values())
        # A token that is not among the ten best is at most as good as the tenth.
        found["ours_ahead"] = scores[same][ours] - scores[same].get(other, least_ours)
        found["theirs_ahead"] = theirs[same][other] - theirs[same].get(ours, least_theirs)
    return found


def summarise(found: list[dict[str, Any]]) -> dict[str, Any]:
    differences = sorted(x for one in found for x in one["differences"])
    noise = differences[-1]
    apart = [one for one in found if one["first"] is not None]
    ties = [
        one for one in apart
        if "ours_ahead" in one and -1e-6 <= one["ours_ahead"] <= noise
        and -1e-6 <= one["theirs_ahead"] <= noise
    ]  # fmt: skip
    return {
        "prompts": len(found),
        "same_text": len(found) - len(apart),
        "near_ties": len(ties),
        "neither": len(apart) - len(ties),
        "median_difference": differences[len(differences) // 2],
        "largest_difference": noise,
        "largest_lead": max((max(x["ours_ahead"], x["theirs_ahead"]) for x in ties), default=0.0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", nargs="+", default=["Q8_0", "Q4_1"])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    os.environ["LLAMA_SERVER"] = str(environments.tool("llama-server"))
    prompts = make_prompts(args.threads)
    result: dict[str, Any] = {
        "benchmark": "llama_cpp_texts",
        "environment": common.environment(args.threads),
        "llama_cpp": environments.version_of("llama_cpp"),
        "tokens": TOKENS,
        "widths": {},
    }
    rows = []
    for width in args.widths:
        ids = [prompt for _, prompt in prompts]
        theirs = theirs_of(width, ids, args.threads)
        ours = ours_of(width, ids, theirs)
        found = [compare(*one, other) for one, other in zip(ours, theirs, strict=True)]
        summary = summarise(found)
        for one in found:
            one["largest_difference"] = max(one.pop("differences"))
        result["widths"][width] = {**summary, "each": found}
        rows.append([width, *summary.values()])
    header = ["width", "prompts", "same text", "near-ties", "neither", "median difference, nats",
              "largest", "largest lead of a choice"]  # fmt: skip
    table = common.markdown(header, rows)
    print(table)
    common.write_result("llama_cpp_texts", result, [table])
    return 0 if all(x["neither"] == 0 for x in result["widths"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
