"""decoder.txt of a converted folder: what the C++ runtime makes a decoder of, without Python.

What config.json means for a family, how rotary tables are computed and where each tensor lies is
said once, by this package; C++ (cpp/runtime/model_folder.h) reads the result. The file is lines
of words:

specdec-decoder 1               the format's version
NAME VALUE...                   a field of DecoderConfig, or kv_dtype, eos_token_ids
rope INDEX OFFSET ROWS COLUMNS  cos, then sin, float32, in rope.bin
tensor NAME TYPE FILE OFFSET ROWS COLUMNS   TYPE: a float type, or a block format and its bytes
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .config_reader import read_config
from .draft_vocab import read_draft_vocab
from .fused_rows import FusedCheckpoint, fused_rows
from .native import decoder_config, served_positions
from .native_config import NotNativeError, native_shape
from .open_checkpoint import open_checkpoint
from .rope import rope_tables
from .safetensors_file import SafetensorsFile

__all__ = ["DECODER_FILE", "ROPE_FILE", "write_decoder_file"]

DECODER_FILE, ROPE_FILE = "decoder.txt", "rope.bin"
_VERSION = 1


def write_decoder_file(folder: Path) -> bool:
    """Write decoder.txt and rope.bin into a converted folder.

    False, and no file: the native decoder does not run the family, the head scores a part of the
    vocabulary, or rows lie in another order than the decoder's (RowsOf.order). Raises ModelError,
    OSError.
    """
    config = read_config(folder)
    try:
        shape = native_shape(config)
    except NotNativeError:
        return False
    if read_draft_vocab(folder, config.vocab_size) is not None:
        return False
    if any(part.order for part in fused_rows(config).values()):
        return False
    positions = served_positions(config, None, [])
    fields: dict[str, Any] = decoder_config(
        shape, "float32" if config.blocks else str(config.dtype), 0, positions
    )
    del fields["max_rows"]
    lines = [f"specdec-decoder {_VERSION}", f"kv_dtype {config.dtype}"]
    lines.append(_line("eos_token_ids", list(config.eos_token_ids)))
    lines += [_line(name, value) for name, value in fields.items()]
    with (folder / ROPE_FILE).open("wb") as rope:
        for index in sorted(set(shape.rope_index) - {-1}):
            tables = rope_tables(config.hf, positions, shape.rope_layer_types[index])
            lines.append(_line("rope", [index, rope.tell(), *tables[0].shape]))
            for table in tables:
                rope.write(np.ascontiguousarray(table, dtype="<f4").tobytes())
    with open_checkpoint(config) as checkpoint:
        fused = checkpoint if isinstance(checkpoint, FusedCheckpoint) else None
        # A folder, never a GGUF file.
        entries = (checkpoint if fused is None else fused.files).entries  # type: ignore[union-attr]
        files = {entry.file: SafetensorsFile(entry.file) for entry in entries.values()}
        for name in shape.expected_weights():
            part = None if fused is None else fused.rows_of(name)
            source = name if part is None else part.source
            entry = entries[source]
            offset, stored = files[entry.file].place(source)
            rows, columns = stored if len(stored) == 2 else (1, stored[0])
            if part is not None:
                offset += part.first * files[entry.file].num_bytes(source) // rows
                rows = part.count
            lines.append(
                _line("tensor", [name, entry.dtype, entry.file.name, offset, rows, columns])
            )
    (folder / DECODER_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return True


def _line(name: str, value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    words = [
        str(int(v)) if isinstance(v, bool) else v.hex() if isinstance(v, float) else str(v)
        for v in values
    ]
    return " ".join([name, *words])
