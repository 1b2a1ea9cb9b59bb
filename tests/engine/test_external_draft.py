"""Drafts that a request brings along: verified with the prompt, output unchanged."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from driver import Delivery, Engine, Job, hash_engine
from engine_loop_cases import FUNCTION as LOOP_FUNCTION
from engine_loop_cases import LOOKAHEAD, NGRAM, VOCAB, make_engine
from test_prefix_reuse import METHODS

from hash_target import HashFunction
from specdec_ext import ExternalDraftTokensConfig, RequestError, SamplingParams

FUNCTION = HashFunction(vocab=40, surprise=9)


def one(
    engine: Engine, prompt: list[int], max_tokens: int, drafts: list[int], **options: Any
) -> Any:
    """(delivery, outputs of the steps that delivered something)"""
    rid = engine.ex.submit(prompt, max_tokens=max_tokens, external_drafts=drafts, **options)
    delivery, outputs = Delivery(), []
    while engine.ex.num_unfinished:
        for out in engine.step() or []:
            assert out.request_id == rid
            engine.record(delivery, out)
            outputs.append(out)
    engine.assert_idle()
    return delivery, outputs


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("right", [0, 1, 3, 7])
@pytest.mark.parametrize("length", [1, 2, 16, 33])
def test_one_pass_returns_the_right_drafts_and_one_more(
    length: int, right: int, page_size: int
) -> None:
    prompt = [i * 7 % 40 for i in range(length)]
    text = FUNCTION.reference(prompt, 12)
    drafts = [*text[:right], (text[right] + 1) % 40, 3, 4]
    engine = hash_engine(FUNCTION, page_size=page_size)
    delivery, outputs = one(engine, prompt, len(drafts) + 1, drafts)
    assert delivery.tokens == text[: len(drafts) + 1]
    first = outputs[0]
    assert first.is_prefill
    assert first.tokens == text[: right + 1]
    assert (first.num_drafts, first.num_accepted, first.max_path) == (len(drafts), right, right + 3)
    assert first.num_rows == length + len(drafts)
    # All of them right: K + 1 tokens in one pass.
    delivery, outputs = one(engine, prompt, right + 1, text[:right] or text[:1])
    assert delivery.tokens == text[: right + 1]
    assert len(outputs) == 1


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_any_method_goes_on_from_there(method: str, reuse: bool) -> None:
    """Mixed batches on every method, right and wrong drafts, few rows per step, stops, cancels."""
    rng = random.Random(f"{method} {reuse}")
    engine = hash_engine(
        FUNCTION, page_size=4, max_batch_size=6, max_num_tokens=24, enable_block_reuse=reuse,
        **METHODS[method],
    )  # fmt: skip
    start = [rng.randrange(40) for _ in range(30)]
    accepted = 0
    for _ in range(10):
        jobs = []
        for i in range(8):
            prompt = start[: rng.randint(1, 30)] + [rng.randrange(40) for _ in range(3)]
            max_tokens = rng.randint(1, 30)
            text = FUNCTION.reference(prompt, 18)
            drafts = [*text[: rng.randint(0, 18)], *(rng.randrange(40) for _ in range(4))]
            options = {"external_drafts": drafts[:18]} if rng.random() < 0.7 else {}
            if method.startswith("ngram") and rng.random() < 0.3:
                options["speculative"] = False
            cancel = rng.randint(1, 6) if i == 5 else None
            jobs.append(Job(prompt, max_tokens, options, rng.randint(0, 5), cancel))
        for job, got in zip(jobs, engine.run(jobs), strict=True):
            want = FUNCTION.reference(job.prompt, job.max_tokens)
            assert got.tokens == (want[: len(got.tokens)] if got.cancelled else want)
            accepted += got.num_accepted
    assert accepted > 100


def test_drafts_beyond_the_length_limit_are_not_computed() -> None:
    prompt = [1, 2, 3]
    text = FUNCTION.reference(prompt, 10)
    engine = hash_engine(FUNCTION, max_seq_len=16)
    delivery, outputs = one(engine, prompt, 4, text)
    assert delivery.tokens == text[:4]
    assert (outputs[0].num_drafts, outputs[0].num_rows) == (3, 6)
    delivery, outputs = one(engine, prompt, 1, text)
    assert delivery.tokens == text[:1]
    assert (outputs[0].num_drafts, outputs[0].num_rows) == (0, 3)


def test_a_stop_token_among_the_drafts_ends_the_text() -> None:
    prompt = [1, 2, 3]
    text = FUNCTION.reference(prompt, 10)
    end = text.index(text[4]) + 1
    engine = hash_engine(FUNCTION)
    delivery, _ = one(engine, prompt, 10, text[:8], eos_token_ids=[text[4]])
    assert (delivery.tokens, delivery.finish_reason) == (text[:end], "stop")


def test_drafts_wait_for_a_step_that_has_room() -> None:
    """17 rows are taken by others' prompts: the last prompt token goes with its drafts, later."""
    engine = hash_engine(FUNCTION, max_num_tokens=20, max_batch_size=2)
    first, second = [1] * 17, [2, 3, 4]
    text = FUNCTION.reference(second, 8)
    engine.ex.submit(first, max_tokens=3)
    rid = engine.ex.submit(second, max_tokens=8, external_drafts=text[:7])
    assert [o.num_rows for o in engine.step() or []] == [17, 2]
    (out, _) = engine.step() or []  # prompts come first
    assert (out.request_id, out.num_rows, out.tokens) == (rid, 8, text)
    while engine.ex.num_unfinished:
        engine.step()


@pytest.mark.parametrize(
    ("drafts", "message"),
    [([40], "external_drafts holds token id 40"), ([-1], "token id -1"),
     ([1] * 128, "brings 128 external drafts, at most 127")],
)  # fmt: skip
def test_refusals_of_the_executor(drafts: list[int], message: str) -> None:
    engine = hash_engine(FUNCTION)
    with pytest.raises(ValueError, match=message):
        engine.ex.submit([1], max_tokens=4, external_drafts=drafts)
    tight = hash_engine(FUNCTION, max_num_tokens=12, max_batch_size=8)
    with pytest.raises(ValueError, match="brings 5 external drafts, at most 4"):
        tight.ex.submit([1], max_tokens=9, external_drafts=[1] * 5)
    whole = hash_engine(FUNCTION, max_num_tokens=12, max_batch_size=2, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match="brings 5 external drafts, at most 4"):
        whole.ex.submit([1] * 8, max_tokens=9, external_drafts=[1] * 5)
    delivery, _ = one(whole, [1] * 8, 9, [1] * 4)
    assert delivery.tokens == FUNCTION.reference([1] * 8, 9)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"tokens": []}, "tokens has 0 drafts: give 1..127"),
    ({"tokens": [1] * 128}, "tokens has 128 drafts"),
    ({"tokens": "12"}, "expected a list of token ids"),
    ({"tokens": 5}, "expected a list of token ids"),
    ({"tokens": [1, -1]}, r"tokens\[1\] = -1"),
    ({"tokens": [1, 2.5]}, r"tokens\[1\] = 2.5"),
    ({"tokens": [True]}, r"tokens\[0\] = True"),
    ({"tokens": [1, 2], "logits": np.zeros((1, 8))}, "logits has 1 rows for 2 drafts"),
    ({"tokens": [1], "logits": np.zeros(8)}, r"a tensor of shape \(8,\)"),
    ({"tokens": [1], "logits": [[1.0], [2.0, 3.0]]}, "expected one row of scores per draft"),
    ({"tokens": [1], "logits": "x"}, "expected one row of scores per draft"),
    ({"tokens": [1], "acceptance_threshold": 0.5}, "without logits"),
    *(
        ({"tokens": [1], "logits": [[0.0]], "acceptance_threshold": t}, "acceptance_threshold")
        for t in (0.0, -0.1, 1.1, float("nan"), "x")
    ),
]


@pytest.mark.parametrize(("fields", "message"), CONFIGS)
def test_configuration_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ExternalDraftTokensConfig(**fields)
    with pytest.raises(RequestError, match=message):
        SamplingParams.from_dict({"external_draft_tokens_config": fields})


def test_forms_of_a_configuration() -> None:
    config = ExternalDraftTokensConfig(torch.tensor([1, 2]), logits=torch.zeros(2, 8))
    assert config.tokens == (1, 2)
    assert SamplingParams(external_draft=config).external_draft is config
    read = SamplingParams.from_dict({"external_draft": {"tokens": [1, 2]}}).external_draft
    assert read == ExternalDraftTokensConfig((1, 2))
    with pytest.raises(RequestError, match="expected an ExternalDraftTokensConfig"):
        SamplingParams(external_draft=[1, 2])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="unexpected keyword"):
        SamplingParams(external_draft={"token": [1]})  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [None, NGRAM, LOOKAHEAD])
def test_through_the_engine_loop(config: Any) -> None:
    engine = make_engine(config)
    prompt = [1, 2, 3, 1, 2, 3]
    text = LOOP_FUNCTION.reference(prompt, 20)
    wrong = [*text[:5], (text[5] + 1) % VOCAB]
    params = SamplingParams(
        max_tokens=20, external_draft=ExternalDraftTokensConfig(wrong, go_on=True), ignore_eos=True
    )
    state = engine.submit(engine.resolve(prompt, params))
    engine.step()
    assert state.token_ids == text[:6]
    assert state.snapshot().outputs[0].token_from_draft == [True] * 5 + [False]
    engine.run([state])
    assert state.token_ids == text
    spec = state.snapshot().metrics["speculative_decoding"]
    assert spec["num_draft_tokens"] >= 6
    assert spec["num_accepted_draft_tokens"] >= 5


@pytest.mark.parametrize("right", [0, 2, 5])
def test_the_request_ends_with_its_pass(right: int) -> None:
    """As in TensorRT-LLM: 1 to K + 1 tokens, whatever max_tokens would still allow."""
    engine = make_engine(NGRAM)
    prompt = [1, 2, 3, 1, 2, 3]
    text = LOOP_FUNCTION.reference(prompt, 20)
    drafts = text[:right] + [(t + 1) % VOCAB for t in text[right:5]]
    draft = ExternalDraftTokensConfig(drafts)
    state = engine.submit(
        engine.resolve(prompt, SamplingParams(max_tokens=20, external_draft=draft))
    )
    engine.run([state])
    assert state.token_ids == text[: right + 1]
    assert state.finish_reason == "length"
    assert state.snapshot().metrics["num_forward_passes"] == 1


def test_vocabulary_is_checked_before_any_work() -> None:
    engine = make_engine(None)
    for draft, message in (
        (ExternalDraftTokensConfig([VOCAB]), rf"tokens\[0\] = {VOCAB}"),
        (ExternalDraftTokensConfig([1], np.zeros((1, VOCAB - 1))), "logits has 63 columns"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.submit(engine.resolve([1], SamplingParams(external_draft=draft)))
    assert engine.num_unfinished == 0


def test_logits_that_are_no_law_are_refused() -> None:
    """Only a sampled request looks at them; a greedy one compares tokens."""
    engine = make_engine(None)
    good = torch.zeros(2, VOCAB)
    never = good.clone()
    never[1, 7] = -torch.inf  # its own token has q = 0
    cases: list[tuple[Any, str]] = [
        (good.index_fill(1, torch.tensor([3]), torch.nan), r"logits\[0\] holds a NaN"),
        (torch.full((2, VOCAB), -torch.inf), r"logits\[0\] holds a NaN or \+inf, or only -inf"),
        (never, "probs"),
    ]
    for logits, message in cases:
        draft = ExternalDraftTokensConfig([6, 7], logits)
        with pytest.raises(RequestError, match=message):
            engine.submit(
                engine.resolve([1], SamplingParams(temperature=1.0, external_draft=draft))
            )
        state = engine.submit(engine.resolve([1], SamplingParams(external_draft=draft)))
        engine.run([state])
        assert state.token_ids[0] == LOOP_FUNCTION.reference([1], 1)[0]
    assert engine.num_unfinished == 0


def test_what_drafts_were_drawn_from_is_counted() -> None:
    """Also of a request that waits; it goes with the request."""
    engine = hash_engine(FUNCTION)
    probs = torch.full((3, 40), 1 / 40)
    engine.ex.submit(
        [1, 2], max_tokens=9, external_drafts=[4, 5, 6], external_probs=probs,
        acceptance="rejection", temperature=1.0,
    )  # fmt: skip
    for _ in range(2):
        assert engine.ex.stats()["draft_prob_bytes"] >= 3 * 40 * 4
        engine.step()
    with pytest.raises(ValueError, match="3 rows for 2 external drafts"):
        engine.ex.submit([1], max_tokens=3, external_drafts=[1, 2], external_probs=probs)
    while engine.ex.num_unfinished:
        engine.step()
    assert engine.ex.stats()["draft_prob_bytes"] == 0


def test_the_rule_follows_from_what_the_drafts_bring() -> None:
    logits = torch.zeros(1, 8)
    plain = ExternalDraftTokensConfig([1])
    scored = ExternalDraftTokensConfig([1], logits)
    bounded = ExternalDraftTokensConfig([1], logits, 0.25)
    rules = [SamplingParams(temperature=1.0, external_draft=d) for d in (plain, scored, bounded)]
    assert [p.acceptance for p in rules] == ["exact_match", "rejection", "threshold"]
    assert [p.lossless for p in rules] == [True, True, False]
    assert rules[2].acceptance_threshold == 0.25
    with pytest.raises(RequestError, match="give the rule in one place"):
        SamplingParams(temperature=1.0, acceptance="typical", external_draft=bounded)
    with pytest.raises(RequestError, match="give the rule in one place"):
        SamplingParams(
            temperature=1.0, acceptance="threshold", acceptance_threshold=0.5,
            external_draft=bounded,
        )  # fmt: skip


@pytest.mark.parametrize("config", [None, NGRAM, LOOKAHEAD])
@pytest.mark.parametrize("external", [False, True])
def test_generation_logits_are_the_rows_of_the_delivered_tokens(
    config: Any, external: bool
) -> None:
    engine = make_engine(config)
    prompt = [1, 2, 3, 1, 2, 3]
    text = LOOP_FUNCTION.reference(prompt, 24)
    options: dict[str, Any] = {}
    if external:
        options["external_draft"] = ExternalDraftTokensConfig(
            [*text[:4], 5, 6], continue_decoding=True
        )
    params = SamplingParams(
        max_tokens=24, return_generation_logits=True, logit_bias={3: 0.5}, **options
    )
    bystander = engine.submit(engine.resolve([5, 6], SamplingParams(max_tokens=9)))
    state = engine.submit(engine.resolve(prompt, params))
    early = None
    while not state.finished:
        engine.step()
        early = state.snapshot() if early is None else early
    output = state.snapshot().outputs[0]
    logits = output.generation_logits
    assert logits.shape == (24, VOCAB)
    assert logits.dtype == torch.float32
    history = list(prompt)
    for token, row in zip(output.token_ids, logits.numpy(), strict=True):
        np.testing.assert_array_equal(row, LOOP_FUNCTION.reference_scores(history))  # no bias
        history.append(token)
    assert early is not None
    head = early.outputs[0]
    assert torch.equal(head.generation_logits, logits[: len(head.token_ids)])
    assert bystander.snapshot().outputs[0].generation_logits is None
