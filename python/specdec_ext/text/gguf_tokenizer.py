"""The tokenizer and the chat template that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..gguf.reader import GgufFile
from .byte_level import byte_level_tokenizer
from .file_tokenizer import NO_LIMIT, FileTokenizer

__all__ = ["gguf_tokenizer"]

# What transformers calls the entries that its converter reads, and what each may be.
_ENTRIES: dict[str, tuple[str, Callable[[GgufFile, str], Any]]] = {
    "model": ("tokenizer_type", GgufFile.text),
    "pre": ("pre_tokenizer_type", GgufFile.text),
    "tokens": ("tokens", partial(GgufFile.array, kind=str, what="texts")),
    "scores": ("scores", partial(GgufFile.array, kind=(int, float), what="numbers")),
    "token_type": ("token_type", partial(GgufFile.array, kind=int, what="whole numbers")),
    "merges": ("merges", partial(GgufFile.array, kind=str, what="texts")),
    "bos_token_id": ("bos_token_id", GgufFile.token_id),
    "eos_token_id": ("eos_token_id", GgufFile.token_id),
    "unknown_token_id": ("unk_token_id", GgufFile.token_id),
    "padding_token_id": ("pad_token_id", GgufFile.token_id),
    "add_space_prefix": ("add_prefix_space", partial(GgufFile.flag, default=True)),
}
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unk_token_id",
    "pad_token": "pad_token_id",
}


def gguf_tokenizer(path: Path) -> Any:
    """With the calls of a transformers tokenizer; None for a file without one. Raises ModelError.

    Byte-level BPE is read without transformers, which takes three seconds to import.
    """
    with GgufFile(path) as file:
        if "tokenizer.ggml.tokens" not in file:
            return None
        entries = {
            ours: read(file, f"tokenizer.ggml.{name}")
            for name, (ours, read) in _ENTRIES.items()
            if f"tokenizer.ggml.{name}" in file
        }
        architecture = file.text("general.architecture")
        is_sentencepiece = entries.get("tokenizer_type") == "llama"
        template = "tokenizer.chat_template"
        options: dict[str, Any] = {
            "chat_template": file.text(template) if template in file else None,
            "add_bos_token": file.flag("tokenizer.ggml.add_bos_token", is_sentencepiece),
            "add_eos_token": file.flag("tokenizer.ggml.add_eos_token", False),
        }
    if not is_sentencepiece:
        entries.setdefault("merges", [])  # an empty array is not written
    tokens = entries["tokens"]
    for name, key in _SPECIAL.items():
        token_id = entries.get(key)
        if token_id is not None and token_id >= len(tokens):
            raise ModelError(f"{path}: {key} = {token_id}: the tokenizer has {len(tokens)} tokens")
        options[name] = None if token_id is None else tokens[token_id]
    try:
        return _byte_level(path, entries, options) or _of_transformers(
            architecture, entries, options
        )
    except Exception as error:
        # The libraries raise many types for damaged entries; all mean the same to the caller.
        raise ModelError(
            f"{path}: its tokenizer cannot be made ({type(error).__name__}: {error}); "
            "pass tokenizer="
        ) from error


def _byte_level(path: Path, entries: dict[str, Any], options: dict[str, Any]) -> Any:
    """None: of another kind."""
    ends = {
        end: entries.get(f"{end}_token_id") if options[f"add_{end}_token"] else None
        for end in ("bos", "eos")
    }
    core = byte_level_tokenizer(entries, ends)
    if core is None:
        return None
    special = {name: options[name] for name in _SPECIAL if options[name] is not None}
    core.add_special_tokens([*special.values()])

    def whole() -> Any:
        import transformers

        fast: Any = transformers.PreTrainedTokenizerFast
        return fast(tokenizer_object=core, chat_template=options["chat_template"], **special)

    return FileTokenizer(
        path, core, special, chat_template=options["chat_template"], model_max_length=NO_LIMIT,
        whole=whole,
    )  # fmt: skip


def _of_transformers(architecture: str, entries: dict[str, Any], options: dict[str, Any]) -> Any:
    import transformers

    fast: Any = transformers.PreTrainedTokenizerFast
    core, more = _converter()(architecture, entries)
    return fast(tokenizer_object=core, **{**options, **more})


def _converter() -> Any:
    """transformers' function from entries to a tokenizer of the `tokenizers` library."""
    name = "convert_gguf_tokenizer"
    module = import_module("transformers.integrations.ggml")  # its place before transformers 5.23
    if not hasattr(module, name):
        module = import_module("transformers.integrations.gguf")
    return getattr(module, name)
