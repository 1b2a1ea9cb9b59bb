"""NativeModel.read_weights(): what a pass is held against reads the same weights, all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specdec_ext import get_num_threads, set_num_threads
from specdec_ext.models import load_model
from tiny_models import save_llama


def checksum(folder: Path, **options: Any) -> int:
    model: Any = load_model(folder, max_rows=8, **options)
    return int(model.read_weights())


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_every_matrix_of_a_step_is_read(tmp_path: Path, quantization: str | None) -> None:
    folder = save_llama(tmp_path / "model", 3, vocab_size=96)
    whole = checksum(folder, quantization=quantization)
    before = get_num_threads()
    set_num_threads(before + 2)
    try:
        assert checksum(folder, quantization=quantization) == whole
    finally:
        set_num_threads(before)
    weights = load_file(folder / "model.safetensors")
    matrices = [n for n, w in weights.items() if w.ndim == 2 and "embed" not in n]
    assert len(matrices) > 7
    for name in matrices:
        other = {**weights, name: np.ascontiguousarray(weights[name][::-1] * 1.5)}
        save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
        assert checksum(folder, quantization=quantization) != whole, name
