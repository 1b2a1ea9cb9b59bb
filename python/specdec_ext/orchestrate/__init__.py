"""Speculation as an external loop over LLM.generate: propose, verify in one pass, repeat.

This is TensorRT-LLM's first workflow style; LLM(speculative_config=...) is the in-engine form.
Each iteration is one call of generate for all requests that still run. The prefix cache gives back
the K/V of decided tokens, so the engine needs enable_block_reuse. The tokens equal those of the
in-engine form and of plain decoding. See docs/orchestrate.md.
"""

from __future__ import annotations

from .draft_target import draft_target, stream_draft_target
from .loop import ExternalLoop
from .pool import PromptLookupPool
from .prompt_lookup import prompt_lookup, prompt_lookup_loop, stream_prompt_lookup

__all__ = [
    "ExternalLoop",
    "PromptLookupPool",
    "draft_target",
    "prompt_lookup",
    "prompt_lookup_loop",
    "stream_draft_target",
    "stream_prompt_lookup",
]
