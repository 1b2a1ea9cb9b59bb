"""Run-ahead on a device: what a step is made of, graphs, padding; on the emulation everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_ahead_driver import FakeRecorder
from test_run_ahead_llm import GREEDY, PROMPTS, SPECS, VOCAB, open_llm, tokens_of

from dispatch_recorder import Recorder, no_synchronisation
from emulators import EMULATED, devices, needs_cuda
from specdec_ext import LookaheadDecodingConfig, SamplingParams
from specdec_ext.engine.overlap import make_buckets
from specdec_ext.engine.overlap.build import device_bytes
from tiny_models import save_llama

# What a step enqueues beside kernels of ours: products of matrices, rows of an embedding, copies
# between buffers that were made once. Nothing that reads a value or makes a tensor.
ENQUEUED = {
    "aten::index_select.out", "aten::mm.out", "aten::addmm.out", "aten::copy_", "aten::zero_",
    "aten::add.out", "aten::fill_.Scalar",
}  # fmt: skip
VIEWS = {
    "aten::slice.Tensor", "aten::select.int", "aten::view", "aten::view.dtype", "aten::t",
    "aten::transpose.int", "aten::as_strided", "aten::alias", "aten::detach",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("ahead") / "target", 11, VOCAB)


@devices
@pytest.mark.parametrize("law", [{}, {"temperature": 0.7, "top_p": 0.9, "acceptance": "typical"}])
@pytest.mark.parametrize("method", ["lookahead", "ngram"])
def test_steps_wait_for_nothing_but_events(
    folder: Path, device: str, method: str, law: dict[str, Any]
) -> None:
    """No copy to the host but the ring's, no value read, no tensor made; a prompt joins midway."""
    params = SamplingParams(max_tokens=14, ignore_eos=True, **law)
    with open_llm(folder, SPECS[method], 1, device=device) as llm:
        pipeline = llm.engine._pipeline  # type: ignore[attr-defined]
        tokens_of(llm.generate(PROMPTS, params, use_tqdm=False))  # grows scratch memory
        for prompt in PROMPTS[:2]:
            pipeline.executor.submit(prompt, max_tokens=14, **law)
        assert pipeline.step() == []
        with no_synchronisation(device), Recorder() as seen:
            for step in range(8):
                if step == 3:
                    pipeline.executor.submit(PROMPTS[2], max_tokens=3, **law)
                pipeline.step()
        pipeline.drain()
    assert seen.names <= ENQUEUED | VIEWS


@devices
@pytest.mark.parametrize("method", SPECS)
def test_padding_is_inert(folder: Path, device: str, method: str) -> None:
    """Every bucket's operations, replayed with poisoned page tables of padding; models compute
    the padding's rows here."""
    with open_llm(folder, None, None) as llm:
        wanted = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    with open_llm(folder, SPECS[method], 1, device=device) as llm:
        pipeline = llm.engine._pipeline  # type: ignore[attr-defined]
        recorder = FakeRecorder()
        recorder.buffers = pipeline.buffers
        pipeline._recorder = recorder
        pipeline.buckets = make_buckets(3, pipeline.executor.max_rows_per_request, 48)
        assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == wanted
        assert recorder.recorded > 1
        assert recorder.replayed > 8


@pytest.mark.parametrize("device", [pytest.param("cuda-emu", marks=EMULATED)])
@pytest.mark.parametrize("method", SPECS)
def test_every_access_of_a_padded_step_is_legal(folder: Path, device: str, method: str) -> None:
    """The emulation that checks bounds, races and initialisation."""
    test_padding_is_inert(folder, device, method)


@devices
@pytest.mark.parametrize("method", SPECS)
def test_memory_is_counted_before_pages_are_sized(folder: Path, device: str, method: str) -> None:
    with open_llm(folder, SPECS[method], 1, device=device) as llm:
        pipeline = llm.engine._pipeline  # type: ignore[attr-defined]
        buffers, scores = pipeline.buffers, pipeline._forward._scores
        rings = (buffers.staging_ring, buffers.entry_ring, buffers.result_ring, buffers.score_ring,
                 buffers.tree_ring)  # fmt: skip
        kept = buffers.memory_bytes - sum(t.numel() * t.element_size() for t in rings)
        kept += scores.numel() * scores.element_size()
        drafting = {"method": "none"} if SPECS[method] is None else drafting_of(SPECS[method])
        counted = device_bytes(llm.memory, llm.scheduler_config, drafting, VOCAB)
    assert kept <= counted <= kept + 4096


def drafting_of(spec: Any) -> dict[str, Any]:
    if isinstance(spec, LookaheadDecodingConfig):
        return {"method": "lookahead", "lookahead": spec.triple}
    names = ("max_draft_len", "max_matching_ngram_size")
    return {"method": "ngram", "ngram": {name: getattr(spec, name) for name in names}}


@needs_cuda
@pytest.mark.parametrize("method", SPECS)
def test_graphs_say_the_same(folder: Path, method: str) -> None:
    texts = []
    for eager in (True, False):
        scheduler = {"max_batch_size": 3, "max_seq_len": 96, "max_num_tokens": 48,
                     "run_ahead": 2, "enforce_eager": eager}  # fmt: skip
        with open_llm(
            folder, SPECS[method], 2, device="cuda", scheduler_config=scheduler, dtype="float32"
        ) as llm:
            texts.append(tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)))
            pipeline = llm.engine._pipeline  # type: ignore[attr-defined]
            assert bool(pipeline._replays) == (not eager)
    assert texts[0] == texts[1]


@devices
def test_the_adapter_runs_in_steps_that_wait_for_it(folder: Path, device: str) -> None:
    texts = []
    for where in ("cpu", device):
        with open_llm(folder, SPECS["ngram"], 1, device=where, model_impl="transformers") as llm:
            texts.append(tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)))
    assert texts[0] == texts[1]
