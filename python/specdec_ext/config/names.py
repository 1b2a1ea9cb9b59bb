"""How vLLM, SGLang and TensorRT-LLM spell methods and fields, and what they are called here.

Source: vllm/config/speculative.py, sglang server arguments, tensorrt_llm llm_args.
"""

from __future__ import annotations

import difflib

from ..errors import ConfigError, UnsupportedConfigError
from .validate import show

__all__ = [
    "DISCRIMINATORS",
    "KV_ALIASES",
    "LOOKAHEAD_ALIASES",
    "NGRAM_ALIASES",
    "OFF_VALUES",
    "SCHEDULER_ALIASES",
    "UNSUPPORTED_KEYS",
    "canonical_method",
]

DISCRIMINATORS = (
    "method", "decoding_type", "speculative_algorithm", "spec_method",
    "speculative_decoding_mode", "spec_type",
)  # fmt: skip

_METHODS = {
    "lookahead": "lookahead",
    "lookahead_decoding": "lookahead",
    "ngram": "ngram",
    "[ngram]": "ngram",  # old vLLM: speculative_model="[ngram]"
    "ngram_simple": "ngram",
    "prompt_lookup": "ngram",
    "prompt_lookup_decoding": "ngram",
    "suffix": "suffix",
    "suffix_decoding": "suffix",
    "auto": "auto",
    "composite": "composite",  # several sources
    "none": "none",
    "user_provided": "user_provided",
    "medusa": "medusa",
    "redrafter": "redrafter",
    "recurrent_drafting": "redrafter",
    "explicit_draft_tokens": "redrafter",  # TensorRT-LLM's name of the mode
    "eagle3": "eagle3",
    "draft_eagle3": "eagle3",
    "draft_target": "draft_target",
    "draft_target_model": "draft_target",
    "draft_tokens_external": "draft_target",
    "draft_model": "draft_target",
    "draft_simple": "draft_target",
    "standalone": "draft_target",
}
# What a refusal advises. A user's own drafter has no name: it is an object (UserDrafterConfig).
_UNNAMED = {"none", "user_provided", "composite"}  # a composite is a list
_CHOICES = ", ".join(repr(m) for m in sorted({*_METHODS.values()} - _UNNAMED))
_CHOICES += " or 'none' (plain decoding)"
_OTHER_METHODS = {
    "eagle", "mtp",
    "sa", "pard", "dflash", "dspark", "ngram_gpu", "nextn",
}  # fmt: skip

LOOKAHEAD_ALIASES = {
    "w": "max_window_size",
    "window": "max_window_size",
    "window_size": "max_window_size",
    "lookahead_window_size": "max_window_size",
    "n": "max_ngram_size",
    "level": "max_ngram_size",
    "ngram_size": "max_ngram_size",
    "lookahead_ngram_size": "max_ngram_size",
    "g": "max_verification_set_size",
    "guess_set_size": "max_verification_set_size",
    "verification_set_size": "max_verification_set_size",
    "lookahead_verification_set_size": "max_verification_set_size",
}
NGRAM_ALIASES = {
    "k": "max_draft_len",
    "prompt_lookup_num_tokens": "max_draft_len",
    "num_speculative_tokens": "max_draft_len",
    "spec_tokens": "max_draft_len",
    "num_draft_tokens": "max_draft_len",
    "spec_decode_nextn": "max_draft_len",
    "max_total_draft_tokens": "max_draft_len",
    "m": "max_matching_ngram_size",
    "prompt_lookup_max": "max_matching_ngram_size",
    "speculative_ngram_max_match_window_size": "max_matching_ngram_size",
}
KV_ALIASES = {
    "block_size": "tokens_per_block",
    "page_size": "tokens_per_block",
    "max_tokens_in_paged_kv_cache": "max_tokens",
    "kv_cache_free_gpu_memory_fraction": "free_gpu_memory_fraction",
    "enable_prefix_caching": "enable_block_reuse",
    "kv_cache_enable_block_reuse": "enable_block_reuse",
    "kv_cache_dtype": "dtype",
    "max_attention_window_size": "max_attention_window",
    "max_attention_window_vec": "max_attention_window",
    "kv_host_cache_bytes": "host_cache_size",
}
SCHEDULER_ALIASES = {
    "max_num_seqs": "max_batch_size",
    "max_running_requests": "max_batch_size",
    "max_model_len": "max_seq_len",
    "context_length": "max_seq_len",
    "max_num_batched_tokens": "max_num_tokens",
    "capacity_scheduler_policy": "policy",
    "enable_chunked_context": "enable_chunked_prefill",
}
# Acceptance gates and drafter placement: features that other projects have and this one has not.
# None means "off" for all of them and is accepted.
UNSUPPORTED_KEYS = {
    "num_speculative_tokens_per_batch_size",
    "acceptance_rate_window_size", "acceptance_rate_threshold", "acceptance_window",
    "acceptance_length_threshold", "draft_tensor_parallel_size", "speculative_model",
    "speculative_model_dir", "speculative_draft_model_path", "speculative_draft_model", "model",
    "quantization", "use_rejection_sampling",
}  # fmt: skip
OFF_VALUES: tuple[object, ...] = (None, False, 0, 0.0)


def canonical_method(value: object, field: str = "method") -> str:
    """The canonical name of a method ("none": plain decoding) for any project's spelling.

    Raises UnsupportedConfigError for a known method that this version does not have, ConfigError
    for anything else.
    """
    if value is None:
        return "none"
    if not isinstance(value, str):
        raise ConfigError(
            f"{field} = {show(value)}: expected the name of a method, got {type(value).__name__}; "
            f"use {_CHOICES}"
        )
    name = value.strip().lower().replace("-", "_")
    if name in _METHODS:
        return _METHODS[name]
    if name in _OTHER_METHODS:
        raise UnsupportedConfigError(
            f"{field} = {value!r}: this version does not have this method; use {_CHOICES}"
        )
    near = difflib.get_close_matches(name, _METHODS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"use {_CHOICES}"
    raise ConfigError(f"{field} = {value!r}: there is no such method; {hint}")
