"""Users' logits processors and logprobs of the prompt: as plain decoding would have had them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import hash_engine
from engine_loop_cases import FUNCTION, METHODS, PROMPTS, VOCAB, assert_idle, make_engine, run
from test_drafter_seam import PROMPTS as SEAM_PROMPTS
from test_drafter_seam import folder as folder
from transformers import LlamaForCausalLM

from reference.sampling_reference import Law, draw, token_uniform
from specdec_ext import LLM, ExternalDraftTokensConfig, NGramDecodingConfig, RequestError
from specdec_ext.request.sampling_params import SamplingParams

Process = Callable[[list[int], torch.Tensor], torch.Tensor]


def shift(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
    """Depends on the whole text: its length, its sum and its last token."""
    scores[(sum(tokens) * 7 + len(tokens)) % VOCAB] += 4.0
    scores[tokens[-1]] = -math.inf
    return scores


def plain(prompt: list[int], num_tokens: int, law: Law | None, seed: int) -> list[int]:
    """Decoding one token after another, by the definition."""
    history = list(prompt)
    for _ in range(num_tokens):
        row = shift(list(history), torch.from_numpy(FUNCTION.reference_scores(history).copy()))
        scores = row.numpy()
        token = scores.argmax() if law is None else draw(
            scores, law, token_uniform(seed, len(history))
        )  # fmt: skip
        history.append(int(token))
    return history[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("method", METHODS)
def test_every_node_sees_the_text_in_front_of_it(method: str, temperature: float) -> None:
    seen: list[list[int]] = []

    def watch(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        seen.append(tokens)
        assert scores.shape == (VOCAB,) and scores.dtype == torch.float32
        return scores

    params = SamplingParams(
        max_tokens=30, temperature=temperature, seed=3, logits_processors=[watch, shift]
    )
    engine = make_engine(METHODS[method])
    outputs = run(engine, PROMPTS, params)
    law = Law(temperature) if temperature else None
    called = {tuple(text) for text in seen}
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == plain(prompt, 30, law, 3)
        for i in range(30):
            assert (*prompt, *tokens[:i]) in called
    # A draft's text goes on from a text that was delivered.
    delivered = {
        (*p, *o.outputs[0].token_ids[:i])
        for p, o in zip(PROMPTS, outputs, strict=True)
        for i in range(31)
    }
    assert all(any(text[:i] in delivered for i in range(1, len(text) + 1)) for text in called)
    drafted = engine.get_metrics()["speculative_decoding"]["num_draft_tokens"]
    assert (drafted > 0) == (method != "plain")
    assert_idle(engine)


@pytest.mark.parametrize("method", METHODS)
def test_other_processors_come_after_and_logprobs_are_the_models(method: str) -> None:
    """bad_words hold whatever a processor says; logprobs are those of the unchanged scores."""
    params = SamplingParams(
        max_tokens=20, logits_processors=[shift], bad_words=[[7]], logprobs=1, min_tokens=20
    )
    for prompt, output in zip(
        PROMPTS, run(make_engine(METHODS[method]), PROMPTS, params), strict=True
    ):
        out = output.outputs[0]
        assert 7 not in out.token_ids and len(out.token_ids) == 20
        history = list(prompt)
        for token, row in zip(out.token_ids, out.logprobs, strict=True):
            scores = FUNCTION.reference_scores(history).astype(np.float64)
            scores -= scores.max()
            expected = scores[token] - np.log(np.exp(scores).sum())
            assert row[token].logprob == pytest.approx(expected, abs=1e-5)
            history.append(token)


def test_a_processor_may_forbid_everything_but_one() -> None:
    """Whole rows of -infinity but for one token, greedy: no default token slips in."""

    def only(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(scores, -math.inf)
        allowed[len(tokens) % VOCAB] = 1.0
        return allowed

    params = SamplingParams(max_tokens=20, logits_processors=[only])
    for method in METHODS.values():
        for prompt, output in zip(PROMPTS, run(make_engine(method), PROMPTS, params), strict=True):
            expected = [(len(prompt) + i) % VOCAB for i in range(20)]
            assert output.outputs[0].token_ids == expected


def broken(_: list[int], scores: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("on purpose")


def late(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
    return scores if len(tokens) < 20 else scores[:3]


@pytest.mark.parametrize(
    ("processor", "text"),
    [
        (broken, "RuntimeError: on purpose"),
        (late, r"logits_processors\[0\] returned a tensor of shape \[3\]: expected scores of"),
        (lambda tokens, scores: None, "returned NoneType"),
        (lambda tokens, scores: scores * math.nan, "NaN"),
        (lambda tokens, scores: scores - math.inf, "no token is allowed"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_a_failing_processor_fails_its_request_alone(
    method: str, processor: Process, text: str
) -> None:
    engine = make_engine(METHODS[method])
    good = SamplingParams(max_tokens=25, logits_processors=[shift])
    bad = SamplingParams(max_tokens=25, logits_processors=[processor])
    bare = SamplingParams(max_tokens=25)
    states = [engine.submit(engine.resolve(PROMPTS[0], params)) for params in (good, bad, bare)]
    engine.run(states)
    fine, failed, untouched = (state.snapshot().outputs[0] for state in states)
    assert failed.finish_reason == "error"
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(failed.error)
    assert fine.token_ids == plain(PROMPTS[0], 25, None, 0)
    assert untouched.token_ids == FUNCTION.reference(PROMPTS[0], 25)
    assert_idle(engine)


@pytest.mark.parametrize("value", [len, [3], "abc", {"a": len}, [len] * 65])
def test_malformed_processors(value: Any) -> None:
    with pytest.raises(RequestError, match=r"SamplingParams\.logits_processors"):
        SamplingParams(logits_processors=value)
    assert SamplingParams(logits_processors=[]).logits_processors == ()


def expected_logprobs(prompt: list[int]) -> list[float]:
    values = []
    for i in range(1, len(prompt)):
        scores = FUNCTION.reference_scores(prompt[:i]).astype(np.float64)
        scores -= scores.max()
        values.append(float(scores[prompt[i]] - np.log(np.exp(scores).sum())))
    return values


@pytest.mark.parametrize("method", METHODS)
def test_prompt_logprobs(method: str) -> None:
    params = SamplingParams(max_tokens=12, prompt_logprobs=2)
    bare = SamplingParams(max_tokens=12)
    engine = make_engine(METHODS[method])
    states = [engine.submit(engine.resolve(p, params)) for p in PROMPTS] + [
        engine.submit(engine.resolve(PROMPTS[0], bare))
    ]
    engine.run(states)
    for prompt, state in zip(PROMPTS, states, strict=False):
        output = state.snapshot()
        assert output.outputs[0].token_ids == FUNCTION.reference(prompt, 12)
        rows = output.prompt_logprobs
        assert rows is not None and len(rows) == len(prompt) and rows[0] is None
        for token, row, expected in zip(
            prompt[1:], rows[1:], expected_logprobs(prompt), strict=True
        ):
            assert row is not None
            assert row[token].logprob == pytest.approx(expected, abs=1e-5)
            assert 2 <= len(row) <= 3
            best = [v for v in row.values() if v.rank == 1]
            assert best and best[0].logprob == max(v.logprob for v in row.values())
        assert len(output.to_json_dict()["prompt_logprobs"]) == len(prompt)
    assert states[-1].snapshot().prompt_logprobs is None
    assert "prompt_logprobs" not in states[-1].snapshot().to_json_dict()


@pytest.mark.parametrize("options", [{}, {"enable_block_reuse": True}], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_prompt_logprobs_in_chunks_and_after_reuse(rows: int, options: dict[str, Any]) -> None:
    """Whatever the chunks, every prompt token is scored once, cached pages or not."""
    prompt = [(7 * i) % VOCAB for i in range(23)]
    engine = hash_engine(FUNCTION, page_size=4, max_batch_size=1, max_num_tokens=rows, **options)
    for _ in range(2):
        engine.ex.submit(prompt, max_tokens=3, prompt_logprobs=0)
        got: list[float] = []
        tokens: list[int] = []
        while engine.ex.num_unfinished:
            for out in engine.step() or []:
                got += [entry[0] for entry in out.prompt_logprobs]
                tokens += out.tokens
        assert tokens == FUNCTION.reference(prompt, 3)
        assert got == pytest.approx(expected_logprobs(prompt), abs=1e-5)


@pytest.mark.parametrize("wrong_at", [None, 0, 2])
def test_drafts_that_come_with_the_prompt_have_their_own_texts(wrong_at: int | None) -> None:
    """Drafts verified in the prompt's own pass, with its logprobs asked for, too."""
    prompt = PROMPTS[0]
    text = plain(prompt, 12, None, 0)
    drafts = list(text[:5])
    if wrong_at is not None:
        drafts[wrong_at] = (drafts[wrong_at] + 1) % VOCAB
    params = SamplingParams(
        max_tokens=12, prompt_logprobs=0, logits_processors=[shift],
        external_draft=ExternalDraftTokensConfig(drafts),
    )  # fmt: skip
    engine = make_engine(METHODS["ngram"])
    (output,) = run(engine, [prompt], params)
    accepted = 5 if wrong_at is None else wrong_at
    assert output.outputs[0].token_ids == text[: accepted + 1]  # that pass is the whole request
    assert output.outputs[0].token_from_draft == [True] * accepted + [False]
    rows = output.prompt_logprobs
    assert [rows[i + 1][prompt[i + 1]].logprob for i in range(len(prompt) - 1)] == pytest.approx(
        expected_logprobs(prompt), abs=1e-5
    )


def test_only_the_first_of_n_outputs_scores_the_prompt() -> None:
    from specdec_ext.engine.request_group import RequestGroup

    engine = make_engine(None)
    params = SamplingParams(max_tokens=4, temperature=1.0, n=3, seed=1, prompt_logprobs=0)
    group = RequestGroup(engine, engine.resolve(PROMPTS[0], params))
    engine.run(group.states)
    assert len(group.snapshot().prompt_logprobs or []) == len(PROMPTS[0])
    assert [s.snapshot().prompt_logprobs is None for s in group.states] == [False, True, True]


def test_limits_of_prompt_logprobs() -> None:
    for value in (-1, 21, True):
        with pytest.raises(RequestError, match=r"SamplingParams\.prompt_logprobs"):
            SamplingParams(prompt_logprobs=value)
    engine = hash_engine(FUNCTION)
    with pytest.raises(ValueError, match=r"prompt_logprobs = 65: give 0\.\.64"):
        engine.ex.submit([1], max_tokens=2, prompt_logprobs=65)


def test_raw_scores_have_the_shape_of_the_result() -> None:
    engine = hash_engine(FUNCTION)
    engine.ex.submit([1], max_tokens=2, processes_scores=True)
    plan = engine.ex.plan()
    assert plan.needs_logits and plan.request_ids.tolist() == [1]
    scores = engine.model.forward(plan)
    with pytest.raises(ValueError, match="raw: expected the model's float32 scores"):
        engine.ex.commit(plan, scores, raw=scores[:, :3])
    (out,) = engine.ex.commit(plan, scores, raw=scores, errors={1: "refused"})
    assert (out.finish_reason, out.error, out.tokens) == ("error", "refused", [])
    engine.assert_idle()


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_prompt_logprobs_and_processors_of_a_real_model(folder: Path, impl: str) -> None:
    """A small Llama, chunks of 7 rows, drafts: against a pass of transformers' own."""
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = SEAM_PROMPTS[3]
    params = SamplingParams(max_tokens=8, prompt_logprobs=0, ignore_eos=True,
                            logits_processors=[shift])  # fmt: skip
    with LLM(
        folder, speculative_config=NGramDecodingConfig(), model_impl=impl,
        scheduler_config={"max_batch_size": 2, "max_seq_len": 100, "max_num_tokens": 7},
    ) as llm:  # fmt: skip
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    rows = output.prompt_logprobs
    assert rows is not None and len(rows) == len(prompt)
    text = list(prompt)
    with torch.inference_mode():
        wanted = torch.log_softmax(reference(torch.tensor([prompt])).logits[0], -1)
        for i, row in enumerate(rows[1:]):
            assert row is not None
            assert row[prompt[i + 1]].logprob == pytest.approx(
                float(wanted[i, prompt[i + 1]]), abs=1e-4
            )
        for _ in range(8):
            scores = reference(torch.tensor([text])).logits[0, -1].clone()
            text.append(int(shift(text, scores).argmax()))
    assert output.outputs[0].token_ids == text[len(prompt) :]
