"""Ranks with a device each give what one device gives: two processes of the emulation everywhere.

The tensors' link between them is the shared memory of a machine's ranks; NCCL takes its place
between GPUs, and no GPU has run it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_cases import (
    GREEDY,
    METHODS,
    PROMPTS,
    SAMPLED,
    Folders,
    Where,
    check,
    counts_of,
    methods,
    open_llm,
    record_steps,
    texts_of,
)
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM

from emulators import EMULATED
from gguf_files import write_gguf
from specdec_ext import LLM, ops
from specdec_ext.errors import UnsupportedModelError
from specdec_ext.models.device_blocks import StackedWeight
from specdec_ext.models.device_products import Products
from specdec_ext.models.place import CPU
from specdec_ext.parallel.team import Team
from specdec_ext.workflow.convert import ConvertOptions, convert
from tensor_parallel import started_team
from tiny_models import save_llama, save_tiny

pytestmark = EMULATED

EMU = "cuda-emu-fast"
FEW = PROMPTS[1:4]
UNEVEN = {
    "hidden_size": 288, "intermediate_size": 160, "num_attention_heads": 9,
    "num_key_value_heads": 3,
}  # fmt: skip
AHEAD = [Where(EMU, 0), Where(EMU, 2)]
EVERY = ["none", "lookahead", "ngram", "suffix", "user", "medusa", "redrafter", "tree", "eagle3"]
SOON = ["none", "lookahead", "medusa"]  # the others at this depth in test-slow


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with started_team() as team:
        yield team


def open_two(models: Folders, method: Any, where: Where = AHEAD[0], **options: Any) -> LLM:
    return open_llm(models, method, where, tensor_parallel_size=2, **options)


def few(plain: dict[str, Any], law: str) -> list[list[int]]:
    texts: list[list[int]] = plain[law][1:4]
    return texts


# -- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "where"),
    [
        pytest.param(name, where, id=f"{name}-depth {where.depth}",
                     marks=pytest.mark.slow if where.depth == 0 and name not in SOON else ())
        for where in AHEAD for name in EVERY
    ],
)  # fmt: skip
def test_texts_and_counts(
    team: Team, models: Folders, plain_texts: dict[str, Any], where: Where, method: str
) -> None:
    """Drafts are made on rank 0's device: what they are is known to nobody's host."""
    counts = []
    for open_it in (open_llm, open_two):
        # Prompts are not cut by what steps take, which differs from run to run.
        settings = {"max_prefill_slowdown": None}
        with open_it(models, method, where, numerics="exact", scheduler=settings) as llm:
            assert llm.engine.numerics == "exact"
            assert texts_of(llm, GREEDY, FEW) == few(plain_texts, "greedy")
            assert texts_of(llm, SAMPLED, FEW) == few(plain_texts, "sampled")
            counts.append(counts_of(llm))
    assert counts[0] == counts[1]
    assert (counts[1]["num_accepted_tokens"] > 0) == (method != "none")


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": {"max_num_tokens": 17}},
        {"scheduler": {"policy": "max_utilization", "max_seq_len": 64},
         "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 80}},
        {"scheduler": {"policy": "max_utilization", "max_seq_len": 64},
         "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 80,
                             "host_cache_size": 1 << 26, "host_link_gb_per_s": 1e6}},
        {"kv_cache_config": {"tokens_per_block": 8, "max_tokens": 1600,
                             "enable_block_reuse": True}},
    ],
    ids=["chunks", "preemption", "swapping", "reuse"],
)  # fmt: skip
def test_schedules(
    team: Team, models: Folders, plain_texts: dict[str, Any], options: dict[str, Any]
) -> None:
    with open_two(models, "lookahead", Where(EMU, 1), **options) as llm:
        for _ in range(2):  # with reuse the second time reads what the first has published
            assert texts_of(llm, GREEDY, FEW) == few(plain_texts, "greedy")
        stats = llm.get_metrics()["executor"]
    if "policy" in options.get("scheduler", {}):
        assert stats["preemptions"] > 0
    if "host_cache_size" in options.get("kv_cache_config", {}):
        assert stats["swapped_in"] == stats["swapped_out"] == stats["preemptions"]
    if "enable_block_reuse" in options.get("kv_cache_config", {}):
        assert stats["cached_tokens"] > 0


def test_what_the_host_decides(team: Team, models: Folders, plain_texts: dict[str, Any]) -> None:
    """It accepts from scores, and says which K/V is moved before the next step, on all ranks."""
    params = dataclasses.replace(GREEDY, logprobs=2)
    found = []
    for open_it in (open_llm, open_two):
        with open_it(models, "lookahead", Where(EMU, 1), numerics="exact") as llm:
            outputs = llm.generate(FEW, params, use_tqdm=False)
            assert [list(o.outputs[0].token_ids) for o in outputs] == few(plain_texts, "greedy")
            found.append([o.outputs[0].logprobs for o in outputs])
            assert check(llm)["num_accepted_draft_tokens"] > 0
    assert found[0] == found[1]


@methods(["none", "lookahead", "medusa"])
def test_fast_mode(team: Team, models: Folders, plain_texts: dict[str, Any], method: str) -> None:
    """Partial sums are added up: half as many exchanges, other bits, here the same text."""
    link = team.link
    with open_two(models, METHODS[method](models)) as llm:
        assert llm.engine.numerics == "fast"
        assert texts_of(llm, GREEDY, FEW) == few(plain_texts, "greedy")
        layers = llm.model.info.num_layers
        before = link._gathers  # type: ignore[attr-defined]
        passes = llm.get_metrics()["num_forward_passes"]
        texts_of(llm, GREEDY, [[1]])
        steps = llm.get_metrics()["num_forward_passes"] - passes
        gathers = link._gathers - before  # type: ignore[attr-defined]
    # A step's arrays, its rows, two sums of each layer, its choices; moves, where drafts were read.
    drafts = method != "none"
    assert gathers == steps * (2 * layers + 3 + drafts) - drafts


@methods(["lookahead", "medusa"])
def test_padded_steps(
    team: Team, models: Folders, plain_texts: dict[str, Any], method: str
) -> None:
    """Steps of a bucket's size, as CUDA graphs replay them: what pads them is nobody's on any
    rank."""
    with open_two(models, method, Where(EMU, 1), numerics="exact") as llm:
        recorder = record_steps(llm)
        assert texts_of(llm, GREEDY, FEW) == few(plain_texts, "greedy")
        assert recorder.replayed > recorder.recorded > 0
        check(llm)


# -- bits -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three K/V heads: two groups on one rank, one on the other."""
    folder = save_llama(tmp_path_factory.mktemp("uneven"), 3, 300, **UNEVEN)
    generator = torch.Generator().manual_seed(1)

    def scales(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            f"model.layers.{layer}.self_attn.{name}": torch.rand(3, generator=generator) + 0.5
            for layer in range(2) for name in ("k_scale", "v_scale")
        }  # fmt: skip

    return change(folder, scales)


def change(
    folder: Path, make: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> Path:
    """The folder with other tensors in it."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, **make(weights)}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"dtype": "float16", "kv_cache_config": {"dtype": "fp8"}},
     {"dtype": "bfloat16", "quantization": "int8"}, {"dtype": "bfloat16", "quantization": "int4"},
     {"dtype": "bfloat16", "quantization": "fp8"},
     {"dtype": "bfloat16", "quantization": "fp8_w8a8"}],
    ids=["float32", "bfloat16", "fp8 pages", "int8", "int4", "fp8", "fp8_w8a8"],
)  # fmt: skip
def test_bits_of_widths_and_uneven_groups(
    team: Team, uneven: Path, options: dict[str, Any]
) -> None:
    found = []
    for ranks in (1, 2):
        settings = {"device": EMU, "max_batch_size": 3, "max_seq_len": 96, **options}
        with LLM(
            uneven, tensor_parallel_size=ranks, numerics="exact",
            speculative_config={"method": "ngram", "adaptive": False}, **settings,
        ) as llm:  # fmt: skip
            greedy = dataclasses.replace(GREEDY, return_generation_logits=True, max_tokens=8)
            outputs = llm.generate(PROMPTS[:3], greedy, use_tqdm=False)
            found.append([out.outputs[0].generation_logits.numpy() for out in outputs])
            short = dataclasses.replace(SAMPLED, max_tokens=8)
            found[-1] += [np.array(texts_of(llm, short, PROMPTS[:3]))]
            assert llm.model.info.num_kv_heads == 3
            assert llm.model.num_kv_heads == (3 if ranks == 1 else 2)
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_sums_of_narrow_weights(team: Team, uneven: Path, quantization: str | None) -> None:
    """In fast mode a rank has columns of the output and the down projection."""
    found = []
    for ranks in (1, 2):
        with LLM(
            uneven, device=EMU, tensor_parallel_size=ranks, dtype="bfloat16", max_seq_len=96,
            quantization=quantization, max_batch_size=3, speculative_config=None,
        ) as llm:  # fmt: skip
            asked = dataclasses.replace(GREEDY, return_generation_logits=True, max_tokens=1)
            outputs = llm.generate(FEW, asked, use_tqdm=False)
            found.append(torch.cat([out.outputs[0].generation_logits for out in outputs]))
    one, two = found
    assert not torch.equal(one, two)
    assert (one - two).abs().max() < 0.04 * one.abs().max()


@pytest.mark.parametrize("kind", ["q4_0", "q6_k", "shards"])
def test_bits_of_files(
    team: Team, uneven: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """A rank reads its rows of GGUF's blocks; of a converted model its own folder alone."""
    root = tmp_path_factory.mktemp("files")
    if kind == "shards":
        folders = [uneven, convert(uneven, root / "two", ConvertOptions(tp_size=2)).folder]
    else:
        wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        file = write_gguf(save_tiny(root / "folder", **wide), root / "model.gguf", kind)
        folders = [file, file]
    found = []
    for ranks, folder in enumerate(folders, start=1):
        with LLM(
            folder, device=EMU, numerics="exact", tensor_parallel_size=ranks, max_seq_len=96,
            max_batch_size=3, speculative_config={"method": "ngram", "adaptive": False},
            **({"dtype": "bfloat16"} if kind == "shards" else {}),
        ) as llm:  # fmt: skip
            asked = dataclasses.replace(GREEDY, return_generation_logits=True, max_tokens=6)
            outputs = llm.generate(FEW, asked, use_tqdm=False)
            found.append([out.outputs[0].generation_logits.numpy() for out in outputs])
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


def test_shards_of_rows_are_not_added_up(uneven: Path, tmp_path: Path, team: Team) -> None:
    folder = convert(uneven, tmp_path / "two", ConvertOptions(tp_size=2)).folder
    with pytest.raises(UnsupportedModelError, match=r"numerics = 'auto' on cuda-emu-fast splits"):
        LLM(folder, device=EMU, tensor_parallel_size=2)


def test_biases_sandwich_norms_and_a_capped_tied_head(
    team: Team, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What other families add to a layer is there once, whoever adds up."""
    torch.manual_seed(2)
    biased = save_llama(
        tmp_path_factory.mktemp("biased"), 7, 96, attention_bias=True, mlp_bias=True
    )
    change(
        biased,
        lambda weights: {n: torch.randn(w.shape) for n, w in weights.items() if "bias" in n},
    )
    capped = tmp_path_factory.mktemp("gemma2")
    Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=16,
            initializer_range=0.2, max_position_embeddings=256, final_logit_softcapping=2.0,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    ).save_pretrained(capped)  # fmt: skip
    params = dataclasses.replace(GREEDY, max_tokens=12)
    for folder in (biased, capped):
        prompts = [[token % 96 for token in prompt] for prompt in FEW]
        drawn = dataclasses.replace(SAMPLED, max_tokens=12)
        with LLM(folder, device="cpu", speculative_config=None, dtype="float32") as llm:
            wanted = [texts_of(llm, law, prompts) for law in (params, drawn)]
        for numerics in ("exact", "fast"):
            with LLM(
                folder, device=EMU, speculative_config={"method": "ngram", "adaptive": False},
                dtype="float32", tensor_parallel_size=2, numerics=numerics, max_seq_len=96,
                kv_cache_config={"tokens_per_block": 8, "max_tokens": 800}, max_batch_size=3,
                scheduler_config={"overlap_depth": 1},
            ) as llm:  # fmt: skip
                found = [texts_of(llm, law, prompts) for law in (params, drawn)]
                assert found == wanted, (folder, numerics)


def test_products_are_cut_as_the_whole_ones_are(
    team: Team, uneven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device of 9.0 the number of columns says how k is cut, for depths that no tiny model has
    (tests/kernels/test_cuda_linear.py)."""
    seen = set()
    linear = ops.linear

    def spy(x: Any, weight: Any, **how: Any) -> Any:
        seen.add((weight.shape[0], how["cut_columns"]))
        return linear(x, weight, **how)

    monkeypatch.setattr("specdec_ext.models.device_products.ops.linear", spy)
    with LLM(uneven, device=EMU, numerics="exact", tensor_parallel_size=2, max_seq_len=96,
             max_batch_size=3, speculative_config=None) as llm:  # fmt: skip
        texts_of(llm, dataclasses.replace(GREEDY, max_tokens=2), [[1, 2]])
    # Rank 0's of q, k and v; o and down; gate and up; the head.
    assert seen == {(320, 480), (160, 288), (192, 320), (160, 300)}


@pytest.mark.parametrize(("cut_columns", "wanted"), [(0, 96), (480, 480)])
def test_parts_of_a_packed_weight_are_cut_as_the_whole_is(
    cut_columns: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else q, k and v in several formats would have other bits on ranks than on one device."""
    seen: list[tuple[int, int]] = []

    def spy(x: torch.Tensor, weight: Any, *, cut_columns: int, **_: Any) -> None:
        seen.append((weight.shape[0], cut_columns))

    monkeypatch.setattr("specdec_ext.models.device_products.ops.linear", spy)
    blocks = torch.zeros(64, 2 * 18, dtype=torch.uint8)
    parts = tuple(ops.pack_weight(blocks[:rows], "q4_0") for rows in (64, 32))
    products = Products((), CPU, dtype=torch.bfloat16, max_rows=4, exact=True)
    x, out = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 96, dtype=torch.bfloat16)
    products(x, StackedWeight(parts), None, out, cut_columns)
    assert seen == [(64, wanted), (32, wanted)]


def test_the_model_says_what_it_is(team: Team, models: Folders) -> None:
    with open_llm(models, "medusa", AHEAD[0]) as one, open_two(models, "medusa") as two:
        assert two.model.info.num_kv_heads == one.model.info.num_kv_heads == 2
        assert two.memory.bytes_per_token * 2 == one.memory.bytes_per_token
        assert two.model.info.weight_bytes < 0.7 * one.model.info.weight_bytes
        assert "on 2 ranks" in two.model.info.attention
        assert two.device == EMU
