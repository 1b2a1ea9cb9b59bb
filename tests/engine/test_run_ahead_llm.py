"""LLM(scheduler_config={"run_ahead": ...}): the same text, usage and counts as without it."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest

from emulators import EMULATED, devices, needs_cuda
from specdec_ext import (
    LLM,
    ConfigError,
    ExternalDraftTokensConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    RequestError,
    SamplingParams,
    UserDrafterConfig,
)
from specdec_ext.cli.common import add_llm_arguments, llm_kwargs
from tiny_models import save_llama

VOCAB = 48
PROMPTS = [[5, 9, 2, 9, 2, 9, 2], [7], list(range(40, 4, -1)), [3, 1, 4, 3, 1, 4, 3, 1]]
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
SPECS: dict[str, Any] = {
    "none": None,
    "lookahead": LookaheadDecodingConfig(4, 3, 4, adaptive=False),
    "ngram": NGramDecodingConfig(4, adaptive=False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("ahead") / "target", 11, VOCAB)


def open_llm(folder: Path, spec: Any, run_ahead: int | None, **options: Any) -> LLM:
    limits = {"max_batch_size": 3, "max_seq_len": 96, "max_num_tokens": 48}
    settings: dict[str, Any] = {
        "scheduler_config": {**limits, "run_ahead": run_ahead},
        "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 512},
        "device": "cpu",
    }
    return LLM(folder, speculative_config=spec, **{**settings, **options})


def tokens_of(outputs: Any) -> list[list[int]]:
    assert [out.outputs[0].finish_reason for out in outputs] == ["length"] * len(outputs)
    return [list(out.outputs[0].token_ids) for out in outputs]


@pytest.mark.parametrize("method", SPECS)
def test_same_tokens_and_counts(folder: Path, method: str) -> None:
    with open_llm(folder, SPECS[method], None) as llm:
        wanted = [tokens_of(llm.generate([p], GREEDY, use_tqdm=False)) for p in PROMPTS]
        together = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        counted = llm.get_metrics()
    assert [w[0] for w in wanted] == together
    for depth in (0, 1, 2):
        with open_llm(folder, SPECS[method], depth) as llm:
            got = [tokens_of(llm.generate([p], GREEDY, use_tqdm=False)) for p in PROMPTS]
            assert got == wanted
            assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == together
            metrics = llm.get_metrics()
        for key in ("prompt_tokens", "generation_tokens", "request_success", "numerics"):
            assert metrics[key] == counted[key], key
        stats, host = metrics["executor"], counted["executor"]
        for key in ("rows", "prefill_rows", "num_draft_tokens", "num_accepted_tokens",
                    "generated_tokens", "finished", "free_pages"):  # fmt: skip
            assert stats[key] == host[key], key
        speculative, wanted_spec = metrics["speculative_decoding"], counted["speculative_decoding"]
        for key in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_rows"):
            if key in wanted_spec:
                assert speculative[key] == wanted_spec[key], key
        assert stats["in_flight"] == stats["retiring"] == 0
        assert metrics["time"]["forward_s"] > 0


SAMPLED = [
    SamplingParams(max_tokens=14, ignore_eos=True, seed=i + 3, temperature=temperature, **rule)
    for i, (temperature, rule) in enumerate(
        [
            (0.8, {}),
            (0.5, {"acceptance": "typical"}),
            (0.0, {}),
            (0.7, {"acceptance": "threshold", "acceptance_threshold": 0.05, "top_k": 20}),
        ]
    )
]


@devices
@pytest.mark.parametrize("method", SPECS)
def test_sampled_requests_say_what_they_say_without_run_ahead(
    folder: Path, device: str, method: str
) -> None:
    """Laws and rules mixed in a batch; the oracle decodes one request after another."""
    limits = {"max_batch_size": 4, "max_seq_len": 96, "max_num_tokens": 256}
    params = SAMPLED
    if method == "none":  # acceptance rules are refused where nothing drafts
        params = [
            SamplingParams(
                max_tokens=14,
                ignore_eos=True,
                seed=s.seed,
                temperature=s.temperature,
                top_k=s.top_k,
            )
            for s in SAMPLED
        ]
    texts = []
    for depth in (None, 0, 2):
        scheduler = {**limits, "run_ahead": depth}
        with open_llm(
            folder, SPECS[method], depth, device=device, scheduler_config=scheduler
        ) as llm:
            if depth is None:
                outputs = [
                    llm.generate([p], s, use_tqdm=False)[0]
                    for p, s in zip(PROMPTS, params, strict=True)
                ]
            else:
                outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            texts.append(tokens_of(outputs))
    assert texts[0] == texts[1] == texts[2]


def test_draft_lengths_follow_the_schedule(folder: Path) -> None:
    """As without run-ahead: the numbers of a lone request are the same."""
    spec = NGramDecodingConfig(4, adaptive=False, draft_len_schedule={1: 2, 2: 1})
    counts = []
    for depth in (None, 0, 2):
        with open_llm(folder, spec, depth) as llm:
            outputs = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
            stats = llm.get_metrics()["executor"]
            counts.append((tokens_of(outputs), stats["num_draft_tokens"], stats["rows"]))
            llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
            assert llm.get_metrics()["executor"]["unspeculated_steps"] > 0
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("spec", [LookaheadDecodingConfig(4, 3, 4), NGramDecodingConfig(4)])
def test_adaptive_budgets_are_calibrated_once(folder: Path, spec: Any) -> None:
    """The default configuration: T(rows) is measured before the first step."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with open_llm(folder, None, None) as llm:
        wanted = tokens_of(llm.generate(PROMPTS, params, use_tqdm=False))
    for depth in (0, 1, 2):
        with open_llm(folder, spec, depth) as llm:
            for calibrated in (False, True):
                assert (llm.engine._calibrate is None) == calibrated
                assert tokens_of(llm.generate(PROMPTS, params, use_tqdm=False)) == wanted
            stats = llm.get_metrics()["executor"]
            assert stats["free_pages"] == stats["total_pages"]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prefix_reuse(folder: Path, depth: int) -> None:
    """A second turn computes what is new; step costs are measured before anything is published."""
    reuse = {"tokens_per_block": 4, "max_tokens": 512, "enable_block_reuse": True}
    prompt = PROMPTS[2]
    answers: list[list[list[int]]] = []
    for run_ahead in (None, depth):
        with open_llm(folder, LookaheadDecodingConfig(4, 3, 4), run_ahead,
                      kv_cache_config=reuse) as llm:  # fmt: skip
            [first] = tokens_of(llm.generate([prompt], GREEDY, use_tqdm=False))
            outputs = llm.generate([prompt + first, prompt], GREEDY, use_tqdm=False)
            answers.append([first, *tokens_of(outputs)])
            stats = llm.get_metrics()["executor"]
            assert stats["reuse_hits"] == 2
            assert outputs[0].metrics["num_cached_tokens"] >= 40
            assert stats["free_pages"] == stats["total_pages"]
    assert answers[0] == answers[1]


@devices
@pytest.mark.parametrize("params", [{"repetition_penalty": 1.3, "logprobs": 1}, {"min_tokens": 9}])
def test_the_host_chooses_from_a_devices_scores(
    folder: Path, device: str, params: dict[str, Any]
) -> None:
    asked = [GREEDY, SamplingParams(max_tokens=14, **params), GREEDY,
             SamplingParams(max_tokens=9, logits_processors=[lambda _, row: -row])]  # fmt: skip
    texts = []
    for depth in (None, 0, 2):
        where = "cpu" if depth is None else device
        with open_llm(folder, SPECS["lookahead"], depth, device=where) as llm:
            outputs = llm.generate(PROMPTS, asked, use_tqdm=False)
            texts.append([list(out.outputs[0].token_ids) for out in outputs])
    assert texts[0] == texts[1] == texts[2]


@devices
@pytest.mark.parametrize("method", ["none", "lookahead"])
def test_a_device_runs_ahead(folder: Path, device: str, method: str) -> None:
    with open_llm(folder, None, None) as llm:
        wanted = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    for depth in (0, 2):
        with open_llm(folder, SPECS[method], depth, device=device) as llm:
            assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == wanted


def test_stop_strings_and_cancel(folder: Path) -> None:
    """Found when a step is read: what came after it is dropped and not counted."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with open_llm(folder, None, None) as llm:
        (text,) = tokens_of(llm.generate([PROMPTS[0]], params, use_tqdm=False))
    with open_llm(folder, SPECS["lookahead"], 2) as llm:
        seen: list[int] = []
        for out in llm.stream({"prompt_token_ids": PROMPTS[0]}, params):
            seen = list(out.outputs[0].token_ids)
            if len(seen) >= 6:
                break  # closing the iterator cancels
        assert seen == text[: len(seen)]
        assert tokens_of(llm.generate(PROMPTS[:1], params, use_tqdm=False)) == [text]
        stats = llm.get_metrics()["executor"]
        assert stats["cancelled"] == 1 and stats["free_pages"] == stats["total_pages"]


def test_asynchronous_requests(folder: Path) -> None:
    with open_llm(folder, None, None) as llm:
        wanted = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    with open_llm(folder, SPECS["lookahead"], 2) as llm:

        async def all_of_them() -> list[Any]:
            return list(
                await asyncio.gather(
                    *(llm.generate_async({"prompt_token_ids": p}, GREEDY) for p in PROMPTS)
                )
            )

        assert tokens_of(asyncio.run(all_of_them())) == wanted


def test_the_command_line_checks_before_a_model_is_loaded() -> None:
    parser = argparse.ArgumentParser()
    add_llm_arguments(parser)
    args = parser.parse_args(
        ["--run-ahead", "1", "--no-enforce-eager", "--lookahead-config", "[4,3,4]", "--no-adaptive"]
    )
    scheduler = llm_kwargs(args)["scheduler_config"]
    assert (scheduler.run_ahead, scheduler.enforce_eager) == (1, False)
    args = parser.parse_args(["--run-ahead", "1", "--lookahead-config", "[4,3,4]"])
    assert llm_kwargs(args)["scheduler_config"].run_ahead == 1
    lookup = ["--prompt-lookup-config", "[4,2]", "--prompt-lookup-style", "v1"]
    args = parser.parse_args(["--run-ahead", "1", *lookup])
    assert llm_kwargs(args)["scheduler_config"].run_ahead == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_ahead": 3}, "overlap_depth = 3"),
        ({"run_ahead": None, "eager": False}, "overlap_depth=1, or leave enforce_eager out"),
    ],
)
def test_what_does_not_go_together_is_refused(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    depth = options.pop("run_ahead", 1)
    if "eager" in options:
        scheduler = {"run_ahead": depth, "enforce_eager": options.pop("eager")}
        options["scheduler_config"] = scheduler
    with pytest.raises(ConfigError, match=message):
        open_llm(folder, None, depth, **options)


class Guesses:
    """Trees from the history: what stood behind its last token before, and a wrong sibling."""

    def propose(self, history: list[int], budget: int) -> tuple[list[int], list[int]]:
        at = max((i for i, t in enumerate(history[:-1]) if t == history[-1]), default=-1)
        chain = history[at + 1 : at + 1 + (budget - 1) // 2] if at >= 0 else [1]
        tokens, parents = [VOCAB - 1], [-1]
        for i, token in enumerate(chain):
            tokens.append(token)
            parents.append(i if i else -1)
        return tokens, parents


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "place",
    [
        "cpu",
        "stream",
        pytest.param("cuda-emu-fast", marks=EMULATED),
        pytest.param("cuda", marks=needs_cuda),
    ],
)
@pytest.mark.parametrize("method", ["none", "ngram", "lookahead", "public", "user"])
def test_what_needs_the_host_is_served_at_every_depth(
    folder: Path, method: str, place: str, depth: int, request: pytest.FixtureRequest
) -> None:
    """Rows of scores, drafts that come with the request and those of a user's drafter, choices of
    the host's: all as without overlap, and with speculation."""
    specs = {
        **SPECS,
        "public": NGramDecodingConfig(4, is_public_pool=True, adaptive=False),
        "user": UserDrafterConfig(Guesses(), max_draft_len=7),
    }

    def reversing(text: list[int], scores: Any) -> Any:
        return scores + scores.roll(sum(text) % 7) * 0.5

    every = {"max_tokens": 12, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"logprobs": 2, "prompt_logprobs": 1, "repetition_penalty": 1.1,
         "return_generation_logits": True, "external_draft": ExternalDraftTokensConfig([1, 2, 3])},
        {},
        {"logits_processors": [reversing], "temperature": 0.7, "seed": 4},
        {"prompt_logprobs": 0},
        {"return_generation_logits": True, "temperature": 0.4, "seed": 2},
        {"external_draft": ExternalDraftTokensConfig([3, 1, 4], continue_decoding=False)},
    ]  # fmt: skip
    params = [SamplingParams(**every, **kind) for kind in kinds]
    prompts = (PROMPTS * 2)[: len(params)]

    device = "cpu" if place == "stream" else place

    def answers(run_ahead: int | None) -> tuple[list[Any], list[int]]:
        with open_llm(folder, specs[method], run_ahead, device=device, numerics="exact") as llm:
            results = llm.generate(prompts, params, use_tqdm=False)
            stats = llm.get_metrics()["executor"]
        assert stats["free_pages"] == stats["total_pages"]
        found = [
            (r.outputs[0].token_ids, r.outputs[0].logprobs, r.prompt_logprobs) for r in results
        ]
        logits = [r.outputs[0].generation_logits for r in results]
        drafts = [r.metrics["speculative_decoding"]["num_draft_tokens"] for r in results]
        return [found, [None if rows is None else rows.tolist() for rows in logits]], drafts

    wanted, drafted = answers(None)
    if place == "stream":
        request.getfixturevalue("on_stream")
    got, drafts = answers(depth)
    assert got == wanted
    assert drafts == drafted or method == "public"  # who publishes first depends on the steps
    if method in ("lookahead", "user"):
        assert min(drafts) > 2


def test_more_stop_ids_than_a_slot_holds_are_refused(folder: Path) -> None:
    with open_llm(folder, None, 1) as llm:
        bad = SamplingParams(max_tokens=4, stop_token_ids=list(range(48)) + [0] * 220)
        with pytest.raises(RequestError, match="268 end and stop ids together, at most 256 fit"):
            llm.generate(PROMPTS[:2], [GREEDY, bad], use_tqdm=False)
        assert llm.get_metrics()["executor"]["steps"] == 0
        tokens_of(llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False))
