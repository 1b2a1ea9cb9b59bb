"""What a run needs, from shapes alone: a 7B's Medusa heads on one GPU, and who is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.nn import Linear

from specdec_ext.errors import ConfigError
from specdec_ext.models.config_reader import parse_config
from specdec_ext.training.estimate import Machine, Work, estimate_run, measure_machine
from specdec_ext.training.options import TrainOptions
from specdec_ext.training.products import make_product, trained_size

LLAMA_7B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
}  # fmt: skip
GB = 10**9
H100 = Machine(200 * GB, 500 * GB, 6e14, 3e12, device_bytes=80 * GB)


def work(**changes: object) -> Work:
    config = parse_config(Path("7b/config.json"), dict(LLAMA_7B))
    options = TrainOptions(product="medusa", output=Path("x")).for_target(config)
    trained, widths = trained_size(options, config)
    values = {
        "product": "medusa", "hidden_size": 4096, "vocab_size": 32000,
        "target_bytes": 2 * 6_738_415_616, "target_parameters": 6_738_415_616,
        "kv_token_bytes": 2 * 32 * 4096 * 2, "write_tokens": 4096 * 160,
        "read_tokens": 0, "cache_tokens": 4096 * 160, "max_prompt_len": 448,
        "max_new_tokens": 160, "batch_size": 32, "draft_vocab_size": 8192, "trained": trained,
        "widths": widths, "embeds": False, "rows": 8 * 160, "trained_rows": 8 * 160,
        "step_rows": 8 * 160, "steps": 1500,
    }  # fmt: skip
    return Work(**{**values, **changes})  # type: ignore[arg-type]


def test_a_7b_fits_one_gpu_of_80_gb() -> None:
    config = parse_config(Path("7b/config.json"), dict(LLAMA_7B))
    options = TrainOptions(product="medusa", output=Path("x")).for_target(config)
    block = Linear(4096, 4096)
    assert trained_size(options, config)[0] == 8 * sum(p.numel() for p in block.parameters())
    estimate = estimate_run(work(), H100)
    estimate.check(H100, Path("cache"))
    # 13.5 GB of weights and 32 x 608 tokens of 0.5 MB at the least.
    assert 13.4e9 + 10.2e9 < estimate.collect_bytes < 40e9
    # Adam's two moments, weights and gradients of 134 million parameters in float32.
    assert 16 * 134.2e6 < estimate.train_bytes < 10e9
    assert 4096 * 160 * 4096 * 2 < estimate.disk_bytes < 6e9
    # 20,480 passes at no less than the time to read the weights once.
    assert estimate.collect_seconds > 20480 * 13.4e9 / 3e12
    assert 0 < estimate.train_seconds < 3600
    first, second = estimate.lines(H100)
    assert "of 80.0 GB device memory (weights 13.5 GB, K/V 10.2 GB" in first and "disk" in first
    assert second.startswith("training: about ") and "weights, gradients, Adam 2.1 GB" in second


@pytest.mark.parametrize(
    ("machine", "changes", "message"),
    [
        ({"device_bytes": 24 * GB}, {}, r"collecting needs 2\d\.\d GB \(weights 13\.5 GB, K/V "
         r"10\.2 GB.*24\.0 GB of device memory is free; lower --collect-batch"),
        ({"device_bytes": None, "host_bytes": 16 * GB}, {}, r"16\.0 GB of memory is free"),
        ({"device_bytes": 40 * GB}, {"trained": 10**10, "widths": 32768},
         r"training needs .*Adam 160\.0 GB.*40\.0 GB of device memory is free; lower --batch"),
        ({"disk_bytes": GB}, {}, r"cache: the cache needs 5\.4 GB, 1\.0 GB are free; "),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_with_the_numbers(
    machine: dict[str, int], changes: dict[str, int], message: str
) -> None:
    there = dataclasses.replace(H100, **machine)
    with pytest.raises(ConfigError, match=message):
        estimate_run(work(**changes), there).check(there, Path("cache"))


def test_less_work_needs_less() -> None:
    whole = estimate_run(work(), H100)
    parted = estimate_run(work(rows=160, trained_rows=160), H100)
    assert parted.train_bytes < whole.train_bytes
    assert estimate_run(work(batch_size=4), H100).collect_bytes < whole.collect_bytes
    read = estimate_run(work(write_tokens=0, read_tokens=4096 * 600), H100)
    assert read.collect_seconds < whole.collect_seconds
    two = estimate_run(work(ranks=2), H100)
    assert two.collect_seconds == pytest.approx(whole.collect_seconds / 2)
    assert whole.train_seconds / 2 < two.train_seconds < whole.train_seconds


def test_states_of_the_target_are_kept_as_memory_allows_and_read_again_beyond() -> None:
    host = dataclasses.replace(H100, device_bytes=None, host_bytes=64 * GB)
    none = estimate_run(work(), host)
    states = {"state_tokens": 4096 * 300, "state_bytes": 10 * GB, "epochs": 3.0}
    all_kept = estimate_run(work(**states), host)
    assert all_kept.train_parts["states of the target"] == 10 * GB
    once = 2 * 6_738_415_616 * 4096 * 300 / (0.5 * host.flops)
    assert all_kept.train_seconds - none.train_seconds == pytest.approx(once)
    half = estimate_run(work(**states), dataclasses.replace(host, host_bytes=20 * GB))
    assert half.train_parts["states of the target"] == 5 * GB
    assert half.train_seconds - none.train_seconds == pytest.approx(2 * once)
    # On a device they lie in the host's memory.
    on_device = estimate_run(work(**states), H100)
    assert on_device.train_bytes == estimate_run(work(), H100).train_bytes
    assert on_device.train_seconds > none.train_seconds


@pytest.mark.parametrize("product", ["medusa", "redrafter", "drafter"])
def test_the_parameters_are_counted_as_they_are(product: str, target: Path, data: object) -> None:
    from specdec_ext.models.config_reader import read_config

    config = read_config(target)
    options = TrainOptions(
        product=product, output=Path("x"), draft_vocab_size=200, intermediate_size=32
    )
    made = make_product(options, data, config, "", "", torch.device("cpu"))  # type: ignore[arg-type]
    trained = sum(p.numel() for p in made.module.parameters() if p.requires_grad)
    assert trained_size(options, config)[0] == trained


def test_the_machine_is_measured(tmp_path: Path) -> None:
    machine = measure_machine(torch.device("cpu"), tmp_path / "not" / "there")
    assert machine.device_bytes is None
    assert min(machine.host_bytes, machine.disk_bytes, machine.flops) > 1e6
