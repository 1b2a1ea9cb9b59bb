"""A shard of a model: which rows it loads, and that its numbers are those of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quant_files import FORMATS, edit, save_quantised

from gguf_files import write_gguf
from specdec_ext import _core
from specdec_ext.config.quantization import Quantization
from specdec_ext.errors import ConfigError, UnsupportedModelError
from specdec_ext.models.config_reader import read_config
from specdec_ext.models.host_arrays import as_torch
from specdec_ext.models.native import NativeModel
from specdec_ext.models.native_config import native_shape
from specdec_ext.models.shard import Shard
from tiny_models import save_llama, save_tiny

PAGE, PAGES = 8, 12
UNEVEN = {
    "hidden_size": 288, "intermediate_size": 160, "num_attention_heads": 9,
    "num_key_value_heads": 3,
}  # fmt: skip


def load(folder: Path, shard: Shard | None = None, **options: Any) -> NativeModel:
    config = read_config(folder)
    options = {"dtype": "float32", "max_rows": 600, **options}
    if "quantization" in options:
        options["quantization"] = Quantization.of(options["quantization"])
    model = NativeModel(
        config, native_shape(config), options.pop("dtype"), impl_reason="", shard=shard, **options
    )
    shape = (model.num_layers, PAGES, model.num_kv_heads, PAGE, model.head_dim)
    model.bind_cache(*(_core.LazyZeros(shape, model.kv_dtype_name) for _ in range(2)))
    return model


def load_all(folder: Path, size: int, sums: bool = False, **options: Any) -> list[NativeModel]:
    shape = native_shape(read_config(folder))
    shards = [Shard.of(shape, rank, size, sums=sums) for rank in range(size)]
    return [load(folder, shard, **options) for shard in shards]


def run(ranks: list[NativeModel], plan: Any, best: bool = False, hidden: Any = None) -> np.ndarray:
    """A step of all ranks, one after another in this process: scores, or ids."""
    steps: list[Any] = []
    for rank, model in enumerate(ranks):
        embedded = steps[0].embedded_rows() if rank else None
        steps.append(_core.ShardedStep(model.core, plan, embedded))
    gathered: Any = None
    for part in range(steps[0].num_parts):
        chunks = np.zeros((len(ranks), steps[0].chunk_bytes(part)), dtype=np.uint8)
        for step, chunk in zip(steps, chunks, strict=True):
            step.run_part(part, gathered, chunk)
        gathered = chunks.reshape(-1)
    rows, found = plan.num_logit_rows, []
    for rank, (model, step) in enumerate(zip(ranks, steps, strict=True)):
        assert model.shard is not None
        own = model.shard.scores(rank)
        out = (
            np.empty((rows, 8), np.uint8) if best else np.empty((rows, own.stop - own.start), "f4")
        )
        step.finish(gathered, out, None if rank else hidden)
        found.append(out)
    if not best:
        return np.concatenate(found, axis=1)
    ids = np.empty(rows, dtype=np.int32)
    _core.merge_best(np.stack(found), ids)
    return ids


def tree_plan() -> Any:
    return _core.make_step_plan(
        [[5, 6, 7, 8, 9], [1, 2, 3]],
        kv_len=[0, 0],
        page_table=[[3], [1]],
        parents=[[-1, 0, 0, 1, 1], []],
    )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "int8"},
     {"quantization": "int4", "dtype": "bfloat16"},
     {"quantization": {"method": "int4", "group_size": 96, "embeddings": "keep"}}],
    ids=["float32", "bfloat16", "float16", "int8", "int4", "mapping"],
)  # fmt: skip
def test_bits_are_those_of_one_rank(
    tmp_path: Path, size: int, tied: bool, options: dict[str, Any]
) -> None:
    folder = save_llama(tmp_path, 3, 300, tie_word_embeddings=tied, **UNEVEN)
    one, ranks = load(folder, **options), load_all(folder, size, **options)
    hidden = np.empty((8, 288), dtype=np.float32)
    expected = one.forward(tree_plan(), hidden)
    sharded = np.empty_like(hidden)
    np.testing.assert_array_equal(run(ranks, tree_plan(), hidden=sharded), expected)
    np.testing.assert_array_equal(sharded, hidden)
    np.testing.assert_array_equal(run(ranks, tree_plan(), best=True), expected.argmax(1))
    # What drafters ask of rank 0 alone.
    ids = np.array([0, 150, 299], dtype=np.int32)
    np.testing.assert_array_equal(ranks[0].head(hidden), one.head(hidden))
    np.testing.assert_array_equal(ranks[0].head_rows(ids), one.head_rows(ids))
    np.testing.assert_array_equal(ranks[0].embed(ids), one.embed(ids))
    with pytest.raises(ValueError, match="ask rank 0"):
        ranks[1].head(hidden)


@pytest.mark.parametrize("format", ["q4_0", "q8_0", "q6_k", "bfloat16"])
def test_bits_of_a_gguf_file(tmp_path: Path, format: str) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    folder = save_tiny(tmp_path / "folder", **wide)
    file = write_gguf(folder, tmp_path / "model.gguf", format)
    one, ranks = load(file, own_widths=True), load_all(file, 2, own_widths=True)
    np.testing.assert_array_equal(run(ranks, tree_plan()), one.forward(tree_plan()))
    assert one.info.dtype == format


@pytest.mark.parametrize(
    "family",
    ["llama_biased", "mistral_window", "gemma2", "gemma3", "qwen3_biased", "qwen2", "phi3_window"],
)
def test_bits_of_other_families(saved: Any, family: str) -> None:
    folder = saved(family).folder
    one, ranks = load(folder), load_all(folder, 2)
    expected = one.forward(tree_plan())
    np.testing.assert_array_equal(run(ranks, tree_plan()), expected)
    np.testing.assert_array_equal(run(ranks, tree_plan(), best=True), expected.argmax(1))


# -- fast mode: partial sums ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("options", "near"),
    # Sums of other parts: float32 differs by rounding, bfloat16 and 8 bits round what projections
    # read. With 8 bits a few rows show it: those of which a number was nearly a half.
    [({}, 2e-5), ({"dtype": "bfloat16"}, 3e-2), ({"quantization": "int8"}, 1e-2)],
    ids=["float32", "bfloat16", "int8"],
)
def test_partial_sums_are_the_model_too(
    tmp_path: Path, size: int, options: dict[str, Any], near: float
) -> None:
    folder = save_llama(tmp_path, 3, 300, **UNEVEN)
    one, ranks = load(folder, **options), load_all(folder, size, sums=True, **options)
    expected, found = one.forward(tree_plan()), run(ranks, tree_plan())
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=near)
    if options.get("dtype") != "bfloat16":
        distances = np.abs(found - expected).max(axis=1) / scale
        assert (distances <= 2e-5).mean() >= 0.75, distances
    # Or they would not be needed. Projections read rounded bfloat16, which may hide it.
    if options.get("dtype") != "bfloat16":
        assert not np.array_equal(found, expected)
    np.testing.assert_array_equal(run(ranks, tree_plan(), best=True), found.argmax(1))
    step = _core.ShardedStep(ranks[0].core, tree_plan())
    assert step.num_parts == 2 * one.num_layers and step.chunk_bytes(0) == 8 * 288 * 4
    assert {rank.numerics for rank in ranks} == {"fast"}
    assert sum(rank.info.weight_bytes for rank in ranks) < 1.02 * one.info.weight_bytes


def test_partial_sums_do_not_depend_on_company(tmp_path: Path) -> None:
    """Text with drafts is plain decoding's on as many ranks."""
    ranks = load_all(save_llama(tmp_path, 3, 300, **UNEVEN), 2, sums=True)
    together = run(ranks, tree_plan())
    alone = run(ranks, _core.make_step_plan([[1, 2, 3]], kv_len=[0], page_table=[[2]]))
    np.testing.assert_array_equal(together[5:], alone)


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("width", ["float32", "q8_0", "awq-32", "fp8-block"])
def test_bits_of_projections_in_one_matrix(
    saved: Any, width: str, share: float, tmp_path: Path
) -> None:
    """Heads of which a part is rotated have their rows in another order; ranks have whole heads."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    own = {} if width == "float32" else {"own_widths": True}
    if width in FORMATS:
        model, _, _ = save_quantised(tmp_path, width, fused=True)
        edit(model, rope_parameters=rope)
    else:
        model = saved("phi3", rope_parameters=rope).folder
    if width == "q8_0":
        file = tmp_path / "model.gguf"
        model = write_gguf(model, file, width, architecture="phi3", tokenizer=False)
    one, ranks = load(model, **own), load_all(model, 2, **own)
    plan = tree_plan()
    expected = one.forward(plan)
    np.testing.assert_array_equal(run(ranks, plan), expected)
    sums = run(load_all(model, 2, sums=True, **own), plan)
    off = np.abs(sums - expected).max() / np.abs(expected).max()
    assert off < (1e-3 if width == "awq-32" else 2e-5)  # an input of 8 bits may be another


@pytest.mark.parametrize(
    "family", ["llama_biased", "gemma2", "gemma3", "qwen3_biased", "phi3_window"]
)
def test_partial_sums_of_other_families(saved: Any, family: str) -> None:
    """A bias of a sum is added once."""
    folder = saved(family).folder
    one, ranks = load(folder), load_all(folder, 2, sums=True)
    expected, found = one.forward(tree_plan()), run(ranks, tree_plan())
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_partial_sums_of_a_gguf_file(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    folder = save_tiny(tmp_path / "folder", **wide)
    for format in ("q4_0", "q8_0"):
        file = write_gguf(folder, tmp_path / f"{format}.gguf", format)
        one, ranks = load(file, own_widths=True), load_all(file, 2, sums=True, own_widths=True)
        expected, found = one.forward(tree_plan()), run(ranks, tree_plan())
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    file = write_gguf(folder, tmp_path / "wide.gguf", "q6_k")
    with pytest.raises(UnsupportedModelError, match=r"q6_k has blocks of 256; use numerics"):
        load_all(file, 2, sums=True, own_widths=True)


def test_rows_beyond_a_piece_of_the_feed_forward(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, 3, 300, max_position_embeddings=2048)
    one, ranks = load(folder), load_all(folder, 2)
    for model in (one, *ranks):
        shape = (model.num_layers, 80, model.num_kv_heads, PAGE, model.head_dim)
        model.bind_cache(*(_core.LazyZeros(shape, "float32") for _ in range(2)))
    tokens = [[7 * i % 300 for i in range(600)]]
    plan = _core.make_step_plan(
        tokens, kv_len=[0], page_table=[list(range(75))], logits_for_all_rows=False
    )
    np.testing.assert_array_equal(run(ranks, plan), one.forward(plan))


def test_a_nan_is_no_token() -> None:
    """Whichever rank meets it."""
    parts = np.zeros((2, 3, 8), dtype=np.uint8)
    parts[..., :4] = np.array([[1.0, 2.0, 5.0], [1.0, 3.0, 9.0]], "<f4").view("u1").reshape(2, 3, 4)
    parts[..., 4:] = np.array([[7, 8, -1], [70, 80, 90]], "<i4").view("u1").reshape(2, 3, 4)
    ids = np.empty(3, dtype=np.int32)
    _core.merge_best(parts, ids)
    assert ids.tolist() == [7, 80, -1]  # the first of equals


def test_a_rank_reads_its_own_rows_alone(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, 3, 300, **UNEVEN)
    size = {name: int(np.prod(shape)) * 4 for name, shape in
            native_shape(read_config(folder)).expected_weights().items()}  # fmt: skip
    one, (first, second) = load(folder), load_all(folder, 2)
    assert one.bytes_read == sum(size.values())
    norms = sum(bytes for name, bytes in size.items() if "norm" in name)
    tables = size["model.embed_tokens.weight"] + size["lm_head.weight"]
    split = one.bytes_read - norms - tables
    # Both halves of every projection, once; rank 0 has all tokens, rank 1 those that it scores.
    head = size["lm_head.weight"] * (300 - 160) // 300
    assert first.bytes_read + second.bytes_read == split + 2 * norms + tables + head
    assert second.bytes_read < 0.45 * split + norms + head
    assert first.info.weight_bytes + second.info.weight_bytes < 1.02 * one.info.weight_bytes


def test_kv_moves_are_repeated(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, 3, 300)
    config = read_config(folder)
    model = NativeModel(config, native_shape(config), "float32", impl_reason="", max_rows=8)
    shape = (model.num_layers, 3, model.num_kv_heads, PAGE, model.head_dim)
    pages = [np.random.default_rng(i).random(shape, dtype=np.float32) for i in range(2)]
    expected = [page.copy() for page in pages]
    model.bind_cache(*map(as_torch, pages))
    moves = np.array([[2 * PAGE + 3, 1], [5, 2 * PAGE + 3]], dtype=np.int32)
    _core.move_kv(model.core, moves)
    for page, before in zip(pages, expected, strict=True):
        before[:, 0, :, 1] = before[:, 2, :, 3]
        before[:, 2, :, 3] = before[:, 0, :, 5]
        np.testing.assert_array_equal(page, before)
    with pytest.raises(ValueError, match=r"place 24: places are 0\.\.23"):
        _core.move_kv(model.core, np.array([[24, 0]], dtype=np.int32))


def test_plans_as_words() -> None:
    plan, copy = tree_plan(), _core.StepPlan(max_requests=1, max_rows=1, max_pages_per_request=1)
    words = plan.pack(PAGE)
    copy.unpack(words)
    for name in ("num_rows", "num_requests", "num_logit_rows", "needs_logits"):
        assert getattr(copy, name) == getattr(plan, name)
    for name in ("tokens", "positions", "parents", "cu_rows", "kv_len", "is_tree", "logit_rows",
                 "page_table", "mask"):  # fmt: skip
        np.testing.assert_array_equal(getattr(copy, name), getattr(plan, name), name)
    for bad in (words[:-1], np.append(words, 0), words[:3], -words):
        with pytest.raises(ValueError, match="plan packet"):
            copy.unpack(bad)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [({}, 3, "has 2 K/V heads.*tensor_parallel_size <= 2"),
     ({"intermediate_size": 32}, 2, "intermediate_size = 32 has 1 panels of 32")],
)  # fmt: skip
def test_too_many_ranks(tmp_path: Path, changes: dict[str, int], size: int, message: str) -> None:
    folder = save_llama(tmp_path, 3, 300, **changes)
    with pytest.raises(ConfigError, match=message):
        Shard.of(native_shape(read_config(folder)), 0, size)


def test_groups_of_heads_are_whole(tmp_path: Path) -> None:
    shape = native_shape(read_config(save_llama(tmp_path, 3, 300, **UNEVEN)))
    first, second = (Shard.of(shape, rank, 2) for rank in range(2))
    assert first.kv_heads == (0, 2, 3) and first.hidden == (0, 160, 288)
    assert first.ffn == (0, 96, 160) and first.head == (0, 160, 300)
    layer = "model.layers.0."
    for name, rows in (
        ("self_attn.q_proj.weight", slice(192, 288)), ("self_attn.k_proj.bias", slice(64, 96)),
        ("self_attn.o_proj.weight", slice(160, 288)), ("mlp.up_proj.weight", slice(96, 160)),
        ("input_layernorm.weight", None), ("self_attn.q_norm.weight", None),
    ):  # fmt: skip
        assert second.rows(layer + name) == rows, name
    assert second.rows("lm_head.weight") == slice(160, 300) and first.rows("lm_head.weight") is None
