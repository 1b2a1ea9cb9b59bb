"""What narrower weights cost: errors of matrices and perplexities, against NumPy and torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from specdec_ext import LLM, ConfigError, ModelError
from specdec_ext.cli import main
from specdec_ext.models.quantize import relative_error, to_blocks, worst_first
from specdec_ext.text.tokenizer import load_tokenizer
from specdec_ext.workflow import fetched_file
from specdec_ext.workflow.convert import ConvertOptions
from specdec_ext.workflow.quantization_report import error_table, news_file, perplexity
from tiny_models import save_tiny

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)


def values(blocks: np.ndarray, format: str) -> np.ndarray:
    """What blocks of 32 stand for, read byte by byte."""
    rows = []
    size = {"q8_0": 34, "q4_1": 20}[format]
    for row in blocks:
        found: list[float] = []
        for first in range(0, len(row), size):
            block = row[first : first + size].tobytes()
            scale = float(np.frombuffer(block[:2], "<f2")[0])
            if format == "q8_0":
                found += [scale * code for code in np.frombuffer(block[2:], "i1").tolist()]
            else:
                low = float(np.frombuffer(block[2:4], "<f2")[0])
                codes = [b & 15 for b in block[4:]] + [b >> 4 for b in block[4:]]
                found += [scale * code + low for code in codes]
        rows.append(found)
    return np.array(rows)


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
def test_an_error_is_the_distance_over_the_length(format: str) -> None:
    weight = np.random.default_rng(3).normal(size=(7, 96)).astype(np.float32)
    blocks = to_blocks(weight, format)
    distance = np.linalg.norm(values(blocks, format) - weight) / np.linalg.norm(weight)
    assert relative_error(weight, blocks, format) == pytest.approx(distance, rel=1e-4)
    assert (0.06 if format == "q4_1" else 0.002) < distance < 0.2
    zeros = np.zeros((2, 32), dtype=np.float32)
    assert relative_error(zeros, to_blocks(zeros, format), format) == 0


def test_worst_first_and_what_is_no_number_before() -> None:
    errors = {"a": 0.1, "b": 0.3, "c": math.nan, "d": 0.3}
    assert [name for name, _ in worst_first(errors)] == ["c", "b", "d", "a"]
    lines = error_table(worst_first({"a": 0.1, "b": 0.3, "d": 0.2}), most=2)
    assert lines[0].endswith("3 matrices: median 0.2000")
    assert [line.split()[1] for line in lines[1:]] == ["b", "d"]


@pytest.mark.parametrize(("quantization", "formats"), [("int8", ("q8_0", "q8_0")),
                                                       ("int4", ("q4_1", "q8_0"))])  # fmt: skip
def test_errors_of_a_load(quantization: str, formats: tuple[str, str], tiny: Path) -> None:
    with LLM(tiny, quantization=quantization, speculative_config=None, max_seq_len=64) as llm:
        found = dict(llm.model.quantization_errors)
        order = [error for _, error in llm.model.quantization_errors]
    assert order == sorted(order, reverse=True)
    matrices = {name: w for name, w in load_file(tiny / "model.safetensors").items() if w.ndim == 2}
    assert set(found) == set(matrices)
    for name, weight in matrices.items():
        format = formats["embed" in name or "lm_head" in name]
        distance = np.linalg.norm(values(to_blocks(weight, format), format) - weight)
        assert found[name] == pytest.approx(distance / np.linalg.norm(weight), rel=1e-3), name
    with LLM(tiny, speculative_config=None, max_seq_len=64) as llm:
        assert llm.model.quantization_errors == ()


def test_perplexity_is_that_of_torch(tiny: Path, tmp_path: Path) -> None:
    """Two windows, the second shorter, in passes of 256 rows."""
    text = tmp_path / "text"
    text.write_text("the quick brown fox, and so on; " * 45)  # 1440 tokens: one per byte
    tokenizer = load_tokenizer(None, tiny)
    ids = tokenizer.encode(text.read_text())
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    losses = []
    for start in range(0, len(ids), 1024):
        window = torch.tensor([ids[start : start + 1024]])
        with torch.inference_mode():
            scores = model(window).logits[0, :-1].double()
        losses.append(torch.nn.functional.cross_entropy(scores, window[0, 1:], reduction="none"))
    expected = float(torch.cat(losses).mean().exp())
    found = perplexity(tiny, text)
    assert found["tokens"] == len(ids) - 2 == 1438
    assert found["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert perplexity(tiny, text, tokens=300)["tokens"] == 299


def test_the_conversion_reports(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    text, target = tmp_path / "some.txt", tmp_path / "ckpt"
    text.write_text("hello there, " * 20)
    command = ["convert", f"--model_dir={tiny}", f"--output_dir={target}", "--quantization=int4"]
    assert main([*command, "--perplexity", str(text)]) == 0
    said = capsys.readouterr().err
    assert "relative error of 16 matrices: median 0." in said
    report = json.loads((target / "quantization.json").read_text())
    assert report["quantization"] == "int4" and len(report["relative_errors"]) == 16
    assert report["relative_errors"][0]["error"] > report["relative_errors"][-1]["error"] > 0
    found = report["perplexity"]
    assert found["before"] == perplexity(tiny, text)["perplexity"]
    assert found["after"] == perplexity(target, text)["perplexity"] != found["before"]
    assert (
        f"some.txt (259 tokens): {found['before']:.3f} before, {found['after']:.3f} after" in said
    )
    assert "quantization.json" in json.loads((target / "manifest.json").read_text())["files"]


@pytest.mark.parametrize("how", [{"quantization": None}, {"quantization": "int8", "tp_size": 2}])
def test_a_perplexity_of_what(how: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"perplexity: .*give --quantization"):
        ConvertOptions(perplexity=tmp_path / "x", **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [None, "a"])
def test_texts_without_a_perplexity(content: str | None, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"cannot be read|1 tokens, at least 2"):
        perplexity(tiny, path)


def test_news_that_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_file, "cache_root", lambda: tmp_path)
    path = tmp_path / "datasets" / "gensim-4.4.0" / "gensim/test/test_data/lee_background.cor"
    path.parent.mkdir(parents=True)
    path.write_text("other news")
    with pytest.raises(ModelError, match=r"expected 5d78d6da.*delete the folder"):
        news_file()
