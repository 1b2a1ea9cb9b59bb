"""What does a draft by prompt lookup or suffix decoding cost, and does it grow with the history?

Insert one new token and look up a draft of 10, for 32 sequences per call, Python call included, at
histories of 1k to 64k tokens; the same for suffix decoding's tree, one sequence, many tokens per
call; transformers' PromptLookupCandidateGenerator on one sequence. A third of the text repeats
earlier phrases, the rest is random.

    python -m benchmarks.draft_lookup [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

from benchmarks import common

BATCH = 32
DRAFT = 10
SIZE = 3
VOCAB = 32000
LENGTHS = (1024, 4096, 16384, 65536)


def histories(length: int, count: int, extra: int) -> np.ndarray:
    """Returns int32 [count, length + extra]: random text, in which 20 of 60 tokens repeat."""
    rng = np.random.default_rng(length)
    text = rng.integers(0, VOCAB, (count, length + extra), dtype=np.int32)
    for row in text:
        for at in range(200, length + extra - 20, 60):
            source = rng.integers(0, at - 40)
            row[at : at + 20] = row[source : source + 20]
    return text


def measure_ours(length: int, steps: int) -> float:
    """Returns the least seconds per request of 5 passes over `steps` batched calls."""
    from specdec_ext import _core_testing

    text = histories(length, BATCH, 6 * steps)
    batch = _core_testing.NgramBatch(BATCH, length + 6 * steps, SIZE)
    drafts = np.empty((BATCH, DRAFT), np.int32)
    lengths = np.empty(BATCH, np.int32)
    counts = np.full(BATCH, length, np.int32)
    batch.propose(np.ascontiguousarray(text[:, :length]), counts, drafts, lengths)
    counts[:] = 1
    best, at, hits = float("inf"), length, 0
    for _ in range(6):
        columns = [np.ascontiguousarray(text[:, at + i : at + i + 1]) for i in range(steps)]
        started = time.perf_counter()
        for column in columns:
            batch.propose(column, counts, drafts, lengths)
        best = min(best, time.perf_counter() - started)
        hits += int((lengths > 0).sum())
        at += steps
    if hits == 0:
        raise SystemExit("no lookup ever hit: the histories are wrong")
    return best / steps / BATCH


def measure_suffix(length: int, steps: int) -> float:
    """Returns the least seconds per token of 6 calls that append and draft `steps` times each."""
    from specdec_ext import _core_testing

    [text] = histories(length, 1, 6 * steps).tolist()
    index = _core_testing.SuffixIndex(len(text))
    index.extend(text[:length])
    best, drafts = float("inf"), 0
    for at in range(length, len(text), steps):
        tokens = text[at : at + steps]
        started = time.perf_counter()
        drafts += index.replay(tokens, DRAFT)
        best = min(best, time.perf_counter() - started)
    if drafts == 0:
        raise SystemExit("no lookup ever hit: the histories are wrong")
    return best / steps


def measure_peer(length: int, repeats: int) -> float:
    """Returns the least seconds of one lookup by transformers."""
    import torch
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    generator = PromptLookupCandidateGenerator(
        num_output_tokens=DRAFT, max_matching_ngram_size=SIZE, max_length=length + 1000
    )
    text = torch.from_numpy(histories(length, 2, repeats).astype(np.int64))
    best = float("inf")
    for row in (0, 1):
        for i in range(repeats):
            ids = text[row : row + 1, : length + i]
            started = time.perf_counter()
            generator.get_candidates(ids)
            best = min(best, time.perf_counter() - started)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps; no file")
    args = parser.parse_args()
    common.set_threads(1)
    environment = common.environment(1)
    steps, repeats = (20, 5) if args.quick else (200, 50)
    results: dict[str, dict[str, Any]] = {}
    for length in LENGTHS:
        results[str(length)] = {
            "us_per_request": measure_ours(length, steps) * 1e6,
            "suffix_us": measure_suffix(length, 10 * steps) * 1e6,
            "transformers_us": measure_peer(length, repeats) * 1e6,
        }
    table = common.markdown(
        ["history", "us per request (batch 32)", "suffix, us (one text)", "transformers us"],
        [
            [k, r["us_per_request"], r["suffix_us"], r["transformers_us"]]
            for k, r in results.items()
        ],
    )
    print(table)
    if not args.quick:
        result = {
            "benchmark": "draft_lookup",
            "environment": environment,
            "batch": BATCH,
            "draft_length": DRAFT,
            "max_matching_ngram_size": SIZE,
            "results": results,
        }
        common.write_result("draft_lookup", result, [table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
