"""What every drafter of a step owes, by method, place and overlap depth.

Whatever it drafts, greedy and exact-match texts are plain decoding's; a failure costs the drafts of
its step; requests with and without drafts share a batch; drafts come likeliest first, with an
estimate that is never larger than the parent's.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_models import VOCAB, save_heads, save_target
from safetensors.torch import load_file, save_file

from emulators import EMULATED, needs_cuda
from model.redrafter_cases import random_drafter
from specdec_ext import (
    LLM,
    DraftTargetDecodingConfig,
    ExternalDraftTokensConfig,
    MedusaDecodingConfig,
    ReDrafterDecodingConfig,
    SamplingParams,
)
from specdec_ext.engine import build

HIDDEN, COUNT = 32, 24
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.8, top_p=0.9, seed=5)
CHOICES = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]
PROMPTS = [[random.Random(seed).randrange(VOCAB) for _ in range(1 + 7 * seed)] for seed in range(6)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target and what drafts for it: right now and then, and often wrong."""
    root = tmp_path_factory.mktemp("contracts")
    target = save_target(root / "target")
    shutil.copytree(target, root / "near")
    weights = load_file(root / "near" / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    noisy = {n: w + 0.03 * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    save_file(noisy, root / "near" / "model.safetensors", metadata={"format": "pt"})
    return {
        "target": target,
        "near": root / "near",
        "heads": save_heads(root / "heads", lm_head="target", scale=0.02),
        "network": random_drafter(root / "network", "tied", HIDDEN, VOCAB),
    }


Make = Callable[[dict[str, Path]], Any]
METHODS: dict[str, Make] = {
    "medusa": lambda f: MedusaDecodingConfig(f["heads"], CHOICES, adaptive=False),
    "redrafter": lambda f: ReDrafterDecodingConfig(f["network"], 3, 4, adaptive=False),
    "chain": lambda f: DraftTargetDecodingConfig(f["near"], max_draft_len=4, adaptive=False),
    "tree": lambda f: DraftTargetDecodingConfig(
        f["near"], max_draft_len=9, top_k=3, max_draft_depth=4, adaptive=False
    ),
}
methods = pytest.mark.parametrize("method", METHODS)
depths = pytest.mark.parametrize("depth", [0, 1, 2])
places = pytest.mark.parametrize(
    "place",
    [
        pytest.param("cpu", id="cpu"),
        pytest.param("stream", id="stream"),  # what a device runs, over the CPU's buffers
        pytest.param("cuda-emu-fast", id="emu-fast", marks=EMULATED),
        pytest.param("cuda", id="cuda", marks=needs_cuda),
    ],
)


def open_llm(
    folders: dict[str, Path],
    method: str | None,
    place: str,
    depth: int,
    spec: Any = None,
    **options: Any,
) -> LLM:
    settings: dict[str, Any] = {
        "scheduler_config": {"max_batch_size": 3, "max_seq_len": 96, "overlap_depth": depth},
        "kv_cache_config": {"tokens_per_block": 8},
        "device": place,
        "dtype": "float32",
    }
    spec = spec if method is None else METHODS[method](folders)
    if place == "stream":
        settings["device"] = "cpu"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(build.EngineBuilder, "_on_stream", True)
            return LLM(folders["target"], speculative_config=spec, **{**settings, **options})
    return LLM(folders["target"], speculative_config=spec, **{**settings, **options})


def drafter_of(llm: LLM) -> Any:
    """Whether steps are enqueued or the host runs them."""
    engine: Any = llm.engine
    return getattr(engine, "_pipeline", engine._drafting).drafter


def texts_of(llm: LLM, params: Any) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    with open_llm(folders, None, "cpu", 0) as llm:
        return {"greedy": texts_of(llm, GREEDY), "sampled": texts_of(llm, SAMPLED)}


def check(llm: LLM, failures: bool = False) -> dict[str, Any]:
    """Nothing is left over; the metrics."""
    metrics = llm.get_metrics()
    assert bool(metrics["drafter"]["failures"]) == failures
    assert metrics["executor"]["free_pages"] == metrics["executor"]["total_pages"]
    assert metrics["drafter"]["memory_bytes"] > 0
    return dict(metrics["speculative_decoding"])


@places
@depths
@methods
def test_texts_are_those_of_plain_decoding(
    folders: dict[str, Path], plain: dict[str, Any], method: str, place: str, depth: int
) -> None:
    with open_llm(folders, method, place, depth) as llm:
        assert texts_of(llm, GREEDY) == plain["greedy"]
        assert texts_of(llm, SAMPLED) == plain["sampled"]
        counts = check(llm)
    assert counts["num_draft_tokens"] > 200
    if method in ("chain", "tree"):
        assert counts["num_accepted_draft_tokens"] > 40


@places
@depths
@methods
def test_requests_of_all_kinds_share_a_batch(
    folders: dict[str, Path], plain: dict[str, Any], method: str, place: str, depth: int
) -> None:
    """Without drafts, with fewer, with tokens that the host chooses, and sampled ones."""
    kinds: list[dict[str, Any]] = [
        {}, {"speculative": False}, {"max_draft_len": 2}, {"logprobs": 1}, {"temperature": 0.8,
        "top_p": 0.9, "seed": 5}, {"max_draft_len": 0},
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=COUNT, ignore_eos=True, **kind) for kind in kinds]
    wanted = [plain["sampled" if "seed" in kind else "greedy"][i] for i, kind in enumerate(kinds)]
    with open_llm(folders, method, place, depth) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        check(llm)
    assert [list(out.outputs[0].token_ids) for out in outputs] == wanted
    drafted = [out.metrics["speculative_decoding"]["num_draft_tokens"] for out in outputs]
    assert [count > 0 for count in drafted] == [True, False, True, True, True, False]


@places
@depths
@methods
def test_requests_that_need_the_host_draft_as_others_do(
    folders: dict[str, Path], plain: dict[str, Any], method: str, place: str, depth: int
) -> None:
    """Scores are read, or changed, or drafts come with the request: text, drafts and acceptance are
    those of a request that asks for nothing."""
    kinds: list[dict[str, Any]] = [
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"return_generation_logits": True},
        {"logits_processors": [lambda text, scores: scores + 1.0]},
        {"external_draft": ExternalDraftTokensConfig([1, 2], continue_decoding=True)},
        {"logit_bias": {VOCAB - 1: 0.0}},
    ]
    each = {"max_tokens": COUNT, "ignore_eos": True}
    drafted = []
    with open_llm(folders, method, place, depth) as llm:
        for changes in ([{}] * len(kinds), kinds):
            params = [SamplingParams(**each, **change) for change in changes]
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert [list(out.outputs[0].token_ids) for out in outputs] == plain["greedy"]
            counts = [out.metrics["speculative_decoding"] for out in outputs]
            drafted.append(
                [(c["num_draft_tokens"], c["num_accepted_draft_tokens"]) for c in counts]
            )
        check(llm)
    external = kinds.index(next(kind for kind in kinds if "external_draft" in kind))
    tokens, accepted = drafted[0][external]
    drafted[0][external] = (tokens + 2, accepted)
    assert drafted[1] == drafted[0]


@places
@depths
@methods
def test_a_drafter_that_raises_costs_drafts_alone(
    folders: dict[str, Path], plain: dict[str, Any], method: str, place: str, depth: int
) -> None:
    with open_llm(folders, method, place, depth) as llm:
        drafter, calls = drafter_of(llm), 0
        draft = drafter.draft

        def fails(inputs: Any) -> None:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                draft(inputs)  # it had done all of it
            if calls % 3 != 1:
                raise RuntimeError("no drafts today")
            draft(inputs)

        drafter.draft = fails
        assert texts_of(llm, GREEDY) == plain["greedy"]
        assert check(llm, failures=True)["num_draft_tokens"] > 20


def brought(inputs: Any, slot: int) -> list[tuple[int, float]]:
    """(parent, estimate) of the drafts in a slot: cpp/algo/brought_draft.h."""
    words = inputs.slots[slot].view(torch.int32)
    block = words[len(words) - 384 :]  # len, count, 127 tokens, parents and estimates, padding
    if int(block[0]) != int(words[0]):
        return []
    count = int(block[1])
    parents = block[129 : 129 + count].tolist()
    return list(zip(parents, block[256 : 256 + count].view(torch.float32).tolist(), strict=True))


@places
@pytest.mark.parametrize("adaptive", [False, True])
@methods
def test_drafts_come_likeliest_first_with_their_estimates(
    folders: dict[str, Path], method: str, place: str, adaptive: bool
) -> None:
    seen = []
    with open_llm(folders, method, place, 0) as llm:
        drafter = drafter_of(llm)
        if method in ("chain", "tree"):
            drafter.wants_survival = True
        draft, enter = drafter.draft, drafter.enter

        def watched(inputs: Any) -> None:
            draft(inputs)
            seen.extend(brought(inputs, slot) for slot in inputs.slot_ids.tolist() if slot >= 0)

        def entered(slot: int, options: Any) -> None:  # no budget of the engine's is in the way
            enter(slot, {**options, "adaptive": adaptive} if options else options)

        drafter.draft, drafter.enter = watched, entered
        texts_of(llm, GREEDY)
        check(llm)
    trees = [tree for tree in seen if tree]
    assert len(trees) > 20 and max(map(len, trees)) >= 4
    for tree in trees:
        for parent, estimate in tree:
            assert 0.0 <= estimate <= 1.0
            assert parent < 0 or estimate <= tree[parent][1]
        if method != "medusa" or adaptive:  # else in the order that was asked for
            estimates = [estimate for _, estimate in tree]
            assert estimates == sorted(estimates, reverse=True)
    assert len({estimate for tree in trees for _, estimate in tree}) > 4


def test_drawn_drafts_have_no_estimate(folders: dict[str, Path]) -> None:
    """What a draft turned out to be must not decide whether it is verified."""
    params = SamplingParams(max_tokens=COUNT, temperature=0.9, seed=2, acceptance="rejection")
    seen = []
    with open_llm(folders, "chain", "cpu", 0) as llm:
        drafter = drafter_of(llm)
        drafter.wants_survival, draft = True, drafter.draft

        def watched(inputs: Any) -> None:
            draft(inputs)
            seen.extend(brought(inputs, slot) for slot in inputs.slot_ids.tolist() if slot >= 0)

        drafter.draft = watched
        texts_of(llm, params)
        check(llm)
    estimates = [estimate for tree in seen for _, estimate in tree]
    assert len(estimates) > 50 and set(estimates) == {-1.0}
