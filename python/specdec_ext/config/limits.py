"""Limits that are stated before the core is loaded; it has the same (test_public_names.py)."""

from __future__ import annotations

__all__ = [
    "MAX_DRAFT_LEN",
    "MAX_KNOWN_DRAFTS",
    "MAX_OVERLAP_DEPTH",
    "MAX_STEP_TOKENS",
    "MAX_THREADS",
    "MAX_VOCAB_SIZE",
    "MAX_WEIGHED_DRAFTS",
]

# One request verifies at most this many tokens in one step: the last decided token plus its drafts.
MAX_STEP_TOKENS = 128
MAX_DRAFT_LEN = MAX_STEP_TOKENS - 1
# Drafts of a prediction in one step where they are weighed, and where not (of a grammar, too).
MAX_WEIGHED_DRAFTS, MAX_KNOWN_DRAFTS = 64, 16
MAX_OVERLAP_DEPTH = 2
MAX_THREADS = 256  # of the CPU kernels (cpp/base/thread_pool.cc)
# Far above any model that exists; it stops a damaged file before it asks for memory.
MAX_VOCAB_SIZE = 2**24
