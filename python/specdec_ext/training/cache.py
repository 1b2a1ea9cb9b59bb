"""Token ids and hidden states of the target's own texts on disk, shared by all trainers.

A cache is a folder: `cache.json` says what the data are (model, prompts, seed, limits), and
`shard-00000.safetensors`, ... hold the sequences of consecutive prompts. A shard appears under its
name only when it is complete, so a killed run loses the shards it was working on and nothing else;
what follows from the same description continues it. Readers map the files: nothing is copied.

One sequence is prompt + continuation. For continuation token j (0-based) `hidden[j]` is the final
norm's output that decided it: the head's input at the token before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..errors import ModelError

__all__ = ["CacheReader", "CacheWriter", "TextRecord", "fingerprint"]

FORMAT = 1
DESCRIPTION = "cache.json"
_TENSORS = ("tokens", "token_start", "prompt_len", "hidden", "hidden_start", "category", "index")


@dataclass(frozen=True)
class TextRecord:
    """One text.

    index       of its prompt in the list of prompts
    category    of the prompt
    tokens      int32 [prompt_len + n]
    prompt_len  tokens of the prompt
    hidden      float16 [n, hidden_size]
    """

    index: int
    category: str
    tokens: torch.Tensor
    prompt_len: int
    hidden: torch.Tensor

    @property
    def continuation(self) -> torch.Tensor:
        """int32 [n]: what the target wrote."""
        return self.tokens[self.prompt_len :]


def fingerprint(value: Any) -> str:
    """sha256 of a JSON-ready value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


class CacheWriter:
    """Writes the shards of one description; resumes what is there if it describes the same data."""

    def __init__(self, folder: str | Path, description: Mapping[str, Any]) -> None:
        self.folder = Path(folder).expanduser()
        self.description = {"format": FORMAT, **description}
        self.categories: list[str] = list(description["categories"])
        self.shard_size = int(description["shard_size"])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / DESCRIPTION
            if path.is_file():
                self._require_same(path)
            else:
                partial = path.with_suffix(".partial")
                partial.write_text(json.dumps(self.description, indent=1) + "\n")
                partial.rename(path)
        except OSError as error:
            raise ModelError(
                f"{self.folder}: the training cache cannot be written ({error}); give another "
                "--cache-dir"
            ) from error

    def _require_same(self, path: Path) -> None:
        there = _read_description(path)
        for key in dict.fromkeys((*self.description, *there)):
            if there.get(key) != self.description.get(key):
                raise ModelError(
                    f"{self.folder}: holds data of another run: {key} is {there.get(key)!r}, this "
                    f"run has {self.description.get(key)!r}; give another --cache-dir or delete it"
                )

    def has(self, shard: int) -> bool:
        return (self.folder / _shard_name(shard)).is_file()

    def write(self, shard: int, sequences: Sequence[TextRecord]) -> None:
        """Write one complete shard."""
        tokens = [s.tokens.to(torch.int32) for s in sequences]
        hidden = [s.hidden.to(torch.float16) for s in sequences]
        if not all(bool(torch.isfinite(h).all()) for h in hidden):
            raise ModelError(
                f"{self.folder}: a hidden state is not finite in float16; the model's final norm "
                "is out of its range"
            )
        tensors = {
            "tokens": torch.cat(tokens),
            "token_start": _starts(tokens),
            "prompt_len": torch.tensor([s.prompt_len for s in sequences], dtype=torch.int32),
            "hidden": torch.cat(hidden),
            "hidden_start": _starts(hidden),
            "category": torch.tensor(
                [self.categories.index(s.category) for s in sequences], dtype=torch.uint8
            ),
            "index": torch.tensor([s.index for s in sequences], dtype=torch.int64),
        }
        path = self.folder / _shard_name(shard)
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"checksum": _checksum(tensors)})
        partial.rename(path)


def _starts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [len(parts) + 1]: where each part begins in their concatenation."""
    return torch.tensor([0, *(p.shape[0] for p in parts)], dtype=torch.int64).cumsum(0)


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().numpy().data)
    return digest.hexdigest()


def _read_description(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: cannot be read ({error}); delete the cache and collect it again"
        ) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ModelError(
            f"{path}: not a training cache of format {FORMAT}; give another --cache-dir"
        )
    return value


class CacheReader:
    """The complete shards of a cache, in order.

    verify  compare every shard with the checksum it was written with
    """

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        self.folder = Path(folder).expanduser()
        self.description = _read_description(self.folder / DESCRIPTION)
        self.categories: list[str] = list(self.description["categories"])
        self._paths = sorted(self.folder.glob("shard-*.safetensors"))
        self._sequences: list[TextRecord] = []
        for path in self._paths:
            self._sequences += self._open(path, verify)
        self._sequences.sort(key=lambda s: s.index)
        if not self._sequences:
            raise ModelError(f"{self.folder}: the training cache holds no complete shard yet")

    def _open(self, path: Path, verify: bool) -> list[TextRecord]:
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in _TENSORS}
                checksum = (file.metadata() or {}).get("checksum")
        except Exception as error:  # safetensors raises its own type for damaged files
            raise ModelError(
                f"{path}: not a shard of a training cache ({error}); delete it and collect again"
            ) from error
        if verify and checksum != _checksum(tensors):
            raise ModelError(
                f"{path}: damaged: its content does not match its checksum; delete it and collect "
                "again"
            )
        t_at, h_at = tensors["token_start"].tolist(), tensors["hidden_start"].tolist()
        hidden_size = int(self.description["hidden_size"])
        if (
            tensors["hidden"].shape[1:] != (hidden_size,)
            or t_at[-1] != tensors["tokens"].shape[0]
            or h_at[-1] != tensors["hidden"].shape[0]
        ):
            raise ModelError(f"{path}: tensors of inconsistent shapes; delete it and collect again")
        return [
            TextRecord(
                index=int(index),
                category=self.categories[int(category)],
                tokens=tensors["tokens"][t_at[i] : t_at[i + 1]],
                prompt_len=int(prompt_len),
                hidden=tensors["hidden"][h_at[i] : h_at[i + 1]],
            )
            for i, (index, category, prompt_len) in enumerate(
                zip(tensors["index"], tensors["category"], tensors["prompt_len"], strict=True)
            )
        ]

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[TextRecord]:
        return iter(self._sequences)

    def __getitem__(self, i: int) -> TextRecord:
        return self._sequences[i]

    @property
    def num_tokens(self) -> int:
        """Tokens that the target wrote."""
        return sum(len(s.tokens) - s.prompt_len for s in self._sequences)
