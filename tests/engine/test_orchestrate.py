"""Speculation as an external loop: the tokens, texts and stops of the in-engine form."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from table_target import chi_square

from specdec_ext import LLM, ConfigError, RequestError, SamplingParams
from specdec_ext.cli import main
from specdec_ext.orchestrate import (
    draft_target,
    prompt_lookup,
    prompt_lookup_loop,
    stream_draft_target,
    stream_prompt_lookup,
)
from tiny_models import save_tiny

TEXTS = ["abcabcabcabc", "to be or not to be, that is", "x", "if (a) { b(); } if (a) { b();"]
OPTIONS: dict[str, Any] = {
    "scheduler_config": {"max_batch_size": 4, "max_seq_len": 256},
    "kv_cache_config": {"tokens_per_block": 8, "enable_block_reuse": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("orchestrate")
    return {
        "target": save_tiny(root / "target"),
        "draft": save_tiny(root / "draft", seed=6, num_hidden_layers=1),
        "stranger": save_tiny(root / "stranger", extra=("<|more|>",)),
    }


@pytest.fixture(scope="module")
def target(folders: dict[str, Path]) -> Iterator[Any]:
    with LLM(folders["target"], **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def inside(folders: dict[str, Path]) -> Iterator[Any]:
    """The in-engine form, without prefix reuse."""
    options = OPTIONS | {"kv_cache_config": {"tokens_per_block": 8}}
    with LLM(folders["target"], speculative_config="[6,3]", **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafts(folders: dict[str, Path]) -> Iterator[dict[str, Any]]:
    with (
        LLM(folders["draft"], **OPTIONS) as other,
        LLM(folders["target"], **OPTIONS) as same,
    ):
        yield {"other": other, "same": same}


def facts(outputs: list[Any]) -> list[tuple[Any, ...]]:
    """What a user sees of each output; log-probabilities by value."""
    return [
        (
            o.prompt, o.prompt_token_ids, o.finished, o.outputs[0].token_ids, o.outputs[0].text,
            o.outputs[0].finish_reason, o.outputs[0].stop_reason, o.outputs[0].error,
            o.outputs[0].logprobs, o.outputs[0].cumulative_logprob,
        )
        for o in outputs
    ]  # fmt: skip


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one token": {"max_tokens": 1},
    "sampled": {"temperature": 0.8, "seed": 3},
    "sampled, cut": {"temperature": 1.3, "seed": 4, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "logprobs": {"logprobs": 4},
    "chosen logprob, sampled": {"logprobs": 0, "temperature": 1.0, "seed": 5},
    "bad words": {"bad_words": ["a", "be", [99]]},
    "bias": {"logit_bias": {65: 2.0, 66: -3.0}},
    "allowed": {"allowed_token_ids": list(range(60, 90))},
    "repetition": {"repetition_penalty": 1.3},
    "ignore eos": {"ignore_eos": True, "logit_bias": {257: 3.0}},
    "eos soon": {"logit_bias": {257: 4.0}},
    "min tokens": {"logit_bias": {257: 6.0}, "min_tokens": 13},
    "ids only": {"detokenize": False},
    "salted": {"cache_salt": "mine"},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_prompt_lookup_equals_the_in_engine_form(name: str, target: Any, inside: Any) -> None:
    params = SamplingParams(**{"max_tokens": 40} | REQUESTS[name])
    want = facts(inside.generate(TEXTS, params, use_tqdm=False))
    assert facts(prompt_lookup(target, TEXTS, params, config="[6,3]")) == want
    assert facts(prompt_lookup(target, TEXTS, params, config="[1,1]")) == want


@pytest.mark.parametrize(
    ("name", "which", "logits"),
    [
        *((name, "other", False) for name in REQUESTS),
        ("greedy", "same", False),
        ("greedy", "other", True),
        ("sampled", "same", False),
    ],
)
def test_draft_target_equals_plain_decoding(
    name: str, which: str, logits: bool, target: Any, inside: Any, drafts: dict[str, Any]
) -> None:
    """Sampled requests whose drafts come with logits keep the law, not the draws: further below."""
    params = SamplingParams(**{"max_tokens": 40} | REQUESTS[name])
    want = facts(inside.generate(TEXTS, params, use_tqdm=False))
    got = draft_target(
        target, drafts[which], TEXTS, params, num_draft_tokens=5, use_draft_logits=logits
    )
    assert facts(got) == want


def test_stop_words_and_ids(target: Any, inside: Any, drafts: dict[str, Any]) -> None:
    """Stops in every place of a draft, found across the borders of calls."""
    plain = inside.generate(TEXTS[0], SamplingParams(max_tokens=60), use_tqdm=False)[0].outputs[0]
    stopped = 0
    for at in range(3, 25, 8):
        word = plain.text[at : at + 4]
        for stops in (
            {"stop": word},
            {"stop": [word], "include_stop_str_in_output": True},
            {"stop": word, "min_tokens": 20},
            {"stop_token_ids": [plain.token_ids[at]]},
        ):
            params = SamplingParams(max_tokens=60, **stops)
            want = facts(inside.generate(TEXTS, params, use_tqdm=False))
            stopped += want[0][5] == "stop"
            assert facts(prompt_lookup(target, TEXTS, params, config="[6,3]")) == want
            if at % 8 == 3:
                got = draft_target(target, drafts["same"], TEXTS, params, num_draft_tokens=5)
                assert facts(got) == want
    assert stopped > 5


def test_a_draft_that_is_the_target_is_always_right(target: Any, drafts: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for extra in ({}, {"temperature": 1.0, "seed": 9}):
        got = draft_target(
            target, drafts["same"], TEXTS, dataclasses.replace(params, **extra), num_draft_tokens=4
        )
        for output in got:
            assert output.metrics["speculative_decoding"]["draft_acceptance_rate"] == 1.0
            assert output.metrics["num_forward_passes"] == 8


def test_an_iteration_reads_only_what_is_new(target: Any) -> None:
    """All but the last partial block comes from the cache."""
    target.reset_prefix_cache()
    before = target.get_metrics()["executor"]
    (output,) = prompt_lookup(target, TEXTS[3], SamplingParams(max_tokens=100), config="[6,3]")
    after = target.get_metrics()["executor"]
    calls = output.metrics["num_forward_passes"]
    assert calls < 100
    assert output.metrics["speculative_decoding"]["num_accepted_draft_tokens"] == 100 - calls
    assert after["reuse_hits"] - before["reuse_hits"] >= calls - 1
    # A block of 8 and drafts at most, per call; reading everything again would be 5,000 rows.
    assert after["rows"] - before["rows"] <= len(TEXTS[3]) + calls * (8 + 6)
    assert output.num_cached_tokens == 0
    (again,) = prompt_lookup(target, TEXTS[3], SamplingParams(max_tokens=2), config="[6,3]")
    assert again.num_cached_tokens == (len(TEXTS[3]) - 1) // 8 * 8


@pytest.mark.parametrize("interval", [1, 3, 1000])
def test_streaming(interval: int, target: Any, drafts: dict[str, Any]) -> None:
    params = [SamplingParams(max_tokens=n) for n in (30, 5, 20, 1)]
    want = facts(prompt_lookup(target, TEXTS, params))
    for stream in (
        stream_prompt_lookup(target, TEXTS, params, streaming_interval=interval),
        stream_draft_target(target, drafts["other"], TEXTS, params, streaming_interval=interval),
    ):
        texts, ids = [""] * 4, [[] for _ in range(4)]
        count = 0
        for outputs in stream:
            count += 1
            for i, output in enumerate(outputs):
                texts[i] += output.outputs[0].delta_text
                ids[i] += output.outputs[0].delta_token_ids
        assert facts(outputs) == want
        assert texts == [row[4] for row in want]
        assert ids == [row[3] for row in want]
        assert (count == 1) == (interval == 1000)
        assert count > 10 or interval > 1


def test_generation_logits(target: Any, inside: Any) -> None:
    params = SamplingParams(max_tokens=20, return_generation_logits=True)
    want = inside.generate(TEXTS, params, use_tqdm=False)
    for got, one in zip(prompt_lookup(target, TEXTS, params), want, strict=True):
        assert torch.equal(got.outputs[0].generation_logits, one.outputs[0].generation_logits)


def joint_law(target: Any, prompt: list[int], temperature: float, top_k: int) -> dict[Any, float]:
    """Probabilities of the first two tokens, from the model's own scores."""

    def law(ids: list[int]) -> dict[int, float]:
        params = SamplingParams(max_tokens=1, return_generation_logits=True)
        (output,) = target.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        scores = output.outputs[0].generation_logits[0].double() / temperature
        best = scores.topk(top_k)
        probs = best.values.softmax(0)
        return dict(zip(best.indices.tolist(), probs.tolist(), strict=True))

    return {(a, b): p * q for a, p in law(prompt).items() for b, q in law([*prompt, a]).items()}


@pytest.mark.parametrize("seeded", [False, True])
def test_drafts_held_against_their_logits(
    seeded: bool, target: Any, drafts: dict[str, Any]
) -> None:
    """Rejection by p / q: the joint law of two tokens is the target's (chi-square, p > 1e-6)."""
    prompt, count = [65, 66, 67, 65, 66], 1600
    law = joint_law(target, prompt, 1.5, 4)
    params = [
        SamplingParams(
            max_tokens=2, temperature=1.5, top_k=4, seed=i if seeded else None, detokenize=False,
            ignore_eos=True,
        )
        for i in range(count)
    ]  # fmt: skip
    outputs = draft_target(
        target, drafts["other"], [prompt] * count, params, num_draft_tokens=3, use_draft_logits=True
    )
    seen = Counter(tuple(o.outputs[0].token_ids) for o in outputs)
    assert set(seen) <= set(law)
    accepted = sum(sum(o.outputs[0].token_from_draft) for o in outputs)
    assert count * 0.02 < accepted < count * 1.9, "the test needs accepted and rejected drafts"
    keys = list(law)
    statistic, bound = chi_square(
        np.array([seen[key] for key in keys]), np.array([law[key] for key in keys])
    )
    assert statistic < bound
    assert outputs[0].metrics["acceptance"] == "rejection"
    assert outputs[0].metrics["lossless"]


def test_a_threshold_is_labelled_lossy(target: Any, drafts: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=2, ignore_eos=True)
    (output,) = draft_target(
        target, drafts["other"], TEXTS[0], params, num_draft_tokens=3, use_draft_logits=True,
        acceptance_threshold=1e-12,
    )  # fmt: skip
    assert output.metrics["acceptance"] == "threshold (lossy)"
    assert not output.metrics["lossless"]
    # Next to everything passes: three drafts and one more per pass.
    assert output.metrics["num_forward_passes"] == 3


def test_a_failing_call_ends_its_requests(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = prompt_lookup_loop(target, TEXTS[:2], SamplingParams(max_tokens=30))
    loop.step()
    partial = loop.snapshots()

    def broken(*_: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(target.model, "forward", broken)
        loop.step()
    assert not loop.step()
    for before, output in zip(partial, loop.snapshots(), strict=True):
        assert output.outputs[0].finish_reason == "error"
        assert "injected" in (output.outputs[0].error or "")
        assert output.outputs[0].token_ids == before.outputs[0].token_ids
    assert len(prompt_lookup(target, TEXTS, SamplingParams(max_tokens=3))) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2, "temperature": 1.0}, "SamplingParams.n = 2: not in an external loop"),
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5: not in an external loop"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "each call would begin the form anew"),
        ({"return_steps": True}, "return_steps = True: not in an external loop"),
        ({"frequency_penalty": 0.5}, "frequency_penalty = 0.5"),
        ({"external_draft": {"tokens": [1]}}, "external_draft"),
        ({"max_draft_len": 3}, "max_draft_len = 3"),
        ({"max_tokens": 1000}, "max_tokens = 1000"),
        ({"allowed_token_ids": [9999]}, "allowed_token_ids"),
    ],
)
def test_requests_that_are_refused(options: dict[str, Any], message: str, target: Any) -> None:
    before = target.get_metrics()["executor"]["steps"]
    with pytest.raises(RequestError, match=message):
        prompt_lookup(target, TEXTS, [SamplingParams()] * 3 + [SamplingParams(**options)])
    assert target.get_metrics()["executor"]["steps"] == before


def test_engines_that_are_refused(
    target: Any, inside: Any, drafts: dict[str, Any], folders: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match="enable_block_reuse = False"):
        prompt_lookup(inside, TEXTS)
    with pytest.raises(ConfigError, match="enable_block_reuse = False"):
        draft_target(target, inside, TEXTS)
    with pytest.raises(ConfigError, match="same LLM object"):
        draft_target(target, target, TEXTS)
    with pytest.raises(ConfigError, match="is_public_pool = True"):
        prompt_lookup(target, TEXTS, config={"K": 3, "is_public_pool": True})
    with pytest.raises(ConfigError, match="num_draft_tokens = 0"):
        draft_target(target, drafts["other"], TEXTS, num_draft_tokens=0)
    with pytest.raises(ConfigError, match="without use_draft_logits"):
        draft_target(target, drafts["other"], TEXTS, acceptance_threshold=0.5)
    with pytest.raises(ConfigError, match="acceptance_threshold"):
        draft_target(
            target, drafts["other"], TEXTS, use_draft_logits=True, acceptance_threshold=math.nan
        )
    with pytest.raises(ConfigError, match="streaming_interval = 0"):
        stream_prompt_lookup(target, TEXTS, streaming_interval=0)
    with pytest.raises(RequestError, match="2 entries for 4 prompts"):
        prompt_lookup(target, TEXTS, [SamplingParams()] * 2)
    with LLM(folders["stranger"], **OPTIONS) as stranger:  # noqa: SIM117
        with pytest.raises(ConfigError, match=r"259 token ids for a target with 258.*<\|more\|>"):
            draft_target(target, stranger, TEXTS)


# -- command line ---------------------------------------------------------------------------------


def test_command_line(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS))
    base = ["generate", "--model", str(folders["target"]), "--max_output_len", "30"]
    base += ["--tokens_per_block", "8", "--max_seq_len", "256", "--max_batch_size", "4"]
    lookup = ["--prompt_lookup_config", "[6,3]", "--prompt_lookup_style"]
    lines = {}
    for style in ("v1", "v2"):
        command = [*base, *lookup, style, "--input_file", str(prompts), "--json", "--verify"]
        assert main([*command, "--disable_tqdm", "--stop", "zz", "--max_draft_len", "6"]) == 0
        lines[style] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for one, two in zip(lines["v1"], lines["v2"], strict=True):
        assert one["identical"] is True
        assert {**one, "metrics": 0} == {**two, "metrics": 0}
    accepted = [x["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
                for x in lines["v1"]]  # fmt: skip
    assert sum(accepted) > 0
    shown = []
    for style in ("v1", "v2"):
        assert main([*base, *lookup, style, "--input_text", TEXTS[0], "--stats"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != ""


def test_command_line_refusals(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["generate", "--model", str(folders["target"]), "--input_text", "x"]
    for extra in ([], ["--lookahead_config", "[4,3,4]"]):
        assert main([*base, *extra, "--prompt_lookup_style", "v1"]) == 2
        assert "needs prompt lookup" in capsys.readouterr().err
