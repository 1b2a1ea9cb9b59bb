"""What every method owes, at every place and depth.

Whatever it drafts, greedy and exact-match texts are plain decoding's; texts of every rule, drafts
and acceptance are the same wherever and however early a step runs; requests of all kinds share a
batch. What networks owe besides is in test_network_contracts.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_models import VOCAB
from method_cases import (
    DRAFTING,
    GREEDY,
    HOST,
    METHODS,
    NETWORKS,
    PROMPTS,
    SAMPLED,
    Folders,
    Where,
    ahead,
    at_every_depth,
    check,
    counts_of,
    each_place,
    everywhere,
    methods,
    on_devices,
    open_llm,
    prompts_for,
    texts_of,
)

from specdec_ext import ExternalDraftTokensConfig, RequestError, SamplingParams
from specdec_ext.cli import main
from specdec_ext.errors import SyntheticAcceptanceWarning

Plain = dict[str, list[list[int]]]

# Drafts from what other requests have left: who leaves something first depends on the steps.
SHARING = ("public", "suffix past")


def assert_counts(found: dict[str, Any], wanted: dict[str, Any], method: str, where: Where) -> None:
    """On a device the nodes of a network's tree that are as good as equal may change places."""
    if where.device == "cpu" or not (
        method in ("tree", "eagle3")
        or (where.place == "cuda" and method in ("redrafter", "eagle3-chain"))
    ):
        assert found == wanted
        return
    accepted = [counts["num_accepted_tokens"] for counts in (found, wanted)]
    assert abs(accepted[0] - accepted[1]) <= 0.1 * accepted[1] + 4


@everywhere
@methods(["none", *DRAFTING])
def test_texts_are_those_of_plain_decoding(
    models: Folders, plain_texts: Plain, method: str, where: Where
) -> None:
    counts, prompts = [], prompts_for(where)
    wanted = {k: [texts[PROMPTS.index(p)] for p in prompts] for k, texts in plain_texts.items()}
    for place in {where: None, HOST: None}:
        with open_llm(models, method, place) as llm:
            assert [texts_of(llm, GREEDY, [p])[0] for p in prompts[:2]] == wanted["greedy"][:2]
            assert texts_of(llm, GREEDY, prompts) == wanted["greedy"]
            assert texts_of(llm, SAMPLED, prompts) == wanted["sampled"]
            counts.append(counts_of(llm))
    if method not in SHARING:
        assert_counts(counts[0], counts[-1], method, where)
    assert (counts[0]["num_draft_tokens"] > 70) == (method != "none")
    if method in NETWORKS:
        assert counts[0]["num_accepted_tokens"] > 10


RULES: list[dict[str, Any]] = [
    {"temperature": 0.8, "acceptance": "rejection", "top_p": 0.9},
    {"temperature": 0.7, "acceptance": "typical", "posterior_threshold": 0.05},
    {"temperature": 0.7, "acceptance": "threshold", "acceptance_threshold": 0.05, "top_k": 20},
    {"temperature": 0.9, "acceptance": "best_beam"},
    {"temperature": 0.9},
    {},
]


@ahead
@methods([*DRAFTING, "redrafter-law"])
def test_every_rule_draws_what_the_host_draws(models: Folders, method: str, where: Where) -> None:
    """In one batch, with room for it; the same drafts, the same ones accepted."""
    rules = [dict(rule) for rule in RULES]
    if not method.startswith("redrafter"):
        rules[3] = {"temperature": 0.9, "acceptance": "rejection", "seed": 4}
    if method == "chain":
        rules[3]["use_draft_logits"] = False
    params = [dataclasses.replace(GREEDY, **{"seed": i, **rule}) for i, rule in enumerate(rules)]
    if where.device not in ("cpu", "cuda"):  # rejection, typical or threshold, and an exact match
        at = NETWORKS.index(method) if method in NETWORKS else len(method)
        params = [params[at % 3], params[1 + at % 2], params[3], params[4]]
    seen, prompts = [], PROMPTS[1 : 1 + len(params)]
    for place in (HOST, where):
        with open_llm(models, method, place, scheduler={"max_batch_size": 6}) as llm:
            outputs = llm.generate(prompts, params[: len(prompts)], use_tqdm=False)
            texts = [list(out.outputs[0].token_ids) for out in outputs]
            seen.append((texts, [out.metrics["acceptance"] for out in outputs], counts_of(llm)))
    assert seen[0][:2] == seen[1][:2]
    if method not in SHARING:
        assert_counts(seen[1][2], seen[0][2], method, where)
    assert seen[0][2]["num_accepted_tokens"] > 3


@ahead
@methods(["lookahead", "ngram", "medusa", "redrafter", "chain", "tree"])
def test_synthetic_acceptance_keeps_what_it_keeps_on_the_host(
    models: Folders, method: str, where: Where
) -> None:
    """And says that the text is not the model's, wherever it is asked."""
    spec = dataclasses.replace(METHODS[method](models), synthetic_acceptance_rates=[0.9, 0.6])
    laws: list[dict[str, Any]] = [{}, {"temperature": 0.6}]
    params = [dataclasses.replace(GREEDY, seed=i, **laws[i % 2]) for i in range(len(PROMPTS))]
    off = dataclasses.replace(GREEDY, speculative=False)
    seen = []
    prompts = prompts_for(where)
    for place in (HOST, where):
        with (
            pytest.warns(SyntheticAcceptanceWarning, match="the text is NOT the model's"),
            open_llm(models, spec, place) as llm,
        ):
            outputs = llm.generate(prompts, params[: len(prompts)], use_tqdm=False)
            counts = counts_of(llm)
            (plain,) = llm.generate(PROMPTS[:1], off, use_tqdm=False)
            assert llm.get_metrics()["synthetic_acceptance"]["rates"] == [0.9, 0.6]
            with pytest.raises(RequestError, match="keeps drafts at synthetic rates"):
                llm.generate([[1]], SamplingParams(temperature=1.0, acceptance="rejection"))
        seen.append(([list(out.outputs[0].token_ids) for out in outputs], counts))
        for output in outputs:
            assert output.metrics["lossless"] is False
            assert output.metrics["acceptance"] == "synthetic (not the model's text)"
            assert "not the model's" in output.to_json_dict()["synthetic_acceptance"]["note"]
        assert plain.metrics["lossless"] is True
    if where.device == "cpu":
        assert seen[0] == seen[1]
    assert seen[1][1]["num_accepted_tokens"] > 15


@at_every_depth
@methods(DRAFTING)
def test_requests_of_all_kinds_share_a_batch(
    models: Folders, plain_texts: Plain, method: str, where: Where
) -> None:
    """Without drafts, with fewer, with tokens that the host chooses, and sampled ones."""
    kinds: list[dict[str, Any]] = [
        {"max_draft_len": 0}, {"speculative": False}, {"max_draft_len": 2}, {"logprobs": 1},
        {"temperature": 0.8, "top_p": 0.9, "seed": 5}, {},
    ]  # fmt: skip
    if method == "lookahead":
        kinds[0], kinds[2] = {"lookahead_config": (1, 1, 0)}, {"lookahead_config": (2, 2, 1)}
    params = [dataclasses.replace(GREEDY, **kind) for kind in kinds]
    texts = [plain_texts["sampled" if "seed" in k else "greedy"][i] for i, k in enumerate(kinds)]
    with open_llm(models, method, where) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        check(llm)
    assert [list(out.outputs[0].token_ids) for out in outputs] == texts
    drafted = [out.metrics["speculative_decoding"]["num_draft_tokens"] for out in outputs]
    assert [count > 0 for count in drafted] == [False, False, True, True, True, True]


def shifted(text: list[int], scores: torch.Tensor) -> torch.Tensor:
    return scores + scores.roll(sum(text) % 7) * 0.5


HOST_KINDS: list[dict[str, Any]] = [
    {"logprobs": 1},
    {"prompt_logprobs": 0},
    {"return_generation_logits": True},
    {"logits_processors": [lambda text, scores: scores + 1.0]},
    {"external_draft": ExternalDraftTokensConfig([1, 2], continue_decoding=True)},
    {"logit_bias": {VOCAB - 1: 0.0}},
]


@at_every_depth
@methods(DRAFTING)
def test_requests_that_need_the_host_draft_as_others_do(
    models: Folders, plain_texts: Plain, method: str, where: Where
) -> None:
    """Scores are read, or changed, or drafts come with the request: text, drafts and acceptance are
    those of a request that asks for nothing."""
    drafted = []
    with open_llm(models, method, where) as llm:
        for kinds in ([{}] * len(HOST_KINDS), HOST_KINDS):
            params = [dataclasses.replace(GREEDY, **change) for change in kinds]
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert [list(out.outputs[0].token_ids) for out in outputs] == plain_texts["greedy"]
            counts = [out.metrics["speculative_decoding"] for out in outputs]
            drafted.append(
                [(c["num_draft_tokens"], c["num_accepted_draft_tokens"]) for c in counts]
            )
        check(llm)
    tokens, accepted = drafted[0][4]
    drafted[0][4] = (tokens + 2, accepted)
    if method in NETWORKS:  # others find what was said before, or depend on the window's seed
        assert drafted[1] == drafted[0]


@at_every_depth
@methods(DRAFTING)
def test_steps_are_recorded_where_they_run(
    models: Folders, plain_texts: Plain, method: str, where: Where
) -> None:
    """The drafts of every step, as many and as many accepted as are counted; an accepted draft is
    the token that was delivered there. Nobody's text changes for it."""
    params = dataclasses.replace(GREEDY, return_steps=True)
    with open_llm(models, method, where) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        check(llm)
    assert [list(out.outputs[0].token_ids) for out in outputs] == plain_texts["greedy"]
    for out in outputs:
        steps = out.outputs[0].steps or []
        assert [t for step in steps for t in step.token_ids] == out.outputs[0].token_ids
        drafted = [step for step in steps if step.drafts]
        spec = out.metrics["speculative_decoding"]
        assert [len(step.drafts) for step in drafted] == spec["per_step_drafted"]
        assert [step.num_accepted for step in drafted] == spec["per_step_accepted"]
        for step in steps:
            path = tuple(draft.token_id for draft in step.drafts if draft.accepted)
            assert path == step.token_ids[: step.num_accepted]


@ahead
@methods(["none", *DRAFTING])
def test_what_the_host_chooses_is_what_it_chooses_there(
    models: Folders, method: str, where: Where
) -> None:
    """Rows of scores, logprobs of prompts and outputs, processors, penalties, drafts that end the
    request: all as without overlap, and with as many drafts."""
    kinds: list[dict[str, Any]] = [
        {"logprobs": 2, "prompt_logprobs": 1, "repetition_penalty": 1.1,
         "return_generation_logits": True, "external_draft": ExternalDraftTokensConfig([1, 2, 3])},
        {},
        {"logits_processors": [shifted], "temperature": 0.7, "seed": 4},
        {"prompt_logprobs": 0, "min_tokens": 9},
        {"return_generation_logits": True, "temperature": 0.4, "seed": 2},
        {"external_draft": ExternalDraftTokensConfig([3, 1, 4], continue_decoding=False)},
    ]  # fmt: skip
    params = [dataclasses.replace(GREEDY, max_tokens=12, **kind) for kind in kinds]

    def answers(place: Where) -> tuple[list[Any], list[int]]:
        # The same arithmetic on both sides: scores are compared bit for bit.
        with open_llm(models, method, place, device=where.device, numerics="exact") as llm:
            results = llm.generate(PROMPTS, params, use_tqdm=False)
            check(llm)
        found: list[Any] = []
        for r in results:
            out = r.outputs[0]
            rows = None if out.generation_logits is None else out.generation_logits.tolist()
            found.append((out.token_ids, out.logprobs, r.prompt_logprobs, rows))
        return found, [r.metrics["speculative_decoding"]["num_draft_tokens"] for r in results]

    wanted, drafted = answers(HOST)
    got, drafts = answers(where)
    assert got == wanted
    # A chain of what the host draws is drafted greedily on a stream, where nobody draws for it.
    assert drafts == drafted or method in (*SHARING, "chain")


@at_every_depth
@methods([name for name in DRAFTING if name != "public"])
def test_the_default_configuration_weighs_what_drafts_bring(
    models: Folders, plain_texts: Plain, method: str, where: Where
) -> None:
    """T(rows) is there before the first step that needs it, and once."""
    spec = dataclasses.replace(METHODS[method](models), adaptive=True)
    with open_llm(models, spec, where) as llm:
        for calibrated in (False, True):
            assert (llm.engine._calibrate is None) == calibrated
            assert texts_of(llm, GREEDY) == plain_texts["greedy"]
        check(llm)


@each_place
@methods(DRAFTING)
def test_a_second_turn_computes_what_is_new(models: Folders, method: str, where: Where) -> None:
    """Warm says what cold says; what is shared, a draft model has too."""
    cache = {"tokens_per_block": 4, "max_tokens": 1600, "enable_block_reuse": True}
    with open_llm(models, None) as llm:
        (first,) = texts_of(llm, GREEDY, PROMPTS[5:])
        turns = [PROMPTS[5] + first, PROMPTS[5]]
        wanted = texts_of(llm, GREEDY, turns)
    with open_llm(models, method, where, kv_cache_config=cache) as llm:
        assert texts_of(llm, GREEDY, PROMPTS[5:]) == [first]
        outputs = llm.generate(turns, GREEDY, use_tqdm=False)
        check(llm)
        assert llm.get_metrics()["executor"]["reuse_hits"] == 2
    assert [list(out.outputs[0].token_ids) for out in outputs] == wanted
    assert outputs[0].metrics["num_cached_tokens"] >= 48


@at_every_depth
@methods(["lookahead", *NETWORKS])
def test_streams_clients_and_cancels(
    models: Folders, plain_texts: Plain, method: str, where: Where
) -> None:
    with open_llm(models, method, where) as llm:
        streamed: list[int] = []
        for output in llm.stream(PROMPTS[0], GREEDY):
            streamed += output.outputs[0].delta_token_ids
        assert streamed == plain_texts["greedy"][0]

        async def clients() -> list[Any]:
            return list(await asyncio.gather(*(llm.generate_async(p, GREEDY) for p in PROMPTS)))

        texts = [list(out.outputs[0].token_ids) for out in asyncio.run(clients())]
        assert texts == plain_texts["greedy"]
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        stream.close()  # closing the iterator cancels
        assert texts_of(llm, GREEDY) == plain_texts["greedy"]
        check(llm)
        assert llm.get_metrics()["executor"]["cancelled"] == 1


@on_devices
@methods(["lookahead", *NETWORKS])
def test_half_precision_on_a_device(models: Folders, method: str, where: Where) -> None:
    """Exact numerics, so that drafts cannot show: near-ties abound."""
    how, prompts = {"dtype": "bfloat16", "numerics": "exact"}, PROMPTS[1:4]
    texts = []
    for spec in (None, method):
        with open_llm(models, spec, where, **how) as llm:
            assert llm.engine.numerics == "exact"
            texts.append([texts_of(llm, params, prompts) for params in (GREEDY, SAMPLED)])
            assert (check(llm)["num_draft_tokens"] > 30) == (spec is not None)
    assert texts[0] == texts[1]


@pytest.mark.default_model
@pytest.mark.parametrize("place", ["host", "stream"])
@pytest.mark.parametrize("method", ["--medusa", "--redrafter", "--draft_target"])
def test_the_shipped_drafter_from_the_command_line(
    default_model_path: Path, tmp_path: Path, capsys: Any, request: Any, method: str, place: str
) -> None:
    """Plain text, fewer passes."""
    del default_model_path
    if place == "stream":
        request.getfixturevalue("on_stream")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Write a list of the numbers from one to twenty.\n")
    argv = ["generate", method, "--overlap-depth", "1", "--json", "--input_file", str(prompts),
            "--max_output_len", "32", "--max_batch_size", "1", "--verify",
            "--no-adaptive"]  # fmt: skip
    capsys.readouterr()
    assert main(argv) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert line["identical"] is True
    assert line["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 8
    assert line["metrics"]["num_forward_passes"] < 24
