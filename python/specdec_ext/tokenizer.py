"""The tokenizer of a model folder and the ids that end a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ModelError

__all__ = ["load_tokenizer", "read_eos_token_ids"]

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
)  # fmt: skip


def load_tokenizer(tokenizer: object, model_path: Path) -> Any:
    """A tokenizer object as it is, or one read from a local folder; never from the network.

    None reads the model's folder, and gives None where that has no tokenizer: such an LLM takes and
    returns token ids. Raises ModelError for a folder that cannot be read.
    """
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        return tokenizer
    folder = model_path if tokenizer is None else Path(tokenizer).expanduser()
    if not folder.is_dir():
        raise ModelError(f"tokenizer = {str(folder)!r}: no such folder; give a local folder")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        if tokenizer is None:
            return None
        raise ModelError(
            f"tokenizer = {str(folder)!r}: the folder has none of {', '.join(_TOKENIZER_FILES)}; "
            "give the folder of a tokenizer"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # transformers raises many types for damaged files; all mean the same to the caller.
        raise ModelError(
            f"tokenizer in {str(folder)!r} cannot be read ({type(error).__name__}: {error}); "
            "check its files or pass tokenizer="
        ) from error


def read_eos_token_ids(model_path: Path, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """End-of-text ids as `transformers` greedy uses them.

    generation_config.json decides, else config.json, else the tokenizer. Raises ModelError for an
    id outside the vocabulary or a file that is no JSON.
    """
    for name in ("generation_config.json", "config.json"):
        path = model_path / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError, OSError) as error:
            raise ModelError(
                f"{str(path)!r} cannot be read ({error}); restore the file from its source"
            ) from None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ModelError(
                    f"{str(path)!r}: eos_token_id = {value!r} is no id; correct the file"
                )
            if not 0 <= token < vocab_size:
                raise ModelError(
                    f"{str(path)!r}: eos_token_id = {token} is outside the vocabulary "
                    f"0..{vocab_size - 1}; correct the file"
                )
        return tuple(dict.fromkeys(ids))
    eos = getattr(tokenizer, "eos_token_id", None)
    return (eos,) if isinstance(eos, int) and 0 <= eos < vocab_size else ()
