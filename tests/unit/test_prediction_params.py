"""SamplingParams.prediction: forms, tokens behind the prompt, refusals before any work; the LLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import LLM, CapacityError, RequestError, SamplingParams
from specdec_ext.cli import main
from specdec_ext.request.prediction import MAX_CHARS_PER_TOKEN, prediction_ids
from tiny_models import save_tiny

LIMITS: dict[str, Any] = {"scheduler_config": {"max_batch_size": 4, "max_seq_len": 256}}
PROMPT = "abcabcabcabc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("value", "normal"),
    [
        (None, None),
        ("", None),
        ([], None),
        ("text", "text"),
        ([3, 4], (3, 4)),
        ({"type": "content", "content": "text"}, "text"),
        ({"type": "content", "content": [{"type": "text", "text": "a"}, "b"]}, "ab"),
    ],
)
def test_forms(value: Any, normal: Any) -> None:
    assert SamplingParams(prediction=value).prediction == normal


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (7, "prediction = 7: expected the text or its token ids, got int"),
        (b"abc", "expected the text or its token ids, got bytes"),
        ([1, -1], r"prediction\[1\] = -1"),
        ([1, "a"], r"prediction\[1\] = 'a': expected an integer"),
        ("\ud800", "half a surrogate pair"),
        ({"content": "a"}, r'expected \{"type": "content", "content": text\}'),
        ({"type": "content", "content": [{"type": "image"}]}, "content holds"),
    ],
)
def test_refused(value: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        SamplingParams(prediction=value)


def test_what_does_not_go_together() -> None:
    with pytest.raises(RequestError, match="prediction with speculative_config = False"):
        SamplingParams(prediction="a", speculative=False)
    with pytest.raises(RequestError, match="prediction and external_draft are both set"):
        SamplingParams(prediction="a", external_draft={"tokens": [1]})


class Words:
    """A tokenizer of words that puts a space in front of a text, as SentencePiece does."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        pieces = (" " + text).replace(" ", "\n ").split("\n")[1:]
        self.words += [piece for piece in dict.fromkeys(pieces) if piece not in self.words]
        return [self.words.index(piece) for piece in pieces]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.words[i] for i in ids)[1:]


def test_text_is_tokenised_behind_the_prompt() -> None:
    words = Words()
    prompt = words.encode("one two", add_special_tokens=False)
    ids = prediction_ids(" three", prompt, words, 100, 50)
    assert [words.words[i] for i in ids] == [" three"]
    # It would become one word with the prompt's last: tokenised by itself.
    ids = prediction_ids("some", prompt, words, 100, 50)
    assert [words.words[i] for i in ids] == [" some"]


def test_sizes_are_checked_before_tokens_are_made() -> None:
    with pytest.raises(CapacityError, match=r"prediction has \d+ characters, limit 2560"):
        prediction_ids("a" * (MAX_CHARS_PER_TOKEN * 10 + 1), [1], object(), 100, 10)
    with pytest.raises(CapacityError, match="prediction has 11 tokens, max_seq_len = 10"):
        prediction_ids((1,) * 11, [1], None, 100, 10)
    with pytest.raises(RequestError, match=r"prediction\[1\] = 100: out of range, allowed 0..99"):
        prediction_ids((1, 100), [1], None, 100, 10)
    with pytest.raises(RequestError, match="text needs a tokenizer"):
        prediction_ids("a", [1], None, 100, 10)


@pytest.mark.parametrize("spec", [None, "[10,2]", "suffix", [4, 3, 4]], ids=str)
def test_the_llm_reads_a_true_prediction_in_few_passes(folder: Path, spec: Any) -> None:
    with LLM(folder, speculative_config=spec, **LIMITS) as llm:
        # Times of this model's passes on a busy machine would decide how much is drafted.
        llm.engine._calibrate = lambda: llm.engine.executor.set_step_cost([1, 128], [1.0, 2.0])
        plain = SamplingParams(max_tokens=60, ignore_eos=True, speculative_config=False)
        [expected] = llm.generate([PROMPT], plain, use_tqdm=False)
        text, ids = expected.outputs[0].text, list(expected.outputs[0].token_ids)
        assert "accepted_prediction_tokens" not in expected.metrics
        for prediction in (ids, text):
            params = SamplingParams(max_tokens=60, ignore_eos=True, prediction=prediction)
            [out] = llm.generate([PROMPT], params, use_tqdm=False)
            assert list(out.outputs[0].token_ids) == ids
            if prediction is ids:
                assert out.metrics["num_forward_passes"] <= 8
                assert out.metrics["accepted_prediction_tokens"] >= 50
        # Sampled, with logprobs and a processor, several outputs: the text of plain decoding.
        law: dict[str, Any] = {
            "max_tokens": 30, "temperature": 0.8, "seed": 5, "n": 3, "logprobs": 2,
            "repetition_penalty": 1.1, "ignore_eos": True,
        }  # fmt: skip
        [want] = llm.generate(
            [PROMPT], SamplingParams(**law, speculative_config=False), use_tqdm=False
        )
        likely = list(want.outputs[1].token_ids)
        [got] = llm.generate([PROMPT], SamplingParams(**law, prediction=likely), use_tqdm=False)
        for a, b in zip(got.outputs, want.outputs, strict=True):
            assert list(a.token_ids) == list(b.token_ids)
            assert a.cumulative_logprob == b.cumulative_logprob
        assert got.metrics["accepted_prediction_tokens"] >= 25
        totals = llm.get_metrics()["prediction"]
        assert totals["accepted_prediction_tokens"] >= 75
        with pytest.raises(CapacityError, match="prediction has 257 tokens, max_seq_len = 256"):
            llm.generate([PROMPT], SamplingParams(prediction=[1] * 257))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_wrong_prediction_is_weighed_without_a_method_too(
    folder: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine learns T(rows) when a prediction comes, and drafts no more where rows are dear."""
    scheduler = {**LIMITS["scheduler_config"], "overlap_depth": depth}
    with LLM(folder, speculative_config=None, scheduler_config=scheduler) as llm:
        told = []

        def calibrate() -> None:
            told.append(True)
            llm.engine.executor.set_step_cost([1, 2, 128], [1.0, 3.0, 400.0])

        monkeypatch.setattr(llm.engine, "_calibrate", calibrate)
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        [plain] = llm.generate([PROMPT], params, use_tqdm=False)
        assert not told  # nothing to weigh
        ids = list(plain.outputs[0].token_ids)
        wrong = [ids[i ^ 1] for i in range(len(ids) & ~1)]  # its tokens are found all the time
        params = SamplingParams(max_tokens=60, ignore_eos=True, prediction=wrong)
        [out] = llm.generate([PROMPT], params, use_tqdm=False)
        assert told == [True]
        assert list(out.outputs[0].token_ids) == ids
        stats = llm.get_metrics()["executor"]
        assert stats["budget_weighed"] > 20
        assert stats["budget_refused"] > 0.9 * stats["budget_weighed"]


def test_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["generate", "--model", str(folder), "--input-text", PROMPT, "--max-output-len", "40",
            "--max-seq-len", "256", "--ignore-eos", "--json"]  # fmt: skip
    assert main([*base, "--verify"]) == 0
    [line] = capsys.readouterr().out.splitlines()[:1]
    text = json.loads(line)["text"]
    file = tmp_path / "expected.txt"
    file.write_text(text)
    assert main([*base, "--prediction", str(file), "--verify"]) == 0
    [line] = capsys.readouterr().out.splitlines()[:1]
    assert json.loads(line)["text"] == text
    assert main([*base, "--prediction", str(tmp_path / "none.txt")]) == 2
    assert "--prediction" in capsys.readouterr().err
