"""Parameters by the document's names: what they mean, what is refused, and the scripts that take
them."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton_cases import MODELS, TRITON, fill
from triton_harness import read_pbtxt

from specdec_ext import SamplingParams
from specdec_ext.config.parse import parse_kv_cache_config, parse_scheduler_config
from specdec_ext.errors import ConfigError, RequestError
from specdec_ext.request.external_draft import ExternalDraftTokensConfig
from specdec_ext.serve.triton.parameters import (
    PARAMETERS,
    Parameters,
    check_value,
    drafting,
    engine_arguments,
)
from specdec_ext.serve.triton.tensors import read_params, write_params


def parameters(**values: str) -> Parameters:
    named = {name: {"string_value": value} for name, value in values.items()}
    return Parameters(json.dumps({"name": "specdec", "max_batch_size": 4, "parameters": named}))


def test_values_reach_the_engine() -> None:
    given = engine_arguments(
        parameters(
            max_tokens_in_paged_kv_cache="4096", kv_cache_free_gpu_mem_fraction="0.4",
            enable_kv_cache_reuse="True", batch_scheduler_policy="max_utilization",
            enable_chunked_context="false",
        )
    )  # fmt: skip
    cache = parse_kv_cache_config(given["kv_cache_config"])
    assert (cache.max_tokens, cache.free_gpu_memory_fraction) == (4096, 0.4)
    assert cache.enable_block_reuse
    scheduler = parse_scheduler_config(given["scheduler_config"])
    assert (scheduler.policy, scheduler.enable_chunked_prefill) == ("max_utilization", False)


@pytest.mark.parametrize(
    ("value", "window"), [("256", 256), ("256,1024", (256, 1024)), ("[256, 1024]", (256, 1024))]
)
def test_attention_windows_reach_the_engine(value: str, window: Any, tmp_path: Path) -> None:
    path = shutil.copy(TRITON / "model_repository" / "specdec" / "config.pbtxt", tmp_path)
    assert fill(Path(path), max_attention_window_size=value) == ""
    given = engine_arguments(parameters(max_attention_window_size=value))
    assert parse_kv_cache_config(given["kv_cache_config"]).max_attention_window == window


def test_what_is_not_filled_in_is_the_default() -> None:
    names = ("max_tokens_in_paged_kv_cache", "enable_kv_cache_reuse", "decoding_mode", "engine_dir")
    for values in ({}, dict.fromkeys(names, ""), {name: f"${{{name}}}" for name in names}):
        found = parameters(**values)
        given = engine_arguments(found)
        assert given == {"kv_cache_config": {}, "scheduler_config": {}}
        assert drafting(found) == "auto"
        with pytest.raises(ConfigError, match="engine_dir is empty; fill it in: fill_template"):
            found.require("engine_dir")


@pytest.mark.parametrize(
    ("mode", "asked"),
    [("auto", "auto"), ("top_k", None), ("top_p", None), ("top_k_top_p", None),
     ("medusa", "heads"), ("redrafter", "heads")],
)  # fmt: skip
def test_modes(mode: str, asked: Any) -> None:
    assert drafting(parameters(decoding_mode=mode)) == asked


def test_lookahead_needs_its_three_numbers() -> None:
    sizes = {"lookahead_window_size": "3", "lookahead_ngram_size": "4"}
    with pytest.raises(ConfigError, match="lookahead_verification_set_size is empty"):
        drafting(parameters(decoding_mode="lookahead", **sizes))
    sizes["lookahead_verification_set_size"] = "5"
    assert drafting(parameters(decoding_mode="lookahead", **sizes)) == [3, 4, 5]


REFUSED = [
    ("max_beam_width", "4", "there are no beams; use 1"),
    ("max_attention_window_size", "0", "one number for all layers or one per layer"),
    ("max_attention_window_size", "256,0", "one number for all layers or one per layer"),
    ("max_attention_window_size", "wide", "one number for all layers or one per layer"),
    ("batching_strategy", "V1", "always batched in flight"),
    ("batch_scheduler_policy", "fifo", "expected one of guaranteed_no_evict, max_utilization"),
    ("kv_cache_free_gpu_mem_fraction", "1.5", "above 0, at most 1"),
    ("kv_cache_free_gpu_mem_fraction", "nan", "above 0, at most 1"),
    ("max_tokens_in_paged_kv_cache", "-3", "whole number >= 1"),
    ("enable_kv_cache_reuse", "maybe", "expected true or false"),
    ("decoding_mode", "beam_search", "there are no beams"),
    ("decoding_mode", "eagle", "expected one of auto"),
    ("gpu_device_ids", "1,2", "on one device here"),
    ("gpu_device_ids", "first", "the number of a device"),
    ("engine_dir", "nowhere/at/all", "no such folder"),
    ("engine_dirr", "x", "engine_dir"),
]


@pytest.mark.parametrize(("name", "value", "said"), REFUSED)
def test_a_value_that_cannot_be_had_is_refused(
    name: str, value: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_value(name, value)
    path = shutil.copy(TRITON / "model_repository" / "specdec" / "config.pbtxt", tmp_path)
    before = Path(path).read_text()
    with pytest.raises(subprocess.CalledProcessError) as error:
        fill(Path(path), **{name: value})
    assert said in error.value.stderr and "Traceback" not in error.value.stderr
    assert Path(path).read_text() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("triton_backend", "tensorrtllm"), ("batching_strategy", "inflight_fused_batching"),
     ("max_beam_width", "1"), ("max_queue_delay_microseconds", "0"),
     ("normalize_log_probs", "true"), ("tokenizer_type", "llama")],
)  # fmt: skip
def test_a_value_that_means_nothing_is_said_in_one_line(
    name: str, value: str, tmp_path: Path
) -> None:
    model = "preprocessing" if name == "tokenizer_type" else "specdec"
    path = shutil.copy(TRITON / "model_repository" / model / "config.pbtxt", tmp_path)
    said = fill(Path(path), **{name: value})
    assert said.splitlines() == [f"without effect here: {name}:{value} ({PARAMETERS[name].note})"]


def test_templates_have_every_parameter_and_no_other() -> None:
    found: set[str] = set()
    for model in MODELS:
        text = (TRITON / "model_repository" / model / "config.pbtxt").read_text()
        names = set(runpy.run_path(str(TRITON / "fill_template.py"))["re"].findall(
            r"\$\{(\w+)\}", text
        ))  # fmt: skip
        assert names <= set(PARAMETERS), model
        found |= names
        assert read_pbtxt(text)["name"] == model
    assert found == set(PARAMETERS)
    page = (TRITON.parent.parent / "docs" / "triton.md").read_text()
    missing = [n for n in PARAMETERS if f"`{n}" not in page and not n.endswith("_instance_count")]
    assert missing == []


def test_filling_in_twice_and_lists(tmp_path: Path) -> None:
    read_values = runpy.run_path(str(TRITON / "fill_template.py"))["read_values"]
    assert read_values("a:1,b:,c:x:y,d:1,2,3") == {"a": "1", "b": "", "c": "x:y", "d": "1,2,3"}
    with pytest.raises(SystemExit, match="expected name:value"):
        read_values("lonely")
    path = Path(shutil.copy(TRITON / "model_repository" / "specdec" / "config.pbtxt", tmp_path))
    assert fill(path, triton_max_batch_size=4, max_beam_width=1).count("\n") == 1
    assert "is filled in" in fill(path, triton_max_batch_size=8)
    assert read_pbtxt(path.read_text())["max_batch_size"] == 4
    done = subprocess.run(
        [sys.executable, str(TRITON / "fill_template.py")], capture_output=True, text=True
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(PARAMETERS)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=3),
        SamplingParams(max_tokens=9, temperature=0.75, top_k=3, top_p=0.5, min_p=0.25, seed=2**63),
        SamplingParams(max_tokens=9, min_tokens=4, ignore_eos=True, stop_token_ids=[3, 4]),
        SamplingParams(max_tokens=9, stop=["a", "é"], bad_words=["x y"], cache_salt="ß"),
        SamplingParams(max_tokens=9, repetition_penalty=1.5, presence_penalty=-1.0),
        SamplingParams(max_tokens=9, logprobs=0, return_generation_logits=True, priority=-3),
        SamplingParams(max_tokens=9, detokenize=False, speculative_config=False),
        SamplingParams(max_tokens=3, external_draft=ExternalDraftTokensConfig([5, 6])),
        SamplingParams(
            max_tokens=3, temperature=0.5,
            external_draft=ExternalDraftTokensConfig([5], np.ones((1, 7), np.float32), 0.5),
        ),
    ],
)  # fmt: skip
def test_parameters_cross_as_tensors(params: SamplingParams) -> None:
    tensors = {name: value[0] for name, value in write_params(params).items()}
    found = read_params(tensors)
    assert found == params
    if params.external_draft is not None and params.external_draft.logits is not None:
        assert (found.external_draft.logits == params.external_draft.logits).all()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "how",
    [{"n": 2, "temperature": 1.0}, {"logprobs": 3}, {"logit_bias": {3: 1.0}}, {"prediction": "x"},
     {"structured_outputs": {"regex": "a"}}, {"bad_words": [[3, 4]]}],
)  # fmt: skip
def test_what_has_no_tensor_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="Triton backend"):
        write_params(SamplingParams(max_tokens=3, **how))


def test_end_ids() -> None:
    base = {"request_output_len": np.array([3], np.int32)}

    def read(end_id: int) -> SamplingParams:
        return read_params(base | {"end_id": np.array([end_id], np.int32)}, eos_token_ids=(7,))

    assert not read(7).ignore_eos and not read(7).stop_token_ids
    assert read(-1).ignore_eos and not read(-1).stop_token_ids
    assert read(5).ignore_eos and list(read(5).stop_token_ids or ()) == [5]


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(TRITON / name))


def test_the_launcher_names_the_stub_of_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = script("launch_triton_server.py")
    home = tmp_path / "pytriton" / "tritonserver"
    backend = home / "backends" / "python"
    backend.mkdir(parents=True)
    with pytest.raises(SystemExit, match="is missing"):
        launcher["make_backends"](home, tmp_path / "a")
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (backend / name).touch()
    with pytest.raises(SystemExit, match="has no stub for Python"):
        launcher["make_backends"](home, tmp_path / "b")
    stub = home / "python_backend_stubs" / f"3.{sys.version_info.minor}" / launcher["STUB"]
    stub.parent.mkdir(parents=True)
    stub.touch()
    made = launcher["make_backends"](home, tmp_path / "c") / "python"
    assert {file.name for file in made.iterdir()} == {
        "libtriton_python.so", "triton_python_backend_utils.py", launcher["STUB"]
    }  # fmt: skip
    assert (made / launcher["STUB"]).resolve() == stub
    monkeypatch.setenv("PYTHONHOME", "elsewhere")
    found = launcher["environment"]()
    assert found["PATH"].startswith(str(Path(sys.executable).parent))
    assert "PYTHONHOME" not in found
    monkeypatch.setattr(np, "__version__", "2.1.0")
    with pytest.raises(SystemExit, match="needs NumPy 1, here is 2"):
        launcher["check_numpy"](home)
    monkeypatch.setattr(np, "__version__", "1.26.4")
    launcher["check_numpy"](home)


def test_the_clients_options_are_the_documents(tmp_path: Path) -> None:
    client = script("speculative_decoding_test.py")
    args = client["make_parser"]().parse_args(
        ["--max-input-len", "2048", "--dataset=input_data.json", "--url-target=localhost:8001",
         "--url-draft=localhost:8001", "--draft-tensorrt-llm-model-name=d",
         "--target-tensorrt-llm-model-name=t", "--bls-speculative-tensorrt-llm-model-name=b",
         "--execute-bls-speculative-decoding", "--disable-output-comparison",
         "--num-draft-tokens=4", "--verbose"]
    )  # fmt: skip
    assert (args.draft_model_name, args.target_model_name, args.bls_model_name) == ("d", "t", "b")
    assert args.bls and args.disable_output_comparison and args.num_draft_tokens == 4
    read = client["read_requests"]
    assert read(str(TRITON / "input_data.json")) == [
        ("Continue writing the following story: James Best, best known for his ", 65)
    ]
    for i, (content, said) in enumerate(
        [([], "expected a list"), ({}, "expected a list"), ([3], "entry 0: input"),
         ([{"input": "a", "instruction": "b"}], "entry 0: output is missing"),
         ([{"input": "a", "instruction": 3, "output": ""}], "entry 0: instruction")]
    ):  # fmt: skip
        path = tmp_path / f"{i}.json"
        path.write_text(json.dumps(content))
        with pytest.raises(SystemExit, match=said):
            read(str(path))
