"""Models of 8- and 4-bit weights on a device: the scores of the same weights as floats, in fewer
bytes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_builder import Driver, Sequence, prompt_ids
from quant_files import FORMATS, edit, save_quantised
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from emulators import EMULATED, devices
from gguf_files import write_gguf
from specdec_ext import LLM, SamplingParams, UnsupportedModelError, ops
from specdec_ext.models import device_unpacked, load_model
from specdec_ext.models.device_blocks import parts_of
from specdec_ext.models.place import resolve_device
from specdec_ext.models.quantize import to_blocks
from tiny_models import save_llama

VOCAB = 203
WIDE = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.1}
WHOLE = {"hidden_size": 256, "intermediate_size": 256}  # blocks of 256


def save(path: Path, *, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Path:
    model = LlamaForCausalLM.from_pretrained(save_llama(path, 3, VOCAB, **{**WIDE, **overrides}))
    model.to(dtype).save_pretrained(path)
    return path


def load(source: Path, device: str, **options: Any) -> Any:
    return load_model(source, place=resolve_device(device), max_rows=64, **options)


def scores(model: Any, ids: list[int]) -> torch.Tensor:
    return Driver(model, page_size=16).scores([(Sequence(), ids)])[0]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    logger = logging.getLogger("specdec_ext")
    caplog.set_level(logging.INFO, "specdec_ext")
    logger.addHandler(caplog.handler)  # whatever the command line has made of the logger
    yield caplog
    logger.removeHandler(caplog.handler)


@EMULATED
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"])
def test_a_gguf_file_scores_as_its_weights_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any, format: str, tied: bool
) -> None:
    """Bit for bit on a device of 8.0, whose products of floats sum in the same order."""
    monkeypatch.setenv("SPECDEC_EMU_LIMITS", f"8.0,4,{163 << 10}")
    sizes = WHOLE if format.endswith("_k") else {}
    folder = save(tmp_path / "folder", tie_word_embeddings=tied, **sizes)
    file = write_gguf(folder, tmp_path / "m.gguf", format, tokenizer=False)
    ids = prompt_ids(40, 2)
    own = load(file, "cuda-emu-fast", numerics="exact")
    floats = load(file, "cuda-emu-fast", numerics="exact", dtype="bfloat16")
    kept = {"q5_0": "q8_0", "q5_1": "q5_k"}.get(format, format)
    assert (own.info.dtype, floats.info.dtype, own.kv_dtype) == (kept, "bfloat16", torch.bfloat16)
    share = 0.55 if format.startswith("q4") else 0.75
    assert own.info.weight_bytes < share * floats.info.weight_bytes
    assert torch.equal(scores(own, ids), scores(floats, ids))
    assert "weights become" not in told.text
    table = torch.arange(VOCAB, dtype=torch.int32)
    assert torch.equal(own.head_rows(table), floats.head_rows(table))
    assert torch.equal(own.embed(table), floats.embed(table))


@devices
@pytest.mark.parametrize("numerics", ["exact", "auto"])
def test_a_row_of_a_step_has_the_bits_it_has_alone(
    tmp_path: Path, device: str, numerics: str
) -> None:
    """Products of packed weights have one kernel in both modes; attention is exact in one."""
    file = write_gguf(save(tmp_path / "folder"), tmp_path / "m.gguf", "q4_1", tokenizer=False)
    model = load(file, device, numerics=numerics)
    hidden = torch.randn(40, 64).bfloat16().float()
    together = model.head(hidden)
    assert torch.equal(together, torch.cat([model.head(row[None]) for row in hidden]))
    if numerics == "exact":
        ids = prompt_ids(40, 4)
        whole, (driver, sequence) = scores(model, ids), (Driver(model, page_size=16), Sequence())
        alone = [driver.scores([(sequence, [token])])[0] for token in ids]
        assert torch.equal(whole, torch.cat(alone))


@EMULATED
@pytest.mark.parametrize("bias", [False, True])
def test_parts_of_a_matrix_keep_their_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any, bias: bool
) -> None:
    """As in files of 4 bits that keep some matrices in more: the scores are those of the floats."""
    monkeypatch.setenv("SPECDEC_EMU_LIMITS", f"8.0,4,{163 << 10}")
    folder = save(tmp_path / "folder", **WHOLE, attention_bias=bias)
    if bias:
        tensors = load_file(folder / "model.safetensors")
        for name in tensors:
            if name.endswith(".bias"):
                tensors[name] = torch.randn_like(tensors[name].float()).bfloat16()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    formats = {"": "q4_0", "down_proj": "q6_k", "v_proj": "q8_0", "up_proj": "q5_k",
               "lm_head": "q4_k"}  # fmt: skip
    file = write_gguf(folder, tmp_path / "m.gguf", formats, tokenizer=False)
    own = load(file, "cuda-emu-fast", numerics="exact")
    layer, head = own.decoder.weights.layers[0], own.decoder.weights.head
    parts = [[part.format for part in parts_of(rows)] for rows in (layer.qkv, layer.gate_up)]
    assert parts == [["q4_0", "q8_0"], ["q4_0", "q5_k"]]
    assert [layer.o.format, layer.down.format, head.format] == ["q4_0", "q6_k", "q4_k"]
    assert own.info.dtype == "q4_0, q4_k, q5_k, q6_k, q8_0" and "weights become" not in told.text
    floats = load(file, "cuda-emu-fast", numerics="exact", dtype="bfloat16")
    assert layer.qkv.shape == tuple(floats.decoder.weights.layers[0].qkv.shape)
    assert own.info.weight_bytes < 0.6 * floats.info.weight_bytes
    ids = prompt_ids(40, 5)
    assert torch.equal(scores(own, ids), scores(floats, ids))


@devices
def test_a_part_in_floats_makes_all_of_them_floats(tmp_path: Path, device: str) -> None:
    formats = {"": "q4_0", "v_proj": "f16"}
    file = write_gguf(save(tmp_path / "folder"), tmp_path / "m.gguf", formats, tokenizer=False)
    layer = load(file, device).decoder.weights.layers[0]
    assert isinstance(layer.qkv, torch.Tensor) and layer.gate_up.format == "q4_0"


@devices
def test_a_float32_model_has_floats(tmp_path: Path, device: str) -> None:
    file = write_gguf(save(tmp_path / "folder"), tmp_path / "m.gguf", "q8_0", tokenizer=False)
    model = load(file, device, dtype="float32")
    assert model.info.dtype == "float32"
    assert isinstance(model.decoder.weights.head, torch.Tensor)


@devices
@pytest.mark.parametrize(
    ("quantization", "format", "all_formats"),
    [
        ("int8", "q8_0", "q8_0"),
        ("int4", "q4_1", "q4_1, q8_0"),
        ("fp8", "f8_g", "f8_g, q8_0"),
        ("fp8_w8a8", "f8_a8", "f8_a8, q8_0"),
    ],
)
def test_floats_become_blocks_at_load(
    tmp_path: Path, device: str, quantization: str, format: str, all_formats: str
) -> None:
    folder = save(tmp_path / "folder", intermediate_size=128)
    model = load(folder, device, quantization=quantization, numerics="exact")
    assert model.info.dtype == all_formats
    matrices = {n: w for n, w in load_file(folder / "model.safetensors").items() if w.ndim == 2}
    assert dict(model.quantization_errors).keys() == matrices.keys()
    weight = matrices["model.layers.1.mlp.down_proj.weight"].float().numpy()
    expected = ops.pack_weight(torch.from_numpy(to_blocks(weight, format)), format)
    found = model.decoder.weights.layers[1].down
    assert found.format == format and torch.equal(found.data.cpu(), expected.data)
    # The same text as of the converted file, and speculative text is plain.
    prompts = [[5, 9, 2, 9, 2, 9, 2], list(range(40, 4, -1)), [3, 1, 4, 3, 1, 4, 3, 1]]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    texts = []
    for spec in (None, {"method": "lookahead", "adaptive": False}, {"method": "ngram"}):
        with LLM(folder, device=device, speculative_config=spec, quantization=quantization,
                 numerics="exact", max_batch_size=2, max_seq_len=96) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([list(out.outputs[0].token_ids) for out in outputs])
    assert texts[1] == texts[0] and texts[2] == texts[0]


@devices
def test_a_float32_model_has_no_blocks_on_a_device(tmp_path: Path, device: str) -> None:
    folder = save(tmp_path / "folder", dtype=torch.float32)
    with pytest.raises(UnsupportedModelError, match=r"int8.*16-bit models; give dtype='bfloat16'"):
        load(folder, device, quantization="int8")
    assert load(folder, device, quantization="int8", dtype="float16").info.dtype == "q8_0"


@devices
def test_rows_that_are_no_whole_groups_stay_floats(tmp_path: Path, device: str) -> None:
    folder = save(tmp_path / "folder", hidden_size=48, num_attention_heads=6)
    model = load(folder, device, quantization="int4")
    layer = model.decoder.weights.layers[0]
    assert isinstance(layer.qkv, torch.Tensor) and isinstance(layer.down, ops.PackedWeight)
    assert any("stay in bfloat16" in note for note in model.info.warnings)


@devices
@pytest.mark.parametrize(("method", "format"), [("int4", "q4_g"), ("int8", "q8_g")])
def test_groups_and_tables_of_a_mapping(
    tmp_path: Path, device: str, method: str, format: str
) -> None:
    folder = save(tmp_path / "folder", intermediate_size=128)
    how = {"method": method, "group_size": 64, "embeddings": "keep", "head": "int4"}
    model = load(folder, device, quantization=how, numerics="exact")
    weights = load_file(folder / "model.safetensors")
    down = weights["model.layers.1.mlp.down_proj.weight"].float().numpy()
    expected = ops.pack_weight(torch.from_numpy(to_blocks(down, format, 64)), format)
    found = model.decoder.weights.layers[1].down
    assert found.format == format and torch.equal(found.data.cpu(), expected.data)
    ids = torch.arange(48, dtype=torch.int32)
    table = weights["model.embed_tokens.weight"][:48].bfloat16().float()
    assert torch.equal(torch.as_tensor(model.embed(ids)).float().cpu(), table)
    assert set(dict(model.quantization_errors)) == {
        name for name, value in weights.items() if value.ndim == 2 and "embed" not in name
    }


@devices
def test_a_head_of_some_tokens_is_packed_too(tmp_path: Path, device: str) -> None:
    file = write_gguf(save(tmp_path / "folder"), tmp_path / "m.gguf", "q8_0", tokenizer=False)
    ids = torch.tensor([7, 170, 3, 33, 34])
    whole = load(file, device, numerics="exact")
    part = load(file, device, numerics="exact", draft=True, head_ids=ids.numpy())
    assert isinstance(part.decoder.weights.head, ops.PackedWeight)
    hidden = torch.randn(3, 64)
    assert torch.equal(part.head(hidden), whole.head(hidden)[:, ids])


# What matrices of a checkpoint (quant_files.py) are kept as; none: scales of 48 columns.
KEPT = {
    "awq": "q4_g", "awq-32": "q4_0", "gptq": "q4_0", "gptq-asymmetric": "q4_g", "gptq_v2": "q4_g",
    "pack-quantized": "q4_0", "pack-asymmetric": "q4_g", "int-quantized": "q8_g",
    "int-tensor": "q8_g", "float-tensor": "f8_g", "float-channel": "f8_a8", "float-block": "",
    "fp8": "f8_a8", "fp8-block": "f8_g", "modelopt": "f8_a8",
}  # fmt: skip


@EMULATED
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_scores_as_its_weights_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any, name: str
) -> None:
    """Bit for bit, as a GGUF file; where activations become e4m3, as near as these are."""
    monkeypatch.setenv("SPECDEC_EMU_LIMITS", f"8.0,4,{163 << 10}")
    folder, _, _ = save_quantised(tmp_path, name)
    own = load(folder, "cuda-emu-fast", numerics="exact")
    floats = load(folder, "cuda-emu-fast", numerics="exact", dtype="bfloat16")
    assert own.decoder.weights.packed_formats() == ({KEPT[name]} if KEPT[name] else set())
    assert not floats.decoder.weights.packed_formats() and "weights become" not in told.text
    layer, wide = own.decoder.weights.layers[0], floats.decoder.weights.layers[0]
    most = {"q4_0": 0.3, "q4_g": 0.32, "": 1.0}.get(KEPT[name], 0.54)
    assert layer.gate_up.nbytes <= most * wide.gate_up.nbytes
    ids = [token % 48 for token in prompt_ids(40, 5)]
    found, expected = scores(own, ids), scores(floats, ids)
    if KEPT[name] != "f8_a8":
        assert torch.equal(found, expected)
    else:
        error = float((found - expected).norm() / expected.norm())
        assert 0.005 < error < 0.12, error


@EMULATED
@pytest.mark.parametrize("name", ["awq", "int-quantized", "fp8-block"])
def test_text_of_a_quantised_checkpoint_is_that_of_its_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("SPECDEC_EMU_LIMITS", f"8.0,4,{163 << 10}")
    folder, _, _ = save_quantised(tmp_path, name)
    prompts = [[5, 9, 2, 9, 2, 9, 2], list(range(40, 4, -1)), [3, 1, 4, 3, 1, 4, 3, 1]]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    texts = []
    for spec, dtype in ((None, "bfloat16"), (None, "auto"), ({"method": "ngram"}, "auto")):
        with LLM(folder, device="cuda-emu-fast", speculative_config=spec, dtype=dtype,
                 numerics="exact", max_batch_size=2, max_seq_len=96) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([list(out.outputs[0].token_ids) for out in outputs])
    assert texts[1] == texts[0] and texts[2] == texts[0]


@devices
def test_a_float32_checkpoint_has_floats_with_one_line(
    tmp_path: Path, device: str, told: Any
) -> None:
    folder, _, _ = save_quantised(tmp_path, "int-quantized")
    edit(folder, dtype="float32")
    model = load(folder, device)
    assert model.info.dtype == "float32" and not model.decoder.weights.packed_formats()
    # A record may reach the handler twice: by the logger and by the root.
    found = {id(r): r.getMessage() for r in told.records if "weights become" in r.getMessage()}
    assert len(found) == 1 and "q8_g weights become float32" in next(iter(found.values()))


@EMULATED
@pytest.mark.parametrize("name", ["q4_1", "q8_0", "fp8_w8a8", "float-channel", "fp8", "modelopt"])
def test_a_prompt_in_fast_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its products are torch's, of the weights unpacked: near the scores of this package's kernel,
    whose sums are others. A prompt has 40 rows here."""
    monkeypatch.setattr(device_unpacked, "FEWEST_ROWS", 40)
    monkeypatch.setattr(device_unpacked, "FEWEST_ROWS_E4M3", 40)
    products: list[str] = []

    def spy(kind: str) -> None:
        real = getattr(torch, kind)

        def run(*args: Any, **how: Any) -> Any:
            products.append(kind)
            return real(*args, **how)

        monkeypatch.setattr(torch, kind, run)

    vocab, options = VOCAB, {}
    if name.startswith("q"):
        folder = write_gguf(save(tmp_path / "f", **WHOLE), tmp_path / "m.gguf", name,
                            tokenizer=False)  # fmt: skip
    elif name == "fp8_w8a8":
        folder, options = save(tmp_path / "f", **WHOLE), {"quantization": name}
    else:
        folder, _, _ = save_quantised(tmp_path, name)
        vocab = 48
    ids = [token % vocab for token in prompt_ids(40, 5)]
    exact = scores(load(folder, "cuda-emu-fast", numerics="exact", **options), ids)
    model = load(folder, "cuda-emu-fast", numerics="fast", **options)
    for kind in ("mm", "_scaled_mm"):
        spy(kind)
    found = scores(model, ids)
    e4m3 = not name.startswith("q")
    # q, k and v; o; gate and up of each layer; the last one's down has the needed rows alone.
    assert products.count("_scaled_mm" if e4m3 else "mm") >= 4 * model.num_layers - 1
    # A sum's last bit may decide to which of two e4m3 numbers an input is rounded.
    off = float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    assert off < (0.15 if e4m3 else 0.03), off
