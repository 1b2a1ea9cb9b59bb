"""Token ids and hidden states of texts on disk, shared by all trainers and runs of one target.

A cache is a folder: `cache.json` says which model it belongs to, and `shard-*.safetensors` hold
texts. A shard is named by the texts in it, so more prompts, other data or other limits add shards
and leave those that are there: a cache grows. A shard appears under its name only when it is
complete; what an interrupted run had finished besides lies in `pending-*.safetensors`, from which
the next run takes it. Readers map the files: nothing is copied.

One sequence is prompt + continuation. For continuation token j (0-based) `hidden[j]` is the final
norm's output that decided it: the head's input at the token before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..errors import ModelError

__all__ = ["CacheReader", "CacheWriter", "TextRecord", "fingerprint", "shard_name"]

FORMAT = 2
DESCRIPTION = "cache.json"
_TENSORS = ("tokens", "token_start", "prompt_len", "hidden", "hidden_start", "keys")


@dataclass(frozen=True)
class TextRecord:
    """One text.

    key         what it was made from (texts.py)
    category    of the prompt
    tokens      int32 [prompt_len + n]
    prompt_len  tokens of the prompt
    hidden      float16 [n, hidden_size]
    index       its place among the texts of a run
    """

    key: str
    category: str
    tokens: torch.Tensor
    prompt_len: int
    hidden: torch.Tensor
    index: int = 0

    @property
    def continuation(self) -> torch.Tensor:
        """int32 [n]: what follows the prompt."""
        return self.tokens[self.prompt_len :]


def fingerprint(value: Any) -> str:
    """sha256 of a JSON-ready value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def shard_name(keys: Sequence[str]) -> str:
    """The file that holds the texts of these keys, in this order."""
    return f"shard-{fingerprint(list(keys))[:24]}.safetensors"


class CacheWriter:
    """Writes the shards of one model's cache."""

    def __init__(self, folder: str | Path, description: Mapping[str, Any]) -> None:
        self.folder = Path(folder).expanduser()
        self.description = {"format": FORMAT, **description}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / DESCRIPTION
            if path.is_file():
                self._require_same(path)
            else:
                partial = path.with_suffix(f".{os.getpid()}.partial")  # another run has its own
                partial.write_text(json.dumps(self.description, indent=1) + "\n")
                partial.rename(path)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def _require_same(self, path: Path) -> None:
        there = _read_description(path)
        for key in self.description:
            if there.get(key) != self.description[key]:
                raise ModelError(
                    f"{self.folder}: holds data of another model: {key} is {there.get(key)!r}, "
                    f"this one has {self.description[key]!r}; give another --cache-dir or delete it"
                )

    def has(self, keys: Sequence[str]) -> bool:
        return (self.folder / shard_name(keys)).is_file()

    def write(self, name: str, records: Sequence[TextRecord]) -> None:
        """Write one complete file; nothing is left behind when the disk refuses."""
        tokens = [r.tokens.to(torch.int32) for r in records]
        hidden = [r.hidden.to(torch.float16) for r in records]
        if not all(bool(torch.isfinite(h).all()) for h in hidden):
            raise ModelError(
                f"{self.folder}: a hidden state is not finite in float16; the model's final norm "
                "is out of its range"
            )
        tensors = {
            "tokens": torch.cat(tokens),
            "token_start": _starts(tokens),
            "prompt_len": torch.tensor([r.prompt_len for r in records], dtype=torch.int32),
            "hidden": torch.cat(hidden),
            "hidden_start": _starts(hidden),
            "keys": torch.tensor([list(bytes.fromhex(r.key)) for r in records], dtype=torch.uint8),
        }
        # One value: the order of several is not fixed, and equal texts are to give equal bytes.
        about = {"checksum": _checksum(tensors), "categories": [r.category for r in records]}
        path = self.folder / name
        partial = path.with_suffix(f".{os.getpid()}.partial")  # another run has its own
        try:
            save_file(tensors, partial, metadata={"about": json.dumps(about)})
            partial.replace(path)
        except Exception as error:  # safetensors has its own type for a full disk
            partial.unlink(missing_ok=True)
            raise _unwritable(self.folder, error) from error

    def drop(self, pattern: str) -> None:
        for path in self.folder.glob(pattern):
            path.unlink(missing_ok=True)

    def known(self, keys: Iterable[str]) -> dict[str, TextRecord]:
        """Those of these texts that any file of the cache holds."""
        wanted = set(keys)
        found: dict[str, TextRecord] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            if wanted and wanted & set(_keys_of(path)):
                for record in _open(path, int(self.description["hidden_size"]), verify=False):
                    if record.key in wanted:
                        found[record.key] = record
        return found


def _unwritable(folder: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{folder}: the training cache cannot be written ({error}); free space, or give another "
        "--cache-dir: what is complete is kept and the same command goes on with it"
    )


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


def _damaged(path: Path, error: object) -> ModelError:
    return ModelError(
        f"{path}: not a shard of a training cache ({error}); delete it and collect again"
    )


def _keys_of(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return [bytes(row).hex() for row in file.get_tensor("keys").tolist()]
    except Exception as error:  # safetensors raises its own type for damaged files
        raise _damaged(path, error) from error


def _open(path: Path, hidden_size: int, verify: bool) -> list[TextRecord]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
            about = json.loads((file.metadata() or {})["about"])
            categories = list(about["categories"])
    except Exception as error:  # safetensors raises its own type for damaged files
        raise _damaged(path, error) from error
    if verify and about["checksum"] != _checksum(tensors):
        raise ModelError(
            f"{path}: damaged: its content does not match its checksum; delete it and collect again"
        )
    t_at, h_at = tensors["token_start"].tolist(), tensors["hidden_start"].tolist()
    count = len(tensors["keys"])
    if (
        tensors["hidden"].shape[1:] != (hidden_size,)
        or t_at[-1] != tensors["tokens"].shape[0]
        or h_at[-1] != tensors["hidden"].shape[0]
        or {len(t_at), len(h_at)} != {count + 1}
        or len(categories) != count
    ):
        raise ModelError(f"{path}: tensors of inconsistent shapes; delete it and collect again")
    return [
        TextRecord(
            key=bytes(key).hex(),
            category=str(categories[i]),
            tokens=tensors["tokens"][t_at[i] : t_at[i + 1]],
            prompt_len=int(tensors["prompt_len"][i]),
            hidden=tensors["hidden"][h_at[i] : h_at[i + 1]],
        )
        for i, key in enumerate(tensors["keys"].tolist())
    ]


class CacheReader:
    """The texts of a cache that belong to a run, in the run's order.

    keys    of each shard of the run; those that are not complete yet are left out. None: all shards
    verify  compare every shard with the checksum it was written with
    """

    def __init__(
        self,
        folder: str | Path,
        keys: Sequence[Sequence[str]] | None = None,
        *,
        verify: bool = False,
    ) -> None:
        self.folder = Path(folder).expanduser()
        self.description = _read_description(self.folder / DESCRIPTION)
        hidden_size = int(self.description["hidden_size"])
        self._records: list[TextRecord] = []
        first = 0
        paths: list[tuple[Path, Sequence[str] | None]]
        if keys is None:
            paths = [(path, None) for path in sorted(self.folder.glob("shard-*.safetensors"))]
        else:
            paths = [(self.folder / shard_name(part), part) for part in keys]
        for path, part in paths:
            if path.is_file():
                found = _open(path, hidden_size, verify)
                if part is not None and [r.key for r in found] != list(part):
                    raise _damaged(path, "it holds other texts than its name says")
                self._records += [replace(r, index=first + i) for i, r in enumerate(found)]
            first = first + len(part) if part is not None else len(self._records)
        if not self._records:
            raise ModelError(f"{self.folder}: the training cache holds no complete shard yet")

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[TextRecord]:
        return iter(self._records)

    def __getitem__(self, i: int) -> TextRecord:
        return self._records[i]

    @property
    def num_tokens(self) -> int:
        """Tokens of the continuations."""
        return sum(len(r.continuation) for r in self._records)
