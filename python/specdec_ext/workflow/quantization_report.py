"""What narrower weights do to a model: the error of every matrix, and the perplexity of a text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core
from ..config.engine import pages_for
from ..engine.kv_pages import KvPages
from ..errors import ConfigError, ModelError
from ..models.load import load_model
from ..models.place import CPU
from ..text.tokenizer import load_tokenizer
from .fetched_file import FetchedFile

__all__ = ["REPORT_FILE", "error_table", "news_file", "perplexity", "write_report"]

REPORT_FILE = "quantization.json"  # of a checkpoint that was converted with --quantization
# A text's first tokens, in windows whose tokens see each other; of a pass.
_TOKENS, _WINDOW, _CHUNK, _PAGE = 16384, 1024, 256, 32
_NEWS = FetchedFile(
    "gensim",  # LGPL 2.1; the Lee background corpus: 300 news articles
    "4.4.0",
    "gensim/test/test_data/lee_background.cor",
    "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
    "the news",
    "name a text file: --perplexity FILE",
)


def news_file() -> Path:
    """300 news articles, fetched once. Raises ModelError."""
    return _NEWS.path()


def error_table(errors: Sequence[tuple[str, float]], most: int = 5) -> list[str]:
    """Lines for a reader: the matrices that lost most, and how much all did in the middle."""
    if not errors:
        return ["no matrix was narrowed"]
    values = sorted(error for _, error in errors)
    lines = [f"relative error of {len(errors)} matrices: median {values[len(values) // 2]:.4f}"]
    lines += [f"  {error:.4f}  {name}" for name, error in errors[:most]]
    return lines


def write_report(
    folder: Path,
    quantization: str | dict[str, Any],
    errors: Sequence[tuple[str, float]],
    perplexities: dict[str, Any] | None = None,
) -> None:
    """quantization.json of a checkpoint: errors worst first. Raises OSError."""
    content: dict[str, Any] = {
        "quantization": quantization,
        "relative_errors": [{"tensor": name, "error": error} for name, error in errors],
    }
    if perplexities is not None:
        content["perplexity"] = perplexities
    (folder / REPORT_FILE).write_text(json.dumps(content, indent=1) + "\n")


def perplexity(model: str | Path, text: str | Path, *, tokens: int = _TOKENS) -> dict[str, Any]:
    """Perplexity of a text file by a model on the CPU: {"perplexity", "tokens"}.

    The first `tokens` tokens count, in windows of 1,024; the last window may be shorter. Raises
    ConfigError for a text of less than two tokens or one that cannot be read, and what load_model()
    raises.
    """
    path = Path(text).expanduser()
    try:
        words = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a text file") from error
    tokenizer: Any = load_tokenizer(None, Path(model))
    if tokenizer is None:
        raise ModelError(f"{model}: has no tokenizer, so no text has a perplexity")
    ids = [int(i) for i in tokenizer.encode(words)][:tokens]
    if len(ids) < 2:
        raise ConfigError(f"{path}: {len(ids)} tokens, at least 2 are needed; name a longer text")
    loaded: Any = load_model(model, max_rows=_CHUNK, max_seq_len=_WINDOW)
    window = min(_WINDOW, loaded.max_position)
    pages = KvPages(loaded, pages_for(window + _CHUNK, _PAGE), _PAGE, CPU)
    loaded.bind_cache(*pages.tensors)
    losses = np.concatenate(list(_losses(loaded, ids, window)))
    return {"perplexity": float(np.exp(losses.mean())), "tokens": len(losses)}


def _losses(model: Any, ids: list[int], window: int) -> Iterator[np.ndarray]:
    """-log p of each token that follows another in its window."""
    for start in range(0, len(ids), window):
        part = ids[start : start + window]
        for first in range(0, len(part) - 1, _CHUNK):
            rows = part[first : first + _CHUNK]
            pages = list(range(pages_for(first + len(rows), _PAGE)))
            plan = _core.make_step_plan(
                [rows], kv_len=[first], page_table=[pages], logits_for_all_rows=True,
                needs_logits=True,
            )  # fmt: skip
            scores = np.asarray(model.forward(plan), dtype=np.float64)
            following = part[first + 1 : first + len(rows) + 1]
            scores = scores[: len(following)]
            shifted = scores - scores.max(axis=1, keepdims=True)
            log_sums = np.log(np.exp(shifted).sum(axis=1))
            yield log_sums - shifted[np.arange(len(following)), following]
