"""The tokenizer and the chat template that a GGUF file carries."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .reader import GgufFile

__all__ = ["gguf_tokenizer"]

# What transformers calls the entries that its converter reads.
_ENTRIES = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
    "add_space_prefix": "add_prefix_space",
}
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unk_token_id",
    "pad_token": "pad_token_id",
}


def gguf_tokenizer(path: Path) -> Any:
    """A transformers tokenizer; None for a file without one. Raises ModelError."""
    with GgufFile(path) as file:
        if "tokenizer.ggml.tokens" not in file:
            return None
        entries = {
            ours: file.get(f"tokenizer.ggml.{name}")
            for name, ours in _ENTRIES.items()
            if f"tokenizer.ggml.{name}" in file
        }
        architecture = file.text("general.architecture")
        is_sentencepiece = entries.get("tokenizer_type") == "llama"
        options: dict[str, Any] = {
            "chat_template": file.get("tokenizer.chat_template"),
            "add_bos_token": file.get("tokenizer.ggml.add_bos_token", is_sentencepiece),
            "add_eos_token": file.get("tokenizer.ggml.add_eos_token", False),
        }
    if not is_sentencepiece:
        entries.setdefault("merges", [])  # an empty array is not written
    tokens = entries["tokens"]
    for name, key in _SPECIAL.items():
        token_id = entries.get(key)
        if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < len(tokens)):
            raise ModelError(f"{path}: {key} = {token_id}: the tokenizer has {len(tokens)} tokens")
        options[name] = None if token_id is None else tokens[token_id]
    import transformers

    fast: Any = transformers.PreTrainedTokenizerFast
    try:
        core, more = _converter()(architecture, entries)
        return fast(tokenizer_object=core, **{**options, **more})
    except Exception as error:
        # transformers raises many types for damaged entries; all mean the same to the caller.
        raise ModelError(
            f"{path}: its tokenizer cannot be made ({type(error).__name__}: {error}); "
            "pass tokenizer="
        ) from error


def _converter() -> Any:
    """transformers' function from entries to a tokenizer of the `tokenizers` library."""
    name = "convert_gguf_tokenizer"
    module = import_module("transformers.integrations.ggml")  # its place before transformers 5.23
    if not hasattr(module, name):
        module = import_module("transformers.integrations.gguf")
    return getattr(module, name)
