"""What config.json says of matrices in blocks.

A matrix [N, K] in blocks is a tensor of bytes [N, bytes of a row]; config.json says of what format,
in quantization_config: {"quant_method": "specdec_blocks", "formats": {"q4_1": [names], ...}}.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.validate import show
from ..errors import ModelError
from ..gguf.reader import FORMATS

__all__ = ["BLOCKS", "block_config", "read_blocks"]

_METHOD = "specdec_blocks"
# Format -> elements and bytes of a block: GGUF's, and that of e4m3 weights.
BLOCKS = {name: (elements, size) for name, elements, size in FORMATS.values() if elements > 1}
BLOCKS["f8_g"] = (64, 68)


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
