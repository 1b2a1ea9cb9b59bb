"""Ranks with a device each: what is refused, and ranks that die or hang."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from method_cases import GREEDY, PROMPTS, Folders, Where, open_llm

from emulators import BUILD, EMULATED, LIBRARIES
from specdec_ext import LLM, DraftTargetDecodingConfig, SamplingParams, _core
from specdec_ext.cli.engine_dir import draft_target_keys, target_device
from specdec_ext.engine.overlap import streams
from specdec_ext.errors import ConfigError, EngineError, UnsupportedModelError
from specdec_ext.models import place
from specdec_ext.parallel import team as team_module
from tiny_models import save_llama

pytestmark = EMULATED

EMU = "cuda-emu-fast"
LIMIT = 120  # seconds; a hang, not a measurement
FEW = PROMPTS[1:4]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = _core.num_threads()
    yield
    _core.set_num_threads(before)


def open_two(models: Folders, depth: int = 0) -> LLM:
    return open_llm(models, None, Where(EMU, depth), tensor_parallel_size=2)


# -- refusals -------------------------------------------------------------------------------------


def no_process(*_: Any, **__: Any) -> Any:
    pytest.fail("a rank was started")


def test_models_are_refused_before_a_rank_is_started(
    models: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_llama(tmp_path, 3, 96, num_attention_heads=3, num_key_value_heads=3,
                        hidden_size=48)  # fmt: skip
    monkeypatch.setattr(subprocess, "Popen", no_process)
    how: dict[str, Any] = {"device": EMU, "tensor_parallel_size": 4}
    with pytest.raises(ConfigError, match=r"= 4: the model has 3 K/V heads .*--tp_size 3"):
        LLM(folder, **how)
    with pytest.raises(UnsupportedModelError, match=r"needs the native decoder .*transformers"):
        LLM(folder, **{**how, "tensor_parallel_size": 2}, model_impl="transformers")


class Gpus:
    """A machine with so many, as far as numbers go."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        info = {**_core.cuda_info(), "devices": [{}] * count, "reason": ""}
        patch.setattr(place, "_why_no_cuda", lambda: "")
        patch.setattr(place._core, "cuda_info", lambda: info)
        patch.setattr("torch.cuda.device_count", lambda: count)
        patch.setattr(place, "_has_nccl", lambda: True)


@pytest.mark.parametrize(
    ("device", "ranks", "local", "wanted"),
    [
        ("cuda", 3, None, ("cuda:0", "cuda:1", "cuda:2")),
        ("auto", 2, None, ("cuda:0", "cuda:1")),
        ("cuda:1", 2, None, ("cuda:1", "cuda:2")),
        ("cuda:3,1", 2, None, ("cuda:3", "cuda:1")),
        ("cuda:2", 1, None, ("cuda:2",)),
        ("cuda", 4, 2, ("cuda:0", "cuda:1", "cuda:0", "cuda:1")),  # two machines
        ("cpu", 2, None, ("cpu", "cpu")),
        (EMU, 2, None, (EMU, EMU)),
    ],
)
def test_the_device_of_each_rank(
    device: str, ranks: int, local: int | None, wanted: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    Gpus(monkeypatch, 4)
    assert place.devices_of_ranks(device, ranks, local) == wanted


@pytest.mark.parametrize(
    ("device", "ranks", "message"),
    [
        ("cuda", 5, r"tensor_parallel_size = 5 .* take cuda:0..cuda:4, and it has 4 CUDA devices; "
         "use tensor_parallel_size <= 4"),
        ("cuda:3", 2, r"take cuda:3..cuda:4, .* use tensor_parallel_size <= 1"),
        ("cuda:0,1", 3, r"'cuda:0,1' names 2 devices, tensor_parallel_size = 3 has 3 ranks"),
        ("cuda:0,1", 1, r"names 2 devices, tensor_parallel_size = 1"),
        ("cuda:0,0", 2, "names a device twice"),
        ("cuda:0,7", 2, r"'cuda:7': devices of this machine are cuda:0..cuda:3"),
        ("cuda:0,", 2, "expected 'auto', 'cpu'"),
    ],
)  # fmt: skip
def test_devices_are_refused_before_a_rank_is_started(
    models: Folders, device: str, ranks: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gpus(monkeypatch, 4)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    with pytest.raises(ConfigError, match=message):
        LLM(models["target"], device=device, tensor_parallel_size=ranks)


def test_a_torch_without_nccl(models: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 2)
    monkeypatch.setattr(place, "_has_nccl", lambda: False)
    assert place.devices_of_ranks("cuda", 1) == ("cuda:0",)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 2 on .*built without NCCL"):
        LLM(models["target"], device="cuda", tensor_parallel_size=2)


def test_the_target_s_devices_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 4)
    wanted = {
        ("cuda", "[4,[2],[2,0],False]"): "cuda:2,0",
        ("auto", "[4,[1],[1]]"): "cuda:1",
        ("cuda", "[4]"): "cuda",
        ("cuda:1", None): "cuda:1",
        ("cpu", "[4,[0],[1]]"): "cpu",
    }
    for (device, lists), found in wanted.items():
        args = argparse.Namespace(device=device, draft_target_model_config=lists)
        assert target_device(args) == found
    both = argparse.Namespace(device="cuda:1", draft_target_model_config="[4,[2],[2,0]]")
    with pytest.raises(ConfigError, match=r"--device cuda:1 and the target's devices \[2, 0\]"):
        target_device(both)


def test_the_draft_s_device_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 5)
    wanted = {
        ("auto", "[4,[0],[1,2,3,4],False]", 4): ("cuda:0", "cuda:1,2,3,4"),
        ("cuda", "[4,[3],[1],True]", 1): ("cuda:3", "cuda:1"),
        ("cuda:1", "[4,[0]]", 1): ("cuda:0", "cuda:1"),
        ("cuda", "[4,[],[1]]", 1): (None, "cuda:1"),
        ("cpu", "[4,[0],[1]]", 1): (None, "cpu"),
    }
    for (device, lists, ranks), found in wanted.items():
        args = argparse.Namespace(
            device=device, draft_target_model_config=lists, draft_engine_dir=None,
            tensor_parallel_size=ranks,
        )  # fmt: skip
        assert (draft_target_keys(args).get("device"), target_device(args)) == found


@pytest.mark.parametrize(
    ("device", "draft", "ranks", "message"),
    [
        ("cuda", "cuda:1", 2, r"= 'cuda:1', the target on cuda:0, cuda:1: rank 1 has that device"),
        ("cuda", "cuda:9", 2, r"'cuda:9': devices of this machine are cuda:0..cuda:3"),
        ("cuda", "cpu", 1, "the CPU is none; give both a GPU"),
        ("cpu", "cuda:1", 1, "the CPU is none; give both a GPU"),
        ("cuda", EMU, 1, r"= 'cuda-emu-fast', the target on cuda:0: .* give both a GPU"),
        ("cuda", "gpu", 1, "device = 'gpu': expected 'auto', 'cpu', 'cuda'"),
    ],
)
def test_draft_devices_are_refused_before_a_rank_is_started(
    models: Folders, device: str, draft: str, ranks: int, message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    Gpus(monkeypatch, 4)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    config = DraftTargetDecodingConfig(models["near"], device=draft)
    with pytest.raises(ConfigError, match=message):
        LLM(models["target"], speculative_config=config, device=device, tensor_parallel_size=ranks)


# -- three ranks ----------------------------------------------------------------------------------


def test_three_ranks(tmp_path: Path) -> None:
    """A head each; one-way calls between three follow each other."""
    folder = save_llama(tmp_path, 3, 96, num_attention_heads=6, num_key_value_heads=3,
                        hidden_size=96, intermediate_size=160)  # fmt: skip
    prompts = [[token % 96 for token in prompt] for prompt in FEW]
    texts = []
    for ranks in (1, 3):
        with LLM(
            folder, device=EMU, tensor_parallel_size=ranks, numerics="exact", max_seq_len=96,
            max_batch_size=3, scheduler_config={"overlap_depth": 1},
            speculative_config={"method": "lookahead", "adaptive": False},
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            texts.append([list(out.outputs[0].token_ids) for out in outputs])
            metrics = llm.get_metrics()["speculative_decoding"]
            assert metrics["num_accepted_draft_tokens"] > 0
    assert texts[0] == texts[1]


# -- ranks that are lost --------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_rank_that_is_killed_or_stopped(
    models: Folders, how: signal.Signals, depth: int, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    # Nearly all that a request may have, so that it lasts until the rank is lost on any machine.
    long = SamplingParams(max_tokens=90, ignore_eos=True)
    with open_two(models, depth) as llm:
        assert llm._team is not None
        [process] = llm._team._processes
        stream = llm.stream([1, 2], long)
        assert next(stream).outputs[0].token_ids
        caplog.clear()
        monkeypatch.setattr(team_module, "HEARTBEAT_S", 1.0)
        llm._team.link._heartbeat_s = 1.0  # type: ignore[attr-defined]
        os.kill(process.pid, how)
        expected = "killed by SIGKILL" if how == signal.SIGKILL else "no heartbeat for 1 s"
        with pytest.raises(EngineError, match=f"rank 1 of 2 .*{expected}"):
            for _ in stream:
                pass
        assert process.poll() is not None  # a stopped one, too
        with pytest.raises(EngineError):
            llm.generate([[3]], long, use_tqdm=False)
    assert not caplog.records  # it was said once


def test_a_rank_says_why_it_failed(models: Folders) -> None:
    with open_two(models) as llm:
        assert llm._team is not None
        llm._team.tell(team_module.FORWARD, np.zeros(2, dtype=np.int32))  # no step
        with pytest.raises(EngineError, match="rank 1 of 2 failed: TypeError: "):
            llm.generate([[3]], GREEDY, use_tqdm=False)


class NeverDone:
    """An event that a device waits for with the other ranks."""

    def query(self) -> bool:
        return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_wait_for_a_device_looks_after_the_ranks(
    models: Folders, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, where rank 0's host waits for an event and its device for the other ranks."""
    with open_two(models) as llm:
        team = llm._team
        assert team is not None
        monkeypatch.setattr(team_module, "HEARTBEAT_S", 4.0)  # theirs come every 1.25 s
        os.kill(team._processes[0].pid, how)
        expected = "killed by SIGKILL." if how == signal.SIGKILL else "no heartbeat for 4 s"
        with pytest.raises(EngineError, match=f"rank 1 of 2 .*{expected} while a step was running"):
            streams._CudaEvent(NeverDone(), team.watch).wait()


# -- torchrun -------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
from specdec_ext import LLM, SamplingParams, ops
ops.load_backend(sys.argv[2], sys.argv[3])
with LLM(sys.argv[1], device=sys.argv[2], speculative_config={"method": "lookahead"},
         numerics=sys.argv[4], dtype="float32", max_batch_size=3, max_seq_len=96,
         scheduler_config={"overlap_depth": 1}) as llm:
    outputs = llm.generate(json.loads(sys.argv[5]), SamplingParams(max_tokens=24, ignore_eos=True),
                           use_tqdm=False)
    print(json.dumps([list(o.outputs[0].token_ids) for o in outputs]))
    assert "on 2 ranks" in llm.model.info.attention
"""


@pytest.mark.parametrize("numerics", ["exact", pytest.param("fast", marks=pytest.mark.slow)])
def test_torchrun(
    models: Folders, plain_texts: dict[str, Any], numerics: str, tmp_path: Path
) -> None:
    """Gloo brings what shared memory does."""
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    library = str(BUILD / LIBRARIES[EMU])
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
         str(script), str(models["target"]), EMU, library, numerics, json.dumps(FEW)],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == plain_texts["greedy"][1:4]
