"""Medusa heads in the spellings that exist, read into HeadWeights.

    this package's    config.json with num_medusa_heads + medusa_lm_head.safetensors
                      (weights.py)
    FasterDecoding    medusa_lm_head.safetensors or .pt: "{h}.{l}.linear.weight|bias",
                      "{h}.{L}.weight"; the legacy form has no "{h}.{L}.weight" and shares the
                      target's LM head
    joint (Medusa-2)  the same names after "medusa_head." among the tensors of a whole model
    vLLM's            "blocks.{h}.layers.{l}.weight|bias", "lm_heads.{h}.weight" or one
                      "lm_head.weight", "token_map"; any of them after "medusa_heads."

What the heads are (how many, how deep, their vocabulary) is taken from the tensors: published
config.json files are known to be wrong about it. Pickles are refused unless they are allowed, and
then read with weights_only=True.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...config.medusa import MAX_HEADS
from ...errors import ModelError, UnsupportedModelError
from ...models.host_arrays import HostArray, from_torch
from ...models.weights import Checkpoint
from .weights import (
    HEADS_FILE,
    HeadWeights,
    MedusaHeadsConfig,
    check_weights,
    read_own_heads,
    read_tensors,
)

__all__ = ["read_heads"]

PICKLE_FILE = "medusa_lm_head.pt"
_PICKLES = (".pt", ".bin", ".pth")
_PREFIXES = ("base_model.", "model.", "medusa_heads.", "medusa_head.")

# (pattern of a name, the name in this package's spelling)
_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"\1.\2.linear.\3"),
        (r"(\d+)\.(\d+)\.weight", r"\1.head\2.weight"),
        (r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"\1.\2.linear.\3"),
        (r"lm_heads\.(\d+)\.weight", r"\1.head.weight"),
        (r"lm_head\.weight", "lm_head.weight"),
        (r"token_map|token_ids", "token_ids"),
    )
)
_LM_HEAD = re.compile(r"(\d+)\.head(\d*)\.weight")


def read_heads(path: str | Path, *, model: Any = None, allow_pickle: bool = False) -> HeadWeights:
    """The heads of a folder or file in any of the spellings above.

    model  the target (a StepModel) that they have to fit; None: they are not compared with one, and
           the target's vocabulary is taken from the files

    Raises ModelError (UnsupportedModelError for what has no Medusa heads or other activations)
    naming the file, the tensor, what was expected and what was found.
    """
    source = Path(path).expanduser()
    if not source.exists():
        raise ModelError(f"{source}: no such folder or file")
    folder = source if source.is_dir() else source.parent
    config = _read_config(folder / "config.json")
    if source.is_dir() and "num_medusa_heads" in config and (source / HEADS_FILE).is_file():
        heads = read_own_heads(source)
    else:
        tensors, file = _read_tensors(source, allow_pickle)
        heads = _from_foreign(_respell(tensors, file), config, model, file)
    if model is not None:
        _check_target(heads.config, model, source)
    return heads


def _check_target(config: MedusaHeadsConfig, model: Any, source: Path) -> None:
    for name, words in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        have, need = getattr(config, name), getattr(model, name)
        if have != need:
            raise ModelError(
                f"{source}: these Medusa heads are for a {words} of {have}, the target "
                f"{model.info.path} has {name} = {need}; use heads that were trained for it"
            )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected an object with keys, got {type(content).__name__}")
    act = content.get("medusa_hidden_act", "silu")
    if act != "silu":
        raise UnsupportedModelError(
            f"{path}: medusa_hidden_act = {act!r}; only 'silu' is supported"
        )
    return content


def _read_tensors(source: Path, allow_pickle: bool) -> tuple[dict[str, HostArray], Path]:
    """The tensors that may belong to heads, and the file or folder for messages."""
    file = source
    if source.is_dir():
        for name in (HEADS_FILE, PICKLE_FILE):
            if (source / name).is_file():
                file = source / name
                break
        else:
            return _read_folder(source, allow_pickle)
    if file.suffix in _PICKLES:
        return _read_pickle(file, allow_pickle), file
    return read_tensors(file, _head_names), file


def _read_pickle(file: Path, allow_pickle: bool) -> dict[str, HostArray]:
    if not allow_pickle:
        raise ModelError(
            f"{file}: pickle files can run code and are refused; convert it with 'specdec "
            "convert-heads --allow-pickle', or set allow_pickle=True (read with weights_only=True)"
        )
    import torch

    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # UnpicklingError, RuntimeError (zip), OSError
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{file}: not a readable torch checkpoint ({reason})") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    ):
        raise ModelError(f"{file}: expected a dictionary of tensors (a state dict)")
    return {name: from_torch(content[name]) for name in _head_names(content)}


def _read_folder(folder: Path, allow_pickle: bool) -> tuple[dict[str, HostArray], Path]:
    """A model folder: a joint checkpoint, or heads under a model's file names."""
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        return {name: checkpoint.load(name) for name in _head_names(checkpoint.entries)}, folder


def _head_names(names: Iterable[str]) -> list[str]:
    """The names of the heads: in a whole model those after "medusa_head(s).", else all."""
    every = list(names)
    inside = [n for n in every if "medusa_head." in n or "medusa_heads." in n]
    is_model = any("embed_tokens" in n for n in every)
    return inside if inside or is_model else every


def _respell(tensors: Mapping[str, HostArray], file: Path) -> dict[str, HostArray]:
    """The tensors under this package's names; LM heads: "{h}.head{l}.weight", l as given."""
    if not tensors:
        raise UnsupportedModelError(
            f"{file}: no Medusa heads in it; they are named '0.0.linear.weight' or "
            "'blocks.0.layers.0.weight', in a whole model after 'medusa_head.'"
        )
    result: dict[str, HostArray] = {}
    for full, tensor in tensors.items():
        name = full
        while name.startswith(_PREFIXES):
            name = name[len(next(p for p in _PREFIXES if name.startswith(p))) :]
        for pattern, replacement in _SPELLINGS:
            if pattern.fullmatch(name):
                key = pattern.sub(replacement, name)
                break
        else:
            raise ModelError(
                f"{file}: tensor {full!r} {list(tensor.shape)} is no tensor of Medusa heads; "
                "expected '0.0.linear.weight', '0.1.weight' or 'blocks.0.layers.0.weight'"
            )
        if key in result:
            raise ModelError(f"{file}: tensor {full!r} is there twice, in two spellings")
        result[key] = tensor
    return result


def _from_foreign(
    tensors: dict[str, HostArray], config: Mapping[str, Any], model: Any, file: Path
) -> HeadWeights:
    """Heads whose shape is read off the tensors."""
    blocks = {
        m.groups() for n in tensors if (m := re.fullmatch(r"(\d+)\.(\d+)\.linear\.weight", n))
    }
    own = {n: int(m.group(1)) for n in tensors if (m := _LM_HEAD.fullmatch(n))}
    heads = max([int(h) for h, _ in blocks] + list(own.values()), default=-1) + 1
    layers = max((int(layer) for _, layer in blocks), default=-1) + 1
    if not 1 <= heads <= MAX_HEADS:
        raise ModelError(f"{file}: {heads} Medusa heads, allowed 1..{MAX_HEADS}")
    example = next((t for n, t in tensors.items() if n != "token_ids" and len(t.shape) == 2), None)
    if example is None:
        raise ModelError(f"{file}: no matrix among the tensors of the heads")
    has_bias = any(name.endswith(".linear.bias") for name in tensors)
    kind = "own" if own else "shared" if "lm_head.weight" in tensors else "target"
    name = next(iter(own), "lm_head.weight")
    rows = int(tensors[name].shape[0]) if kind != "target" else None
    ids = tensors.get("token_ids")
    if ids is not None and rows is not None and tuple(ids.shape) == (rows,) and _is_identity(ids):
        ids = None
    if ids is None:
        tensors.pop("token_ids", None)
        rows = None
    shape = MedusaHeadsConfig(
        hidden_size=int(example.shape[1]),
        vocab_size=_vocabulary(tensors, config, model, name, ids is not None, file),
        num_medusa_heads=heads,
        num_medusa_layers=layers,
        lm_head=kind,
        draft_vocab_size=None if ids is None else math.prod(ids.shape),
        has_bias=has_bias,
        base_model_name_or_path=str(config.get("base_model_name_or_path") or ""),
    )
    renamed = {
        _LM_HEAD.sub(lambda m: f"{m[1]}.{m[2] or layers}.weight", n): t for n, t in tensors.items()
    }
    return check_weights(shape, renamed, source=str(file))


def _is_identity(ids: HostArray) -> bool:
    """A map of the whole vocabulary onto itself, as vLLM's converter may write it."""
    return isinstance(ids, np.ndarray) and np.array_equal(ids, np.arange(len(ids)))


def _vocabulary(
    tensors: Mapping[str, HostArray],
    config: Mapping[str, Any],
    model: Any,
    lm_head: str,
    is_reduced: bool,
    file: Path,
) -> int:
    """The target's vocabulary: rows of an LM head that covers it, else what else is known."""
    if lm_head in tensors and not is_reduced:
        return int(tensors[lm_head].shape[0])
    if model is not None:
        return int(model.vocab_size)
    known = config.get("vocab_size")
    if type(known) is not int:
        raise ModelError(
            f"{file}: the heads do not say how large the target's vocabulary is and config.json "
            "has no vocab_size; name the target (--model)"
        )
    return known
