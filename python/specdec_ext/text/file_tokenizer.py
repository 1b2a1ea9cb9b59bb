"""A file's tokenizer on the `tokenizers` library alone: transformers takes seconds to import.

It stands where transformers would read the same file into the same tokenizer; what only
transformers can make of a folder's files is left to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..extras import require
from .tokenizer_classes import agrees, class_of, default_tokens

__all__ = ["NO_LIMIT", "FileTokenizer", "read_file_tokenizer", "transformers_tokenizer"]

_SPECIAL = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
# Entries of tokenizer_config.json that change no token and no text here.
_NEUTRAL = frozenset((
    "add_bos_token", "add_eos_token", "add_prefix_space", "backend", "chat_template",
    "clean_up_tokenization_spaces", "errors", "is_local", "legacy", "local_files_only",
    "model_input_names", "model_max_length", "name_or_path", "padding_side", "sp_model_kwargs",
    "spaces_between_special_tokens", "tokenizer_class", "truncation_side",
    "use_default_system_prompt",
))  # fmt: skip
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
NO_LIMIT = int(1e30)  # what transformers says where a file does not
_LARGE_VOCABULARY = 100_000  # transformers looks for a mistake of Mistral's files above it


class FileTokenizer:
    """The calls of transformers' tokenizers that an engine makes. For any other, transformers' own
    tokenizer of the same files, which `whole` makes, is asked."""

    def __init__(
        self,
        place: Path,
        backend: Tokenizer,
        special: Mapping[str, str],
        *,
        chat_template: str | None,
        model_max_length: int,
        whole: Callable[[], Any],
    ) -> None:
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special)
        self.chat_template = chat_template
        self.model_max_length = model_max_length
        self.name_or_path = str(place)
        for name in _SPECIAL:
            token = special.get(name)
            setattr(self, name, token)
            setattr(self, name + "_id", None if token is None else backend.token_to_id(token))
        self._make_whole = whole
        self._whole: Any = None

    def __call__(self, text: Any, add_special_tokens: bool = True, **how: Any) -> Any:
        """{"input_ids", "attention_mask"} of one text."""
        if how or not isinstance(text, str):
            return self._transformers()(text, add_special_tokens=add_special_tokens, **how)
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def encode(self, text: Any, add_special_tokens: bool = True, **how: Any) -> list[int]:
        """Ids of one text."""
        if how or not isinstance(text, str):
            whole = self._transformers()
            given: list[int] = whole.encode(text, add_special_tokens=add_special_tokens, **how)
            return given
        ids: list[int] = self.backend_tokenizer.encode(
            text, add_special_tokens=add_special_tokens
        ).ids
        return ids

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """The text of token ids. Spaces are left as the tokenizer has them."""
        del clean_up_tokenization_spaces  # transformers does not do it to tokenizers of this kind
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else [int(token) for token in ids]
        text: str = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens too."""
        vocab: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or ids of several; the unknown token's for what is none."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend_tokenizer.token_to_id(tokens)
        return getattr(self, "unk_token_id", None) if token_id is None else token_id

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The token of an id, or tokens of several; None for what is none."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(token)) for token in ids]

    def get_chat_template(self, *given: Any, **how: Any) -> str:
        """The template of the folder."""
        if given or how or self.chat_template is None:
            return str(self._transformers().get_chat_template(*given, **how))
        return self.chat_template

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._transformers(), name)

    def _transformers(self) -> Any:
        if self._whole is None:
            self._whole = self._make_whole()
        return self._whole


def transformers_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a folder. Raises what transformers raises."""
    require("transformers", f"the tokenizer in {str(folder)!r}, no plain tokenizer.json,")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )


def read_file_tokenizer(folder: Path, model_type: str | None = None) -> FileTokenizer | None:
    """The tokenizer of a folder; None: only transformers can tell what it is.

    model_type  of the model in the folder, as its config.json says
    """
    path = folder / "tokenizer.json"
    config_path = folder / "tokenizer_config.json"
    if not path.is_file() or not config_path.is_file():
        return None
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or "auto_map" in config:
            return None
        backend = Tokenizer.from_buffer(path.read_bytes())
        named = _with_old_files(folder, config, backend)
    except Exception:  # a damaged file: transformers' error is the one that is reported
        return None
    name = class_of(config.get("tokenizer_class"), model_type, backend)
    if named is None or name is None or (folder / "additional_chat_templates").exists():
        return None
    special = _special_tokens(named, default_tokens(name))
    template, limit = _chat_template(folder, config), config.get("model_max_length", NO_LIMIT)
    known = _has_only_known(backend, named, special, model_type)
    known = known and agrees(name, backend, config, special)
    if not known or not isinstance(template, str | None) or type(limit) is not int or limit < 1:
        return None
    return FileTokenizer(
        folder, backend, special, chat_template=template, model_max_length=limit,
        whole=lambda: transformers_tokenizer(folder),
    )  # fmt: skip


def _with_old_files(
    folder: Path, config: dict[str, Any], backend: Tokenizer
) -> dict[str, Any] | None:
    """tokenizer_config.json with what older files say, which transformers reads where the former
    lists no added tokens; None: they say more than it and tokenizer.json."""
    if "added_tokens_decoder" in config:
        return config
    path = folder / "added_tokens.json"
    if path.exists():
        added = backend.get_added_tokens_decoder()
        for content, token_id in json.loads(path.read_text(encoding="utf-8")).items():
            if token_id not in added or added[token_id].content != content:
                return None
    path = folder / "special_tokens_map.json"
    if not path.exists():
        return config
    named = json.loads(path.read_text(encoding="utf-8"))
    return {**config, **named} if set(named) <= {*_SPECIAL, *_EXTRA} else None


def _special_tokens(config: Mapping[str, Any], defaults: Mapping[str, str]) -> dict[str, str]:
    """Name -> token of the special tokens that have a name."""
    found: dict[str, str] = {}
    for name in _SPECIAL:
        value = config.get(name, defaults.get(name))
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            found[name] = token
    return found


def _has_only_known(
    backend: Tokenizer,
    config: Mapping[str, Any],
    special: Mapping[str, str],
    model_type: str | None,
) -> bool:
    """Nothing in the configuration changes what tokenizer.json says."""
    if backend.truncation is not None or backend.padding is not None:
        return False
    is_bpe = type(backend.model).__name__ == "BPE"
    if config.get("clean_up_tokenization_spaces") and not is_bpe:
        return False
    if backend.get_vocab_size() > _LARGE_VOCABULARY and model_type is None:
        return False
    added = backend.get_added_tokens_decoder()
    marked = {token.content for token in added.values() if token.special}
    for name in _EXTRA:
        extra = config.get(name) or []
        if not isinstance(extra, list):
            return False
        contents = {str(e.get("content") if isinstance(e, dict) else e) for e in extra}
        if not contents <= marked:
            return False
    if not set(special.values()) <= marked:
        return False
    for token_id, entry in (config.get("added_tokens_decoder") or {}).items():
        token = added.get(int(token_id))
        if token is None or any(getattr(token, k, None) != v for k, v in entry.items()):
            return False
    rest = set(config) - _NEUTRAL - {*_SPECIAL, *_EXTRA, "added_tokens_decoder"}
    return all(config[name] in (None, False) for name in rest)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> Any:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return config.get("chat_template")
