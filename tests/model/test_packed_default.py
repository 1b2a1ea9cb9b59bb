"""The built-in model's packed weights below the cache root: made once, mapped later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specdec_ext import _core
from specdec_ext.models import load_model
from specdec_ext.models.default import find_default_gguf
from specdec_ext.models.native import NativeModel

pytestmark = pytest.mark.default_model


def load(**how: object) -> NativeModel:
    model = load_model(find_default_gguf(), max_rows=16, **how)  # type: ignore[arg-type]
    assert isinstance(model, NativeModel)
    shape = (model.num_layers, 2, model.num_kv_heads, 8, model.head_dim)
    model.bind_cache(*(_core.LazyZeros(shape, model.kv_dtype_name) for _ in range(2)))
    return model


def scores(model: NativeModel) -> np.ndarray:
    plan = _core.make_step_plan([[1, 500, 9, 33]], kv_len=[0], page_table=[[0]], needs_logits=True)
    return model.forward(plan)


def is_mapped(folder: Path) -> bool:
    return str(folder) in Path("/proc/self/maps").read_text()


def test_made_once_mapped_later_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "file"))  # no folder: nothing is kept
    expected = scores(load())
    assert not is_mapped(tmp_path)
    cache = tmp_path / "cache"
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(cache))
    first = load()
    assert is_mapped(cache) and np.array_equal(scores(first), expected)
    (file,) = cache.glob("packed/*/packed.bin")
    assert 98e6 < file.stat().st_size < 99.5e6
    written = file.stat().st_mtime_ns
    assert load(max_seq_len=512).max_position == 512  # the longer rotary tables serve it
    load(dtype="bfloat16")  # floats are not kept
    assert file.stat().st_mtime_ns == written and len([*cache.glob("packed/*/packed.bin")]) == 1
    with file.open("r+b") as opened:  # damaged: made again, as every folder of the cache
        opened.seek(50_000_000)
        opened.write(b"damage")
    assert np.array_equal(scores(load()), expected)
    (file,) = cache.glob("packed/*/packed.bin")
    assert b"damage" not in file.read_bytes()[50_000_000:50_000_006]


def test_what_a_start_imports() -> None:
    """Each of these takes a noticeable part of the time to the first token."""
    script = """
import sys
from specdec_ext import LLM, SamplingParams
with LLM(max_seq_len=128) as llm:
    llm.generate("The capital of France is", SamplingParams(max_tokens=1), use_tqdm=False)
heavy = {"torch", "transformers", "asyncio", "yaml", "importlib.metadata", "concurrent.futures",
         "numpy.random", "numpy.testing", "jinja2", "pydantic", "ssl"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
