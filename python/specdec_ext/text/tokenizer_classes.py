"""Which class transformers reads a folder's tokenizer with, and whether tokenizer.json says the
same as that class.

transformers 5 takes only the vocabulary, the merges and the post-processor out of tokenizer.json
for classes of its own, and splits and joins text as the class does; version 4 takes the whole file.
Where the two say the same, the file decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

__all__ = ["PLAIN", "agrees", "class_of", "default_tokens"]

PLAIN = ""  # a class that takes tokenizer.json as it is
_PLAIN_NAMES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# model_type -> the class that is registered for it, of models whose tokenizers are known here.
_REGISTERED = {
    None: None, "llama": None, "smollm3": None, "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer", "gemma2": "GemmaTokenizer", "gemma3_text": "GemmaTokenizer",
}  # fmt: skip
# Models whose registered class is taken whatever their folder says.
_NOT_AS_STATED = ("qwen2",)
_OTHERS_NOT_AS_STATED = ("qwen3_5", "qwen4_exp", "hyperclovax_vision", "siglip2")
_MISTRAL = ("mistral", "ministral", "voxtral", "pixtral")
_SPACE = "\u2581"
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Parts:
    """What a class makes beside the vocabulary and the merges."""

    normalizer: Any
    pre_tokenizer: Any
    decoder: Any
    byte_fallback: bool = False
    fuse_unk: bool = False
    unk_token: str | None = None


@dataclass(frozen=True)
class _TokenizerClass:
    """make     the parts, of tokenizer_config.json and the unknown token
    tokens   names of special tokens that a folder may leave out, and what they are then
    re_adds  special tokens are added once more, as plain ones
    """

    make: Callable[[Mapping[str, Any], str | None], _Parts]
    tokens: dict[str, str] = field(default_factory=dict)
    re_adds: bool = False


def _qwen2(config: Mapping[str, Any], unk_token: str | None) -> _Parts:
    words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated", invert=False)
    prefix = bool(config.get("add_prefix_space"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    return _Parts(
        normalizers.NFC(), pre_tokenizers.Sequence([words, level]), decoders.ByteLevel()
    )  # fmt: skip


def _gpt2(config: Mapping[str, Any], unk_token: str | None) -> _Parts:
    prefix = bool(config.get("add_prefix_space"))
    return _Parts(None, pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel())


def _llama(config: Mapping[str, Any], unk_token: str | None) -> _Parts:
    prefix = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    join: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        join.append(decoders.Strip(content=" ", left=1))
    split = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    return _Parts(None, split, decoders.Sequence(join), byte_fallback=True, fuse_unk=True)


def _gemma(config: Mapping[str, Any], unk_token: str | None) -> _Parts:
    join = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return _Parts(
        normalizers.Replace(" ", _SPACE),
        pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False),
        decoders.Sequence(join),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=unk_token,
    )


_END = "<|endoftext|>"
_CLASSES = {
    "Qwen2Tokenizer": _TokenizerClass(
        _qwen2, {"unk_token": _END, "eos_token": _END, "pad_token": _END}, re_adds=True
    ),
    "GPT2Tokenizer": _TokenizerClass(
        _gpt2, {"unk_token": _END, "bos_token": _END, "eos_token": _END}
    ),
    "LlamaTokenizer": _TokenizerClass(
        _llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    ),
    "GemmaTokenizer": _TokenizerClass(
        _gemma,
        {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
         "mask_token": "<mask>"},
    ),
}  # fmt: skip


def class_of(stated: object, model_type: str | None, backend: Tokenizer) -> str | None:
    """The class that transformers takes: PLAIN, or a name; None: one that is not known here.

    stated      tokenizer_class of tokenizer_config.json
    model_type  of the model in the folder
    """
    # transformers makes classes of its own for some models, whatever the folder says.
    if str(model_type).startswith((*_MISTRAL, *_OTHERS_NOT_AS_STATED)):
        return None
    if not isinstance(stated, str):
        return None
    name = stated.removesuffix("Fast") if stated not in _PLAIN_NAMES else stated
    registered = _REGISTERED.get(model_type)
    if model_type in _NOT_AS_STATED:
        return registered
    if name in _PLAIN_NAMES:
        return PLAIN
    if model_type not in _REGISTERED:
        return None
    if name == "LlamaTokenizer" and _is_byte_level(backend):
        return PLAIN
    return name if name in _CLASSES else None


def default_tokens(name: str) -> dict[str, str]:
    """The special tokens that a class has where the folder does not say."""
    return {} if name == PLAIN else dict(_CLASSES[name].tokens)


def agrees(
    name: str, backend: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> bool:
    """tokenizer.json makes the same tokens and texts as the class.

    config   tokenizer_config.json
    special  name -> token, those of default_tokens() too
    """
    if name == PLAIN:
        return True
    made, model = _CLASSES[name], backend.model
    if type(model).__name__ != "BPE":
        return False
    parts = made.make(config, special.get("unk_token"))
    for ours, theirs in (
        (parts.normalizer, backend.normalizer),
        (parts.pre_tokenizer, backend.pre_tokenizer),
        (parts.decoder, backend.decoder),
    ):
        if _said(ours) != _said(theirs):
            return False
    if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if model.ignore_merges or model.byte_fallback != parts.byte_fallback:
        return False
    has_unknown = (model.unk_token, model.fuse_unk) != (parts.unk_token, parts.fuse_unk)
    if has_unknown and not _covers_all(backend, parts.byte_fallback):
        return False
    return _same_added(backend, config, special, re_adds=made.re_adds)


def _is_byte_level(backend: Tokenizer) -> bool:
    found = (backend.pre_tokenizer, backend.decoder)
    return any('"ByteLevel"' in json.dumps(_said(part)) for part in found)


def _said(part: Any) -> Any:
    """A part of a tokenizer in plain data, without what says nothing of tokens and texts."""
    if part is None:
        return None
    said = _plain(json.loads(part.__getstate__()))
    # Its decoder reads no option.
    is_decoder = isinstance(part, decoders.Decoder)
    return {"type": "ByteLevel"} if is_decoder and said.get("type") == "ByteLevel" else said


def _plain(said: Any) -> Any:
    if isinstance(said, dict):
        return {key: _plain(value) for key, value in said.items() if key != "trim_offsets"}
    return [_plain(entry) for entry in said] if isinstance(said, list) else said


def _covers_all(backend: Tokenizer, by_fallback: bool) -> bool:
    """Every text has tokens, so that no token is unknown."""
    if by_fallback:
        return all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return all(
        backend.token_to_id(char) is not None for char in pre_tokenizers.ByteLevel.alphabet()
    )


def _same_added(
    backend: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str], *, re_adds: bool
) -> bool:
    """The tokens beside the vocabulary get the ids that they have in the file: the class adds them
    one behind the other."""
    added = backend.get_added_tokens_decoder()
    size = backend.get_vocab_size(with_added_tokens=False)
    behind = sorted(token_id for token_id in added if token_id >= size)
    if behind != list(range(size, size + len(behind))):
        return False
    listed = config.get("added_tokens_decoder")
    if listed is not None and {int(token_id) for token_id in listed} != set(added):
        return False
    if not re_adds:
        return True
    names = set(special.values())
    return not any(
        token.lstrip or token.rstrip or token.single_word or token.normalized
        for token in added.values()
        if token.content in names
    )
