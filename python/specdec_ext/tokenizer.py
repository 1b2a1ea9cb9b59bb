"""The tokenizer of a model folder and the ids that end a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ModelError

if TYPE_CHECKING:
    from .models.base import ModelInfo

__all__ = ["eos_token_ids", "load_tokenizer"]

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


def eos_token_ids(info: ModelInfo, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a text: the checkpoint's (generation_config.json, config.json), else the
    tokenizer's, else none."""
    if info.eos_token_ids:
        return info.eos_token_ids
    eos = getattr(tokenizer, "eos_token_id", None)
    return (eos,) if isinstance(eos, int) and 0 <= eos < info.vocab_size else ()
