"""ReDrafter with run-ahead: plain decoding's text, and on the CPU the host engine's counts."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pytest
from run_ahead_driver import FakeRecorder
from test_run_ahead_device import ENQUEUED, VIEWS
from transformers import LlamaForCausalLM

from dispatch_recorder import Recorder, no_synchronisation
from emulators import EMULATED, devices
from model.redrafter_cases import KINDS, random_drafter, trained_drafter
from specdec_ext import (
    LLM,
    ModelError,
    ReDrafterDecodingConfig,
    SamplingParams,
)
from specdec_ext.cli import main
from specdec_ext.cli.common import add_llm_arguments, llm_kwargs
from specdec_ext.engine.overlap import make_buckets
from tiny_models import save_llama

pytestmark = pytest.mark.usefixtures("on_stream")

VOCAB, HIDDEN, NUM_TOKENS = 48, 32, 24
DEPTHS = (0, 1, 2)
# What the drafter's search enqueues beside what every step does.
SEARCHED = {
    "aten::silu_", "aten::add_.Tensor", "aten::clamp.out", "aten::minimum.out", "aten::topk.values",
    "aten::gather.out", "aten::exp_",
}  # fmt: skip
COUNTS = ("num_draft_tokens", "num_accepted_tokens", "rows", "generated_tokens")


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 25))] for _ in range(count)]


def open_llm(
    folder: Path, spec: Any, run_ahead: int | None, *, batch: int = 16, **kwargs: Any
) -> LLM:
    settings: dict[str, Any] = {
        "scheduler_config": {"max_batch_size": batch, "max_seq_len": 96, "max_num_tokens": 480,
                             "run_ahead": run_ahead},
        "kv_cache_config": {"tokens_per_block": 8},
        "device": "cpu",
    }  # fmt: skip
    return LLM(folder, speculative_config=spec, **{**settings, **kwargs})


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **options)


def run(llm: LLM, texts: list[list[int]], params: Any) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(texts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("ahead") / "target", 11, VOCAB)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    with open_llm(target, None, None) as llm:
        return run(llm, prompts(16), greedy())


@pytest.fixture(scope="module")
def learnt(target: Path, plain: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that has learnt the target's text on the prompts of these tests."""
    model = LlamaForCausalLM.from_pretrained(target)
    texts = [p + t for p, t in zip(prompts(16), plain, strict=True)]
    return trained_drafter(tmp_path_factory.mktemp("learnt"), model, texts)


def mixed(seed: int) -> list[SamplingParams]:
    """Requests of their own beams, lengths and limits, some without drafts."""
    rng = random.Random(seed)
    return [
        greedy(speculative=False)
        if rng.random() < 0.2
        else greedy(
            redrafter_num_beams=rng.choice([None, 1, 2, 4]),
            redrafter_draft_len_per_beam=rng.choice([None, 1, 3]),
            max_draft_len=rng.choice([None, None, 3, 0]),
        )
        for _ in range(16)
    ]


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_same_text_and_counts_as_on_the_host(
    target: Path, learnt: Path, plain: list[list[int]], batch: int
) -> None:
    spec = ReDrafterDecodingConfig(learnt, 4, 5, adaptive=False)
    texts = prompts(16)[: 2 * batch]
    seen = []
    for depth in (None, *DEPTHS):
        with open_llm(target, spec, depth, batch=batch) as llm:
            for params in (greedy(), mixed(batch)[: len(texts)]):
                assert run(llm, texts, params) == plain[: len(texts)]
            metrics = llm.get_metrics()
        stats, drafting = metrics["executor"], metrics["speculative_decoding"]
        counts = {name: stats[name] for name in COUNTS}
        counts["histogram"] = drafting["acceptance_histogram"]
        seen.append(counts)
        assert metrics["drafter"]["failures"] == 0
        assert drafting["mean_acceptance_length"] > 1.5
    assert seen[0] == seen[1] == seen[2] == seen[3]


@pytest.mark.parametrize("kind", KINDS)
def test_every_network(target: Path, plain: list[list[int]], kind: str, tmp_path: Path) -> None:
    drafter = random_drafter(tmp_path, kind, HIDDEN, VOCAB, 5)
    counts = []
    for depth in (None, 1):
        with open_llm(target, ReDrafterDecodingConfig(drafter, 5, 5, adaptive=False), depth) as llm:
            assert run(llm, prompts(16), mixed(4)) == plain
            metrics = llm.get_metrics()
        assert metrics["drafter"]["failures"] == 0
        counts.append(metrics["executor"]["num_draft_tokens"])
        assert metrics["drafter"]["network_passes"] > 50
    assert counts[0] == counts[1]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 7), (10, 1), (25, 5), (127, 1), (1, 127)])
def test_every_number_of_beams_and_length(
    target: Path, learnt: Path, plain: list[list[int]], sizes: tuple[int, int]
) -> None:
    spec = ReDrafterDecodingConfig(learnt, *sizes, adaptive=False)
    with open_llm(target, spec, 2, batch=3) as llm:
        assert run(llm, prompts(16)[:4], greedy()) == plain[:4]
        assert llm.get_metrics()["drafter"]["failures"] == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_adaptive_drafts_are_weighed_by_what_they_bring(
    target: Path, learnt: Path, plain: list[list[int]], depth: int
) -> None:
    """The default configuration; T(rows) is measured before the first step."""
    with open_llm(target, ReDrafterDecodingConfig(learnt), depth, batch=3) as llm:
        for params in (greedy(), mixed(1)):
            assert run(llm, prompts(16), params) == plain
        metrics = llm.get_metrics()
    assert metrics["drafter"]["failures"] == 0
    assert metrics["executor"]["num_accepted_tokens"] > 0
    assert metrics["executor"]["free_pages"] == metrics["executor"]["total_pages"]


RULES: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 0.8, "acceptance": "rejection", "top_p": 0.9},
    {"temperature": 0.6, "acceptance": "typical"},
    {"temperature": 0.7, "acceptance": "threshold", "acceptance_threshold": 0.05, "top_k": 20},
    {},
]


def test_sampled_requests_of_every_rule(target: Path, learnt: Path) -> None:
    """In one batch, as the host's executor draws them."""
    params = [greedy(seed=i, **RULES[i % len(RULES)]) for i in range(16)]
    spec = ReDrafterDecodingConfig(learnt, 3, 4, adaptive=False)
    texts = []
    for depth in (None, *DEPTHS):
        with open_llm(target, spec, depth) as llm:
            texts.append(run(llm, prompts(16), params))
            assert llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"] > 20
    assert texts[0] == texts[1] == texts[2] == texts[3]
    with open_llm(target, None, None) as llm:
        lossless = [i for i, p in enumerate(params) if p.acceptance in ("exact_match", "rejection")]
        alone = [greedy(seed=i, temperature=params[i].temperature, top_p=params[i].top_p)
                 for i in lossless]  # fmt: skip
        drawn = run(llm, [prompts(16)[i] for i in lossless], alone)
    assert drawn == [texts[0][i] for i in lossless]


def recorded_steps(
    target: Path, learnt: Path, plain: list[list[int]], count: int, **where: Any
) -> None:
    """Replayed with the padding poisoned; a bucket without drafts leaves the drafter out."""
    spec = ReDrafterDecodingConfig(learnt, 4, 3, adaptive=False)
    with open_llm(target, spec, 1, batch=3, **where) as llm:
        pipeline = llm.engine._pipeline  # type: ignore[attr-defined]
        recorder = FakeRecorder()
        recorder.buffers = pipeline.buffers
        pipeline._recorder = recorder
        pipeline.buckets = make_buckets(3, pipeline.executor.max_rows_per_request, 48)
        assert run(llm, prompts(16)[:count], mixed(2)[:count]) == plain[:count]
        assert recorder.recorded > 1 and recorder.replayed > 10
        assert llm.get_metrics()["drafter"]["failures"] == 0


def test_recorded_steps(target: Path, learnt: Path, plain: list[list[int]]) -> None:
    recorded_steps(target, learnt, plain, 16)


BEAM_RULES: list[dict[str, Any]] = [
    {"temperature": 0.8, "acceptance": "best_beam"},
    {"temperature": 0.8},
    {"temperature": 1.2, "acceptance": "best_beam", "top_p": 0.9, "redrafter_num_beams": 2},
    {"acceptance": "best_beam"},
    {"temperature": 0.5, "acceptance": "rejection"},
]


@pytest.mark.parametrize("greedy_search", [True, False])
def test_beams_are_held_against_what_they_were_chosen_from(
    target: Path, learnt: Path, greedy_search: bool
) -> None:
    """Texts and counts of the rule best_beam beside others, at the request's temperature too."""
    params = [greedy(seed=i, **BEAM_RULES[i % len(BEAM_RULES)]) for i in range(16)]
    spec = ReDrafterDecodingConfig(learnt, 3, 4, adaptive=False, greedy_search=greedy_search)
    seen = []
    for depth in (None, *DEPTHS):
        with open_llm(target, spec, depth, batch=5) as llm:
            texts = run(llm, prompts(16), params)
            metrics = llm.get_metrics()
        assert metrics["drafter"]["failures"] == 0
        stats = metrics["executor"]
        seen.append((texts, [stats[name] for name in COUNTS]))
        assert stats["num_accepted_tokens"] > 20
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_a_drafter_of_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    drafter = random_drafter(tmp_path, "apple", HIDDEN + 8, VOCAB)
    with pytest.raises(ModelError, match=f"{tmp_path}.*hidden_size = 40.*has 32"):
        open_llm(target, ReDrafterDecodingConfig(drafter), 1)


def test_from_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_llm_arguments(parser)
    settings = llm_kwargs(parser.parse_args(["--redrafter", "--run-ahead", "1"]))
    assert settings["scheduler_config"].run_ahead == 1
    assert isinstance(settings["speculative_config"], ReDrafterDecodingConfig)
    args = parser.parse_args(["--redrafter", "--redrafter-no-greedy-search", "--run-ahead", "1"])
    assert llm_kwargs(args)["speculative_config"].greedy_search is False


def on(device: str) -> dict[str, Any]:
    return {"device": device, "dtype": "float32"}


@devices
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_device_says_the_same(
    target: Path, learnt: Path, plain: list[list[int]], device: str, depth: int
) -> None:
    """The search on the device, and with it the counts of the CPU; then requests of all kinds."""
    spec = ReDrafterDecodingConfig(learnt, 4, 5, adaptive=False)
    counts = []
    for where in ({}, on(device)):
        with open_llm(target, spec, depth, batch=3, **where) as llm:
            assert run(llm, prompts(16)[:6], greedy()) == plain[:6]
            stats = llm.get_metrics()["executor"]
            counts.append([stats[name] for name in COUNTS[:2]])
            assert run(llm, prompts(16)[:6], mixed(depth)[:6]) == plain[:6]
            drafting = llm.get_metrics()["drafter"]
        assert drafting["failures"] == 0
        assert drafting["memory_bytes"] > 1000
    slack = 4 if device == "cuda" else 0  # sums that are as good as equal
    assert all(abs(a - b) <= slack for a, b in zip(*counts, strict=True))
    assert counts[0][1] > 50


@devices
def test_sampled_and_adaptive_requests_on_a_device(target: Path, learnt: Path, device: str) -> None:
    params = [greedy(seed=i, **RULES[i]) for i in (0, 1, 4)]
    texts = []
    for depth, where in ((None, {}), (0, on(device)), (2, on(device))):
        spec = None if depth is None else ReDrafterDecodingConfig(learnt, 3, 3)
        if depth is None:
            alone = [greedy(seed=p.seed, temperature=p.temperature, top_p=p.top_p) for p in params]
        with open_llm(target, spec, depth, batch=3, **where) as llm:
            texts.append(run(llm, prompts(3), alone if depth is None else params))
    assert texts[0] == texts[1] == texts[2]


@devices
@pytest.mark.parametrize("greedy_search", [True, False])
def test_a_device_holds_beams_against_what_they_were_chosen_from(
    target: Path, learnt: Path, device: str, greedy_search: bool
) -> None:
    params = [greedy(seed=i, **BEAM_RULES[i % len(BEAM_RULES)]) for i in range(6)]
    spec = ReDrafterDecodingConfig(learnt, 3, 4, adaptive=False, greedy_search=greedy_search)
    texts = []
    for depth, where in ((1, {}), (0, on(device)), (2, on(device))):
        with open_llm(target, spec, depth, batch=3, **where) as llm:
            texts.append(run(llm, prompts(6), params))
            metrics = llm.get_metrics()
        assert metrics["drafter"]["failures"] == 0
        assert metrics["executor"]["num_accepted_tokens"] > 10
    assert texts[0] == texts[1] == texts[2]


@devices
@pytest.mark.parametrize("kind", ["tied", "reduced"])
def test_half_precision_on_a_device(target: Path, device: str, kind: str, tmp_path: Path) -> None:
    """Exact numerics, so that drafts cannot show."""
    drafter = random_drafter(tmp_path, kind, HIDDEN, VOCAB, 2)
    how = {"device": device, "dtype": "bfloat16", "numerics": "exact", "batch": 3}
    with open_llm(target, None, None, **how) as llm:
        wanted = run(llm, prompts(3), greedy())
    with open_llm(target, ReDrafterDecodingConfig(drafter, 3, 4), 2, **how) as llm:
        assert run(llm, prompts(3), greedy(adaptive=False)) == wanted
        assert llm.get_metrics()["drafter"]["failures"] == 0
        assert llm.get_metrics()["executor"]["num_draft_tokens"] > 100


@devices
@pytest.mark.parametrize("kind", ["reduced tied", "tied", "no rnn"])
def test_steps_wait_for_nothing_but_events(
    target: Path, device: str, kind: str, tmp_path: Path
) -> None:
    """No copy to the host but the ring's, no value read, no tensor made; a prompt joins midway."""
    drafter = random_drafter(tmp_path, kind, HIDDEN, VOCAB, 2)
    spec = ReDrafterDecodingConfig(drafter, 3, 3, adaptive=False)
    with open_llm(target, spec, 1, batch=3, **on(device)) as llm:
        pipeline = llm.engine._pipeline  # type: ignore[attr-defined]
        run(llm, prompts(3), greedy())  # grows scratch memory
        for prompt in prompts(2):
            pipeline.executor.submit(prompt, max_tokens=14)
        pipeline.draft_options = lambda _: {"num_beams": 2, "length": 3, "adaptive": False}
        assert pipeline.step() == []
        with no_synchronisation(device), Recorder() as seen:
            for step in range(8):
                if step == 3:
                    pipeline.executor.submit(prompts(3)[2], max_tokens=3)
                pipeline.step()
        pipeline.drain()
        assert llm.get_metrics()["drafter"]["failures"] == 0
    assert seen.names <= ENQUEUED | VIEWS | SEARCHED


@devices
def test_recorded_steps_of_a_device(
    target: Path, learnt: Path, plain: list[list[int]], device: str
) -> None:
    recorded_steps(target, learnt, plain, 8, **on(device))


@pytest.mark.parametrize("device", [pytest.param("cuda-emu", marks=EMULATED)])
def test_every_access_of_a_padded_step_is_legal(
    target: Path, learnt: Path, plain: list[list[int]], device: str
) -> None:
    """The emulation that checks bounds, races and initialisation."""
    recorded_steps(target, learnt, plain, 5, **on(device))


@pytest.mark.default_model
def test_the_shipped_drafter(default_model_path: Path, tmp_path: Path, capsys: Any) -> None:
    """From the command line: plain text, fewer passes."""
    del default_model_path
    texts = tmp_path / "prompts.txt"
    texts.write_text("Write a list of the numbers from one to twenty.\n")
    argv = ["generate", "--redrafter", "--run-ahead", "1", "--json", "--input_file", str(texts),
            "--max_output_len", "32", "--max_batch_size", "1", "--verify",
            "--no-adaptive"]  # fmt: skip
    capsys.readouterr()
    assert main(argv) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert line["identical"] is True
    assert line["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 8
    assert line["metrics"]["num_forward_passes"] < 24
