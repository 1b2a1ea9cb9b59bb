"""Medusa in steps that run ahead: the text of plain decoding, the drafts of the host's drafter."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from medusa_models import VOCAB, save_heads, save_target
from run_ahead_driver import FakeRecorder, random_hash_engine
from test_medusa import SHAPES
from test_run_ahead_brought import EXTERNAL, Guesser, jobs_of
from test_run_ahead_device import ENQUEUED, VIEWS

from dispatch_recorder import Recorder, no_synchronisation
from emulators import EMULATED, devices
from reference import medusa_reference as ref
from specdec_ext import LLM, MedusaDecodingConfig, ModelError, RequestError, SamplingParams
from specdec_ext.cli import main
from specdec_ext.config.methods import published_trees
from specdec_ext.engine.overlap import MAX_STEP_TOKENS, RunAheadPipeline, make_buckets
from specdec_ext.engine.overlap.build import device_bytes

pytestmark = pytest.mark.usefixtures("on_stream")

DEPTHS = (0, 1, 2)
LARGEST = [[i] for i in range(VOCAB - 1)] + [[i, j] for i in range(20) for j in range(4)]
# Level by level: what is too deep for the end of a text is the last of it, here and on the host.
LEVELS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]
# Beside the networks of a step: trees from tables, and what the heads add to products.
HEADS = {
    "aten::clamp.out", "aten::gather.out", "aten::topk.values", "aten::bmm.out",
    "aten::baddbmm.out", "aten::silu_", "aten::add_.Tensor", "aten::expand",
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that know something: the target's own head behind small blocks guesses repeats."""
    return save_heads(tmp_path_factory.mktemp("heads"), lm_head="target", scale=0.02)


def open_llm(target: Path, spec: Any, run_ahead: int | None, batch: int = 3, **options: Any) -> LLM:
    scheduler = {"max_batch_size": batch, "max_seq_len": 160, "run_ahead": run_ahead}
    settings: dict[str, Any] = {
        "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 600 * batch},
        "device": "cpu",
    }
    return LLM(
        target, speculative_config=spec, scheduler_config=scheduler, **{**settings, **options}
    )


def make_prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 7, 31]))] for _ in range(count)]


def decode(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(out.outputs[0].finish_reason == "length" for out in outputs)
    assert (llm.get_metrics()["drafter"] or {"failures": 0})["failures"] == 0
    return [list(out.outputs[0].token_ids) for out in outputs]


def counts_of(llm: LLM) -> dict[str, int]:
    """Host and run-ahead: the same drafts, as many accepted, in as many rows."""
    stats = llm.get_metrics()["executor"]
    assert stats["free_pages"] == stats["total_pages"]
    return {k: stats[k] for k in ("num_draft_tokens", "num_accepted_tokens", "rows", "finished")}


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **options)


# -- on the CPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_greedy_text_is_that_of_plain_decoding(target: Path, heads: Path, batch: int) -> None:
    """Published and random trees, of the engine and of requests; adaptive or not."""
    rng = random.Random(batch)
    prompts = make_prompts(batch + 3, seed=batch)
    count = 40
    with open_llm(target, None, None, batch) as llm:
        plain = decode(llm, prompts, greedy(count))
    trees: list[Any] = list(published_trees()) if batch == 3 else ["mc_sim_7b_63"]
    trees += [[list(n) for n in ref.random_tree(rng, 127, 4, 8)] for _ in range(3)]
    compared = 0
    for depth in DEPTHS:
        with open_llm(target, MedusaDecodingConfig(heads, LARGEST), depth, batch) as llm:
            assert llm.get_metrics()["drafter"]["num_medusa_heads"] == 4
            for number, tree in enumerate(trees):
                params = greedy(count, medusa_choices=tree, adaptive=number % 3 == 2)
                assert decode(llm, prompts, params) == plain, tree
                compared += sum(map(len, plain))
            mixed = [
                greedy(count, **rng.choice([
                    {}, {"speculative": False}, {"max_draft_len": rng.randrange(20)},
                    {"medusa_choices": rng.choice(trees)},
                    {"medusa_choices": LEVELS, "adaptive": False, "max_draft_len": 5},
                ]))
                for _ in prompts
            ]  # fmt: skip
            assert decode(llm, prompts, mixed) == plain
            drafter = llm.get_metrics()["drafter"]
            assert counts_of(llm)["num_accepted_tokens"] > 20
            assert drafter["num_proposals"] > 50 and drafter["num_idle"] > 0
    assert compared >= 3 * 4 * count * batch


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_fifty_thousand_tokens(tmp_path: Path, shape: str, batch: int) -> None:
    folder = save_target(tmp_path / "target", seed=len(shape), **SHAPES[shape])
    hidden = SHAPES[shape].get("hidden_size", 32)
    save_heads(tmp_path / "heads", hidden=hidden, lm_head="target", scale=0.02, seed=batch)
    rng, prompts = random.Random(f"{shape}-{batch}"), make_prompts(batch + 3, seed=batch)
    with open_llm(folder, None, None, batch) as llm:
        plain = decode(llm, prompts, greedy(70))
    for depth in DEPTHS:
        with open_llm(
            folder, MedusaDecodingConfig(tmp_path / "heads", LARGEST), depth, batch
        ) as llm:
            for adaptive in (True, False, False):
                tree = [list(n) for n in ref.random_tree(rng, 127, 4, 8)]
                params = greedy(70, medusa_choices=tree, adaptive=adaptive)
                assert decode(llm, prompts, params) == plain, tree
            assert counts_of(llm)["num_accepted_tokens"] > 0


def test_drafts_and_acceptance_are_those_of_the_host(target: Path, heads: Path) -> None:
    """The same heads see the same hidden states: counts equal, one request after another."""
    prompts, text = make_prompts(4, seed=2), greedy(60)
    params = [
        text,
        dataclasses.replace(text, medusa_choices=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]),
        dataclasses.replace(text, max_draft_len=5),
        dataclasses.replace(text, medusa_choices=[[i] for i in range(9)]),
    ]
    found = []
    for depth in (None, *DEPTHS):
        config = MedusaDecodingConfig(heads, LEVELS, adaptive=False)
        with open_llm(target, config, depth) as llm:
            texts, steps = [], []
            for prompt, asked in zip(prompts, params, strict=True):
                (out,) = llm.generate([prompt], asked, use_tqdm=False)
                texts.append(list(out.outputs[0].token_ids))
                counts = out.metrics["speculative_decoding"]
                steps.append((counts["per_step_drafted"], counts["per_step_accepted"]))
            found.append((texts, steps, counts_of(llm)))
    assert found[1:] == found[:1] * 3
    accepted = [n for _, each in found[0][1] for n in each]
    assert max(accepted) == 4 and sum(accepted) > 30


RULES = [
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.8, "acceptance": "rejection"},
    {"temperature": 0.7, "acceptance": "typical", "posterior_threshold": 0.05},
    {"temperature": 0.7, "acceptance": "threshold", "acceptance_threshold": 0.05, "top_k": 20},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("default", ["exact_match", "typical"])
def test_sampled_text_is_that_of_the_host(target: Path, heads: Path, default: str) -> None:
    """Every rule in one batch; a configuration's default rule reaches requests that name none."""
    prompts = make_prompts(5, seed=3)
    params = [greedy(40, seed=i, **rule) for i, rule in enumerate(RULES)]
    config = MedusaDecodingConfig(heads, LEVELS, acceptance=default, adaptive=False)
    with open_llm(target, None, None) as llm:
        exact = decode(llm, prompts, [greedy(40, seed=i, **RULES[0]) for i in range(5)])
    found = []
    for depth in (None, *DEPTHS):
        with open_llm(target, config, depth, 5) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            labels = [out.metrics["acceptance"] for out in outputs]
            assert labels[1:4] == ["rejection", "typical (lossy)", "threshold (lossy)"]
            texts = [list(out.outputs[0].token_ids) for out in outputs]
            found.append((texts, labels, counts_of(llm)))
    assert found[1:] == found[:1] * 3
    assert (found[0][0][0] == exact[0]) == (default == "exact_match")


def test_streams_cancellations_and_async(target: Path, heads: Path) -> None:
    prompts, params = make_prompts(3, seed=5), greedy(40)
    with open_llm(target, None, None) as llm:
        plain = decode(llm, prompts, params)
    with open_llm(target, MedusaDecodingConfig(heads), 2) as llm:
        streamed: list[int] = []
        for output in llm.stream(prompts[0], params):
            streamed += output.outputs[0].delta_token_ids
        assert streamed == plain[0]

        async def both() -> list[list[int]]:
            runs = [llm.generate_async(p, params) for p in prompts[1:]]
            return [list((await r).outputs[0].token_ids) for r in runs]

        assert asyncio.run(both()) == plain[1:]
        stream = llm.stream(prompts[0], params)
        next(stream)
        stream.close()
        assert decode(llm, prompts, params) == plain
        assert counts_of(llm)["num_draft_tokens"] > 0


def test_what_does_not_fit_is_refused(target: Path, heads: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hidden_size"):
        open_llm(target, MedusaDecodingConfig(save_heads(tmp_path, hidden=16)), 1)
    with open_llm(target, MedusaDecodingConfig(heads, LEVELS), 1) as llm:
        for choices, message in (
            ([[0, 0, 0, 0, 0]], "medusa_choices.*head"),
            ([[i] for i in range(10)], "medusa_choices.*10"),
            ([[48]], "medusa_choices"),
        ):
            bad = [greedy(9), greedy(9, medusa_choices=choices)]
            with pytest.raises(RequestError, match=message):
                llm.generate(make_prompts(2, 1), bad, use_tqdm=False)
        assert llm.get_metrics()["executor"]["steps"] == 0


def test_the_command_line(target: Path, heads: Path, tmp_path: Path, capsys: Any) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [3, 4, 5]}\n{"prompt_token_ids": [7]}\n')
    argv = ["generate", "--model", str(target), "--medusa_model", str(heads), "--json",
            "--input_file", str(prompts), "--max_output_len", "30", "--max_seq_len", "100",
            "--max_batch_size", "2", "--verify", "--no-adaptive", "--run-ahead", "1"]  # fmt: skip
    capsys.readouterr()
    assert main(argv) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["identical"] for line in lines] == [True, True]
    for line in lines:
        assert line["metrics"]["speculative_decoding"]["num_draft_tokens"] > 63


@pytest.mark.default_model
def test_the_shipped_heads_run_ahead(default_model_path: Path, tmp_path: Path, capsys: Any) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Write the numbers from one to ten.\n")
    argv = ["generate", "--medusa", "--run-ahead", "1", "--json", "--input_file", str(prompts),
            "--max_output_len", "32", "--max_batch_size", "1", "--verify",
            "--no-adaptive", "--medusa_choices", "[[0],[1],[0,0],[0,0,0]]"]  # fmt: skip
    capsys.readouterr()
    assert main(argv) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    counts = line["metrics"]["speculative_decoding"]
    assert line["identical"] is True and counts["num_accepted_draft_tokens"] > 3


# -- on a device ----------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("lm_head", ["own", "target"])
def test_a_device_brings_the_drafts_of_the_host(
    target: Path, tmp_path: Path, device: str, lm_head: str
) -> None:
    save_heads(tmp_path, lm_head=lm_head, layers=2, scale=0.05, ids=[*range(0, VOCAB, 2), 5])
    prompts = make_prompts(4, seed=7)
    params = [greedy(24), greedy(24, temperature=0.8, seed=4, acceptance="typical"),
              greedy(24, medusa_choices=[[0, 0], [3], [9]]),
              greedy(24, max_draft_len=4)]  # fmt: skip
    found = []
    for where, depth in (("cpu", None), ("cpu", 1), (device, 0), (device, 2)):
        config = MedusaDecodingConfig(tmp_path, LEVELS, adaptive=False)
        with open_llm(target, config, depth, 4, device=where) as llm:
            found.append((decode(llm, prompts, params), counts_of(llm)))
            assert llm.get_metrics()["drafter"]["device"] == llm.device
    assert found[1:] == found[:1] * 3
    assert found[0][1]["num_accepted_tokens"] > 0


def replays_with_poisoned_padding(target: Path, heads: Path, device: str) -> None:
    prompts, params = make_prompts(5, seed=9), greedy(12)
    with open_llm(target, None, None) as llm:
        plain = decode(llm, prompts, params)
    config = MedusaDecodingConfig(heads, LEVELS, adaptive=False)
    with open_llm(target, config, 1, device=device) as llm:
        pipeline = llm.engine._pipeline  # type: ignore[attr-defined]
        recorder = FakeRecorder()
        recorder.buffers = pipeline.buffers
        pipeline._recorder = recorder
        pipeline.buckets = make_buckets(3, pipeline.executor.max_rows_per_request, 48)
        assert decode(llm, prompts, params) == plain
        mixed = [params, greedy(12, speculative=False), greedy(12, medusa_choices=[[1, 1], [5]])]
        assert decode(llm, prompts[:3], mixed) == plain[:3]
        assert recorder.recorded > 1
        assert recorder.replayed > 8
        assert counts_of(llm)["num_accepted_tokens"] > 0


@devices
def test_recorded_steps_draft_for_whoever_is_there(target: Path, heads: Path, device: str) -> None:
    replays_with_poisoned_padding(target, heads, device)


@pytest.mark.parametrize("device", [pytest.param("cuda-emu", marks=EMULATED)])
def test_every_access_of_a_padded_step_is_legal(target: Path, heads: Path, device: str) -> None:
    """The emulation that checks bounds, races and initialisation."""
    replays_with_poisoned_padding(target, heads, device)


@devices
@pytest.mark.parametrize("law", [{}, {"temperature": 0.7, "acceptance": "typical"}])
@pytest.mark.parametrize("lm_head", ["own", "target"])
def test_steps_wait_for_nothing_and_make_nothing(
    target: Path, tmp_path: Path, device: str, lm_head: str, law: dict[str, Any]
) -> None:
    """Copies between buffers that are there, products into them; requests enter midway."""
    save_heads(tmp_path, lm_head=lm_head, scale=0.02)
    config = MedusaDecodingConfig(tmp_path, LEVELS, adaptive=False)
    prompts = make_prompts(3, seed=11)
    with open_llm(target, config, 1, device=device) as llm:
        decode(llm, prompts, greedy(14, **law))  # grows scratch memory
        pipeline = llm.engine._pipeline  # type: ignore[attr-defined]
        pipeline.draft_options = lambda _: {"medusa_choices": config.medusa_choices}
        for prompt in prompts[:2]:
            pipeline.executor.submit(prompt, max_tokens=14, **law)
        assert pipeline.step() == []
        before = llm.get_metrics()["drafter"]
        with no_synchronisation(device), Recorder() as seen:
            for step in range(8):
                if step == 3:
                    pipeline.executor.submit(prompts[2], max_tokens=9, **law)
                pipeline.step()
        pipeline.drain()
        after = llm.get_metrics()
        assert after["drafter"]["buffer_bytes"] == before["buffer_bytes"] > 0
        assert after["drafter"]["failures"] == 0
    assert seen.names <= ENQUEUED | VIEWS | HEADS
    assert "aten::gather.out" in seen.names


@devices
def test_memory_is_counted_before_pages_are_sized(target: Path, heads: Path, device: str) -> None:
    with open_llm(target, MedusaDecodingConfig(heads, LEVELS), 1, device=device) as llm:
        pipeline = llm.engine._pipeline  # type: ignore[attr-defined]
        buffers, scores = pipeline.buffers, pipeline._forward._scores
        rings = (buffers.staging_ring, buffers.entry_ring, buffers.result_ring, buffers.score_ring,
                 buffers.tree_ring)  # fmt: skip
        kept = buffers.memory_bytes - sum(t.numel() * t.element_size() for t in rings)
        kept += sum(t.numel() * t.element_size() for t in (scores, pipeline._hidden))
        drafting = {"method": "proposed", "proposed_max_draft_len": 9, "proposed_max_path": 4}
        hidden = llm.model.hidden_size * llm.model.kv_dtype.itemsize
        kept += MAX_STEP_TOKENS * hidden * len(pipeline._hidden)  # made when the host chooses
        counted = device_bytes(llm.memory, llm.scheduler_config, drafting, VOCAB, hidden)
        assert pipeline.drafter.scratch_bytes(3) == 4 * 3 * VOCAB * 4
    assert kept <= counted <= kept + 4096


class Watching(RunAheadPipeline):
    """Fails when a slot is taken while a step that named it has not been read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.unread: deque[set[int]] = deque()
        self.entered = 0

    def _stage(self, planned: Any) -> None:
        staging = self.buffers.staging
        ring = self.buffers.staging_ring[planned.ring]
        for entry in planned.entries:
            assert all(entry.slot not in named for named in self.unread)
            self.entered += 1
        self.unread.append(set(ring[staging.slot_ids :][: staging.requests].tolist()))
        super()._stage(planned)

    def _deliver(self) -> list[Any]:
        outputs = super()._deliver()
        self.unread.popleft()
        return outputs


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_a_slot_brings_is_written_after_its_last_use(depth: int) -> None:
    """So the host's copy of a slot's tree is read no more when the next one is written there."""
    entered = 0
    for seed in range(12):
        drafter: Any = None
        function, engine = random_hash_engine(
            random.Random(seed), seed, depth, pipeline=Watching,
            drafter=(drafter := Guesser(None, seed)),  # type: ignore[arg-type]
            **EXTERNAL,
        )  # fmt: skip
        drafter.function = function
        engine.run(jobs_of(random.Random(seed), function, 8))
        entered += engine.pipeline.entered  # type: ignore[attr-defined]
    assert entered > 60
