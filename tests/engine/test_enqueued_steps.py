"""Steps that are enqueued on a stream: what they are made of, that they wait for nothing, graphs.

Capturing itself needs a GPU; elsewhere a recorder runs the recorded operations over the same
buffers, their padding poisoned.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
from medusa_models import VOCAB, save_heads
from method_cases import (
    ENQUEUED,
    GREEDY,
    HOST,
    METHODS,
    PROMPTS,
    SAMPLED,
    WATCHED,
    Folders,
    Where,
    check,
    checked,
    enqueued,
    methods,
    needs_cuda,
    on_devices,
    open_llm,
    pipeline_of,
    prompts_for,
    record_steps,
    texts_of,
)

from dispatch_recorder import Recorder, no_synchronisation
from emulators import EMULATED
from model.redrafter_cases import random_drafter
from specdec_ext import ConfigError, MedusaDecodingConfig, ReDrafterDecodingConfig, SamplingParams
from specdec_ext.engine.drafting_arguments import drafting_arguments
from specdec_ext.engine.overlap import MAX_STEP_TOKENS, Bucket, choose_bucket, make_buckets
from specdec_ext.engine.overlap.build import device_bytes
from specdec_ext.engine.overlap.graphs import MAX_BUCKETS
from specdec_ext.engine.overlap.worker import Worker
from tensor_parallel import started_team

# -- buckets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "rows", "most"),
    [(1, 1, 64), (1, 16, 16), (5, 16, 64), (8, 84, 1024), (32, 5, 1024), (300, 16, 4096),
     (1024, 128, 8192), (1024, 1, 1024)],
)  # fmt: skip
def test_every_step_finds_the_cheapest_bucket(requests: int, rows: int, most: int) -> None:
    buckets = make_buckets(requests, rows, most)
    assert len(buckets) == len(set(buckets)) <= MAX_BUCKETS
    assert list(buckets) == sorted(buckets)
    rng = random.Random(requests)
    for _ in range(300):
        n = rng.randint(1, requests)
        step_rows = rng.randint(min(n, most), min(n * rows, most))
        chosen = choose_bucket(buckets, n, step_rows)
        assert chosen is not None
        assert chosen.requests >= n and chosen.rows >= step_rows
        for other in buckets:
            if other.requests >= n and other.rows >= step_rows:
                assert (chosen.rows, chosen.requests) <= (other.rows, other.requests)
    assert choose_bucket(buckets, requests + 1, 1) is None
    assert choose_bucket(buckets, 1, most + 1) is None
    assert all(b.rows <= most and b.requests <= requests for b in buckets)


def test_one_request_alone_is_not_padded_with_others() -> None:
    buckets = make_buckets(8, 16, 128)
    assert choose_bucket(buckets, 1, 16) == Bucket(16, 1)
    assert choose_bucket(buckets, 1, 1) == Bucket(1, 1)
    assert choose_bucket(buckets, 3, 30) == Bucket(32, 4)


# -- recorded steps -------------------------------------------------------------------------------

LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "typical": {"temperature": 0.7, "top_p": 0.9, "acceptance": "typical"},
    "rejection": {"temperature": 0.7, "acceptance": "rejection"},
}


def asked_of(method: str, law: str) -> dict[str, Any]:
    """Where nothing drafts there is no rule."""
    return {k: v for k, v in LAWS[law].items() if method != "none" or k != "acceptance"}


def mixed(method: str, law: str, count: int) -> list[SamplingParams]:
    """Requests of one law, and others that draft nothing: recorded steps serve them, too."""
    asked = asked_of(method, law)
    kinds: list[dict[str, Any]] = [asked, {}, {"speculative": False}, asked]
    return [dataclasses.replace(GREEDY, seed=i, **kind) for i, kind in enumerate(kinds * 2)][:count]


def replayed(
    models: Folders, method: str, where: Where, law: str, prompts: list[list[int]]
) -> None:
    params = mixed(method, law, len(prompts))
    # Room for all drafts: what a lossy rule says depends on them.
    scheduler = {"max_num_tokens": 128}
    with open_llm(models, method, scheduler=scheduler) as llm:
        wanted = texts_of(llm, params, prompts)
    with open_llm(models, method, where, scheduler=scheduler | WATCHED) as llm:
        recorder = record_steps(llm, rows=128)
        assert texts_of(llm, params, prompts) == wanted
        assert recorder.recorded > (method != "none") and recorder.replayed > 5
        check(llm)


@enqueued
@pytest.mark.parametrize("law", LAWS)
@methods(ENQUEUED)
def test_padding_is_inert(models: Folders, method: str, law: str, where: Where) -> None:
    """Replayed with poisoned page tables and slots of padding; models compute its rows here."""
    if (method, law) == ("tree", "typical") and where.device != "cpu":
        law = "rejection"  # lossy texts show which of two equal nodes a device finds first
    replayed(models, method, where, law, prompts_for(where))


@checked
@methods(ENQUEUED)
def test_every_access_of_a_padded_step_is_legal(models: Folders, method: str, where: Where) -> None:
    """The emulation that checks bounds, races and initialisation."""
    replayed(models, method, where, "rejection", [p[:9] for p in PROMPTS[1:4]])


@needs_cuda
@pytest.mark.parametrize("law", LAWS)
@methods(ENQUEUED)
def test_graphs_say_the_same(models: Folders, method: str, law: str) -> None:
    texts = []
    params = mixed(method, law, len(PROMPTS))
    for eager in (True, False):
        where, scheduler = Where("cuda", 2), {"enforce_eager": eager, "max_num_tokens": 128}
        with open_llm(models, method, where, scheduler=scheduler) as llm:
            texts.append(texts_of(llm, params))
            assert bool(pipeline_of(llm)._replays) == (not eager)
    assert texts[0] == texts[1]


# -- what a step enqueues -------------------------------------------------------------------------

# Besides kernels of ours: products of matrices, rows of an embedding, copies between buffers that
# were made once. Nothing that reads a value or makes a tensor.
COPIES = {
    "aten::index_select.out", "aten::mm.out", "aten::addmm.out", "aten::copy_", "aten::zero_",
    "aten::add.out", "aten::fill_.Scalar",
}  # fmt: skip
VIEWS = {
    "aten::slice.Tensor", "aten::select.int", "aten::view", "aten::view.dtype", "aten::t",
    "aten::transpose.int", "aten::as_strided", "aten::alias", "aten::detach",
}  # fmt: skip
# Trees from tables, and what the heads add to products.
HEADS = {
    "aten::clamp.out", "aten::gather.out", "aten::topk.values", "aten::bmm.out",
    "aten::baddbmm.out", "aten::silu_", "aten::add_.Tensor", "aten::expand",
}  # fmt: skip
SEARCHED = {
    "aten::silu_", "aten::add_.Tensor", "aten::clamp.out", "aten::minimum.out", "aten::topk.values",
    "aten::gather.out", "aten::exp_",
}  # fmt: skip
# What a draft model has: small integers of each request and row, and the laws of drawn drafts.
# None of them reads a value; what they make comes from the allocator's cache or a graph's pool.
DRAWN = {
    "aten::__and__.Tensor", "aten::add.Tensor", "aten::amax", "aten::bitwise_and.Tensor",
    "aten::bitwise_not", "aten::cat", "aten::contiguous", "aten::clamp_",
    "aten::clamp_max", "aten::clamp_min",
    "aten::cumsum.out", "aten::div.Tensor", "aten::eq.Scalar", "aten::exp", "aten::full_like",
    "aten::ge.Scalar", "aten::gt.Scalar", "aten::index_copy_", "aten::index_select",
    "aten::le.Scalar", "aten::logsumexp", "aten::lt.Scalar", "aten::masked_fill.Scalar",
    "aten::minimum", "aten::mul.Tensor", "aten::mul.out", "aten::ne.Scalar", "aten::new_full",
    "aten::remainder.Scalar", "aten::rsub.Scalar", "aten::searchsorted.Tensor", "aten::sub.Tensor",
    "aten::to.dtype", "aten::topk", "aten::unsqueeze", "aten::where.self", "aten::zeros_like",
}  # fmt: skip
ALLOWED = {"medusa": HEADS, "redrafter": SEARCHED, "chain": DRAWN, "tree": DRAWN}
OPTIONS = {
    "medusa": lambda config: {"medusa_choices": config.medusa_choices},
    "redrafter": lambda config: {"num_beams": 2, "length": 3, "adaptive": False},
}


# The best of several ranks' scores.
CHOSEN = {
    "aten::clamp_", "aten::gather.out", "aten::add_.Tensor", "aten::lt.Scalar_out",
    "aten::masked_fill_.Scalar", "aten::argmax.out", "aten::amin.out", "aten::unsqueeze",
}  # fmt: skip

# Bytes for the host's link, which the emulation has in the place of NCCL.
LINKED = {"aten::resolve_conj", "aten::resolve_neg", "aten::reshape", "aten::to.dtype_layout"}


def steps_wait_for_nothing(
    models: Folders,
    spec: Any,
    method: str,
    where: Where,
    law: str,
    allowed: Set[str] = frozenset(),
    **options: Any,
) -> None:
    """No copy to the host but the ring's, no value read, no tensor made; a prompt joins midway."""
    with (
        pytest.MonkeyPatch.context() as patched,
        open_llm(models, spec, where, scheduler=WATCHED, **options) as llm,
    ):
        # In the calling thread, where a recorder of torch's operations sees them.
        patched.setattr(Worker, "run", lambda self, call: call())
        pipeline = pipeline_of(llm)
        config = llm.speculative_config
        asked = asked_of(method, law)
        texts_of(llm, dataclasses.replace(GREEDY, **asked), PROMPTS[:4])  # grows scratch memory
        if method in OPTIONS:
            pipeline.draft_options = lambda _: OPTIONS[method](config)
        for prompt in PROMPTS[:2]:
            pipeline.executor.submit(prompt, max_tokens=40, **asked)
        assert pipeline.step() == []
        before = llm.get_metrics()["drafter"] or {}
        with no_synchronisation(where.device), Recorder() as seen:
            for step in range(8):
                if step == 3:
                    pipeline.executor.submit(PROMPTS[2], max_tokens=9, **asked)
                pipeline.step()
        pipeline.drain()
        after = llm.get_metrics()["drafter"] or {}
        assert after.get("buffer_bytes") == before.get("buffer_bytes")
        assert after.get("failures", 0) == 0
    assert seen.names & COPIES
    assert seen.names <= COPIES | VIEWS | ALLOWED.get(method, set()) | allowed
    assert not ALLOWED.get(method) or seen.names & ALLOWED[method]


@on_devices
@pytest.mark.parametrize(
    ("method", "law"),
    # Laws of beams are made anew in each step: they wait for nothing either. Two laws of
    # each method; the third one in test-slow.
    [
        pytest.param(m, law, marks=pytest.mark.slow if i % 3 == j else ())
        for i, m in enumerate(ENQUEUED)
        for j, law in enumerate(LAWS)
        if m != "redrafter" or law == "greedy"
    ],
)
def test_steps_wait_for_nothing_but_events(
    models: Folders, method: str, law: str, where: Where
) -> None:
    steps_wait_for_nothing(models, method, method, where, law)


@EMULATED
@pytest.mark.parametrize("law", ["greedy", "typical"])
@methods(["lookahead", "medusa"])
def test_steps_of_several_ranks_wait_for_nothing(models: Folders, method: str, law: str) -> None:
    """What rank 0 enqueues between the calls of the link."""
    where, names = Where("cuda-emu-fast", 1), CHOSEN | LINKED
    with started_team():
        steps_wait_for_nothing(
            *(models, method, method, where, law, names), numerics="exact", tensor_parallel_size=2
        )


@on_devices
@methods(["lookahead", "ngram"])
def test_synthetic_steps_wait_for_nothing(models: Folders, method: str, where: Where) -> None:
    spec = dataclasses.replace(METHODS[method](models), synthetic_acceptance_rates=[0.9, 0.6])
    with pytest.warns(match="the text is NOT the model's"):
        steps_wait_for_nothing(models, spec, method, where, "greedy")


@on_devices
@pytest.mark.parametrize("kind", ["own", "reduced tied", "tied", "no rnn"])
def test_networks_of_every_kind_wait_for_nothing(
    models: Folders, tmp_path: Path, kind: str, where: Where
) -> None:
    if kind == "own":
        heads = save_heads(tmp_path, lm_head="own", scale=0.02)
        spec: Any = MedusaDecodingConfig(heads, [[0], [1], [0, 0]], adaptive=False)
    else:
        network = random_drafter(tmp_path, kind, 32, VOCAB, 2)
        spec = ReDrafterDecodingConfig(network, 3, 3, adaptive=False)
    method = "medusa" if kind == "own" else "redrafter"
    steps_wait_for_nothing(models, spec, method, where, "greedy")


# -- memory ---------------------------------------------------------------------------------------


@on_devices
@methods(["none", "lookahead", "ngram", "medusa", "redrafter"])
def test_memory_is_counted_before_pages_are_sized(
    models: Folders, method: str, where: Where
) -> None:
    with open_llm(models, method, where, scheduler={"max_num_tokens": 48}) as llm:
        pipeline = pipeline_of(llm)
        buffers, scores = pipeline.buffers, pipeline._forward._scores
        rings = (buffers.staging_ring, buffers.entry_ring, buffers.result_ring, buffers.score_ring,
                 buffers.tree_ring)  # fmt: skip
        kept = buffers.memory_bytes - sum(t.numel() * t.element_size() for t in rings)
        kept += scores.numel() * scores.element_size()
        hidden = 0
        if pipeline._hidden is not None:
            hidden = llm.model.hidden_size * llm.model.kv_dtype.itemsize
            kept += (1 + MAX_STEP_TOKENS) * hidden * len(pipeline._hidden)  # the host may choose
        drafting = drafting_arguments(llm.speculative_config)
        counted = device_bytes(llm.memory, llm.scheduler_config, drafting, VOCAB, hidden)
        if method == "medusa":
            assert pipeline.drafter.scratch_bytes(3) == 4 * 3 * VOCAB * 4
    assert kept <= counted <= kept + 4096


# -- the adapter ----------------------------------------------------------------------------------


@on_devices
@methods(["ngram", "medusa"])
def test_the_adapter_runs_in_steps_that_wait_for_it(
    models: Folders, method: str, where: Where
) -> None:
    texts = []
    for place in (HOST, where):
        with open_llm(models, method, place, model_impl="transformers") as llm:
            texts.append(texts_of(llm, GREEDY) + texts_of(llm, SAMPLED))
    assert texts[0] == texts[1]


@on_devices
def test_a_draft_model_of_the_adapter_is_refused(models: Folders, where: Where) -> None:
    spec = dataclasses.replace(METHODS["chain"](models), model_impl="transformers")
    with pytest.raises(ConfigError, match="runs in the transformers adapter"):
        open_llm(models, spec, where)
