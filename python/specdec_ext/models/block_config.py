"""What `specdec convert` says of a folder's weights and of its K/V in config.json.

A matrix [N, K] in blocks is a tensor of bytes [N, bytes of a row]; quantization_config says of what
format: {"quant_method": "specdec_blocks", "formats": {"q4_1": [names], ...}}. K and V that were
calibrated for e4m3 are FP8_KV: the quantization_config of the source said so, and it is not that of
the new files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.validate import show
from ..errors import ModelError
from ..gguf.reader import FORMATS

__all__ = ["BLOCKS", "FP8_KV", "block_config", "read_blocks", "read_fp8_kv"]

FP8_KV = {"specdec_kv_cache": "fp8"}  # in config.json
_METHOD = "specdec_blocks"
# Format -> elements and bytes of a block: GGUF's, and four of our own. What quantised checkpoints
# become is as q4_1 and q8_0, with float32 in the place of float16; f8_g holds e4m3, and so does
# f8_a8, whose products round activations to e4m3.
BLOCKS = {name: (elements, size) for name, elements, size in FORMATS.values() if elements > 1}
BLOCKS |= {"q4_g": (32, 24), "q8_g": (32, 36), "f8_g": (64, 68), "f8_a8": (64, 68)}


def block_config(blocks: Mapping[str, str]) -> dict[str, Any]:
    """config.json's quantization_config for `blocks`, tensor name -> format."""
    formats: dict[str, list[str]] = {}
    for name, format in sorted(blocks.items()):
        formats.setdefault(format, []).append(name)
    return {"quant_method": _METHOD, "formats": formats}


def read_blocks(path: Path, raw: dict[str, Any]) -> dict[str, str]:
    """Takes block_config's entry out of `raw`, the content of the config.json at `path`.

    Returns tensor name -> format, empty for a folder without blocks. Raises ModelError.
    """
    entry = raw.get("quantization_config")
    if not isinstance(entry, dict) or entry.get("quant_method") != _METHOD:
        return {}
    formats = entry.get("formats")
    blocks: dict[str, str] = {}
    for format, names in (formats if isinstance(formats, dict) else {"": None}).items():
        if format not in BLOCKS or not isinstance(names, list):
            raise ModelError(
                f"{path}: quantization_config.formats[{show(format)}] = {show(names)}: expected a "
                f"list of tensors under one of {', '.join(BLOCKS)}; convert the model again"
            )
        blocks |= {str(name): format for name in names}
    del raw["quantization_config"]
    return blocks


def read_fp8_kv(path: Path, raw: dict[str, Any]) -> bool:
    """Takes FP8_KV's entry out of `raw`, the content of the config.json at `path`.

    Raises ModelError for another value.
    """
    [(name, value)] = FP8_KV.items()
    found = raw.pop(name, None)
    if found not in (None, value):
        raise ModelError(
            f"{path}: {name} = {show(found)}: expected {value!r}, or no such entry; convert the "
            "model again"
        )
    return found is not None
