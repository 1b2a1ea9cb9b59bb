"""The tokenizer of a model folder and the ids that end a text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..config.limits import MAX_VOCAB_SIZE
from ..config.validate import show
from ..errors import ModelError
from ..extras import MissingPackageError
from ..gguf import is_gguf

__all__ = ["eos_token_ids", "load_tokenizer"]

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
)  # fmt: skip
_FILES_WITH_IDS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json")
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = re.compile(rb'[:\[{,]\s*"?-?\d{8,}"?\s*[]:},]')


def load_tokenizer(tokenizer: object, model_path: Path) -> Any:
    """A tokenizer object as it is, or one read from a local folder or GGUF file; never from the
    network.

    None reads the model's, and gives None where that has no tokenizer: such an LLM takes and
    returns token ids. Raises ModelError for a folder that cannot be read.
    """
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        return tokenizer
    folder = model_path if tokenizer is None else Path(tokenizer).expanduser()
    if is_gguf(folder):
        from .gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(folder)
    if not folder.is_dir():
        raise ModelError(f"tokenizer = {str(folder)!r}: no such folder; give a local folder")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        if tokenizer is None:
            return None
        raise ModelError(
            f"tokenizer = {str(folder)!r}: the folder has none of {', '.join(_TOKENIZER_FILES)}; "
            "give the folder of a tokenizer"
        )
    for name in _FILES_WITH_IDS:
        _check_ids(folder / name)
    from .file_tokenizer import read_file_tokenizer, transformers_tokenizer

    own = read_file_tokenizer(folder, _model_type(folder))
    if own is not None:
        return own
    try:
        loaded = transformers_tokenizer(folder)
    except MissingPackageError:
        raise
    except Exception as error:
        # transformers raises many types for damaged files; all mean the same to the caller.
        raise ModelError(
            f"tokenizer in {str(folder)!r} cannot be read ({type(error).__name__}: {error}); "
            "check its files or pass tokenizer="
        ) from error
    limit = loaded.model_max_length
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: model_max_length = {show(limit)}: expected a "
            "number of tokens > 0; correct the file or pass tokenizer="
        )
    return loaded


def _model_type(folder: Path) -> str | None:
    """The type of the model in the same folder, if there is one and its config.json can be read."""
    path = folder / "config.json"
    try:
        value = _read_json(path).get("model_type") if path.is_file() else None
    except ModelError:
        return None
    return value if isinstance(value, str) else None


def _check_ids(path: Path) -> None:
    """Refuse ids that no vocabulary has: tables as long as the greatest id are made of them."""
    if not path.is_file():
        return
    # A search over the bytes, since reading a vocabulary takes long: whole numbers of eight digits
    # and more, or in quotes. The few files with one, if only inside a token's text, are read.
    data = path.read_bytes()
    if b"00000000" not in data.translate(_DIGITS) or not _LONG_NUMBER.search(data):
        return
    content = _read_json(path)
    added = content.get("added_tokens")
    inner = content.get("model")
    vocab = inner.get("vocab") if isinstance(inner, dict) else None
    ids: list[object] = [e.get("id") for e in added or () if isinstance(e, dict)]
    if path.name in ("vocab.json", "added_tokens.json"):
        ids += content.values()
    if isinstance(vocab, dict):
        ids += vocab.values()
    decoder = content.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        ids += [int(key) for key in decoder if key.isdecimal()]
    for token_id in ids:
        if isinstance(token_id, int) and not 0 <= token_id < MAX_VOCAB_SIZE:
            raise ModelError(
                f"{path}: token id {token_id}: ids are 0..{MAX_VOCAB_SIZE - 1}; the file is damaged"
            )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a tokenizer's file; ModelError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({show(str(error))})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def eos_token_ids(
    of_checkpoint: tuple[int, ...], vocab_size: int, tokenizer: Any
) -> tuple[int, ...]:
    """Ids that end a text: the checkpoint's (generation_config.json, config.json), else the
    tokenizer's, else none."""
    if of_checkpoint:
        return of_checkpoint
    eos = getattr(tokenizer, "eos_token_id", None)
    return (eos,) if isinstance(eos, int) and 0 <= eos < vocab_size else ()
