"""The model repository of examples/triton, its backends called in process."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton_cases import make_repository, save_models
from triton_harness import Repository, TritonError, install

from specdec_ext import LLM, SamplingParams

PROMPTS = ["to be or not to be, that is", "if (a) { b(); } é ß"]


def text(*values: str) -> np.ndarray:
    return np.array([[value.encode() for value in values]], dtype=np.object_)


def number(value: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.array([[value]], dtype)


def string(tensor: np.ndarray) -> str:
    value: bytes = tensor.reshape(-1)[0]
    return value.decode()


def facts(parts: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """What the last part reports."""
    found: dict[str, Any] = json.loads(string(parts[-1]["report"]))
    return found


def whole(parts: list[dict[str, np.ndarray]]) -> tuple[str, list[int]]:
    """Text and tokens of an answer in parts."""
    tokens = [t for part in parts for t in part["output_ids"].reshape(-1).tolist()]
    return "".join(string(part["text_output"]) for part in parts), tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_models(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(folders[0], speculative_config=None) as llm:
        yield llm


@pytest.fixture(scope="module", params=["true", "false"], ids=["decoupled", "whole"])
def repository(
    request: pytest.FixtureRequest,
    folders: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Repository]:
    install()
    folder = tmp_path_factory.mktemp("repository") / "models"
    made = make_repository(folder, *folders, decoupled_mode=request.param)
    with Repository(made) as models:
        yield models


def is_decoupled(repository: Repository) -> bool:
    policy: bool = repository.configs["specdec"]["model_transaction_policy"]["decoupled"]
    return policy


def answer_of(llm: LLM, prompt: str, **how: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**how), use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_bls_gives_the_models_own_text(
    repository: Repository, plain: LLM, prompt: str, drafts: int
) -> None:
    expected = answer_of(plain, prompt, max_tokens=12)
    for streaming in (False, True):
        request = {
            "text_input": text(prompt), "max_tokens": number(12),
            "num_draft_tokens": number(drafts), "stream": number(streaming, np.bool_),
        }  # fmt: skip
        parts = repository.infer("specdec_bls", request)
        assert whole(parts) == (expected.text, expected.token_ids)
        assert facts(parts)["finish_reason"] == expected.finish_reason
        if not streaming or not is_decoupled(repository):
            assert len(parts) == 1
        elif drafts:  # a part per round, of up to four tokens
            assert len(parts) >= 12 // 4


def test_drafts_save_passes_and_both_reuse_their_pages(repository: Repository) -> None:
    request = {
        "text_input": text("abcabcabc" * 12), "max_tokens": number(40),
        "num_draft_tokens": number(4),
    }  # fmt: skip
    before = {name: queries(repository, name) for name in ("specdec", "specdec_draft")}
    metrics = facts(repository.infer("specdec_bls", request))["metrics"]
    spec = metrics["speculative_decoding"]
    assert 0 < spec["num_accepted_draft_tokens"] < spec["num_draft_tokens"]
    # A round delivers what was accepted and one token more; the last has no room for drafts.
    assert spec["num_spec_steps"] + spec["num_accepted_draft_tokens"] in (39, 40)
    for name, (asked, cached) in before.items():
        more = queries(repository, name)
        assert more[0] > asked and more[1] > cached, name


def queries(repository: Repository, name: str) -> tuple[int, int]:
    """Requests that looked for cached pages, and tokens that they found."""
    stats = repository.model(name).llm.get_metrics()["executor"]
    return stats["reuse_queries"], stats["cached_tokens"]


def test_sampled_text_is_that_of_the_seed(repository: Repository, plain: LLM) -> None:
    sampling = {
        "temperature": number(0.75, np.float32), "top_k": number(20),
        "top_p": number(0.5, np.float32), "random_seed": number(7, np.uint64),
    }  # fmt: skip
    how = {"temperature": 0.75, "top_k": 20, "top_p": 0.5, "seed": 7, "max_tokens": 30}
    expected = answer_of(plain, "to be or", **how)
    request = {"text_input": text("to be or"), "max_tokens": number(30), **sampling}
    for drafts in (0, 3):
        given = request | {"num_draft_tokens": number(drafts)}
        assert whole(repository.infer("specdec_bls", given))[1] == expected.token_ids
    # By p / q other numbers are drawn, with the same law; the run is repeatable.
    by_ratio = request | {"num_draft_tokens": number(3), "use_draft_logits": number(True, np.bool_)}
    first = whole(repository.infer("specdec_bls", by_ratio))
    assert len(first[1]) == 30
    assert whole(repository.infer("specdec_bls", by_ratio)) == first


@pytest.mark.parametrize("drafts", [0, 4])
def test_stop_words_end_the_text_and_bad_words_stay_out(
    repository: Repository, plain: LLM, drafts: int
) -> None:
    free = answer_of(plain, "abcabc", max_tokens=40)
    stop = free.text[9:11]
    expected = answer_of(plain, "abcabc", max_tokens=40, stop=[stop, "\u2603"])
    request = {
        "text_input": text("abcabc"), "max_tokens": number(40), "stop_words": text(stop, "\u2603"),
        "num_draft_tokens": number(drafts), "stream": number(True, np.bool_),
    }  # fmt: skip
    parts = repository.infer("specdec_bls", request)
    assert whole(parts)[0] == expected.text
    assert facts(parts)["stop_reason"] == stop
    bad = next(c for c in free.text if c.isprintable() and c.isascii())
    without = answer_of(plain, "abcabc", max_tokens=40, bad_words=[bad])
    del request["stop_words"]
    parts = repository.infer("specdec_bls", request | {"bad_words": text(bad)})
    assert whole(parts)[0] == without.text


@pytest.mark.parametrize("drafts", [0, 4])
def test_log_probabilities(repository: Repository, plain: LLM, drafts: int) -> None:
    expected = answer_of(plain, "abc", max_tokens=12, logprobs=0)
    request = {
        "text_input": text("abc"), "max_tokens": number(12), "num_draft_tokens": number(drafts),
        "return_log_probs": number(True, np.bool_), "stream": number(True, np.bool_),
    }  # fmt: skip
    parts = repository.infer("specdec_bls", request)
    given = [x for part in parts for x in part["output_log_probs"].reshape(-1).tolist()]
    wanted = [
        line[token].logprob
        for line, token in zip(expected.logprobs, expected.token_ids, strict=True)
    ]
    assert given == [float(np.float32(x)) for x in wanted]
    total = float(parts[-1]["cum_log_probs"].reshape(-1)[0])
    assert math.isclose(total, math.fsum(wanted), rel_tol=1e-5)


def test_the_ensemble_is_the_same_text(repository: Repository, plain: LLM) -> None:
    expected = answer_of(plain, "abcabc", max_tokens=16)
    request = {"text_input": text("abcabc"), "max_tokens": number(16)}
    (part,) = repository.infer("ensemble", request)
    assert string(part["text_output"]) == expected.text
    parts = repository.infer("ensemble", request | {"stream": number(True, np.bool_)})
    assert facts(parts)["finish_reason"] == "length"
    if len(parts) == 1:  # the tiny model is often faster than the stream
        assert string(parts[0]["text_output"]) == expected.text


def test_requests_side_by_side_are_each_their_own(repository: Repository, plain: LLM) -> None:
    prompts = [f"{i} {PROMPTS[i % 2]}" for i in range(12)]
    outputs = plain.generate(prompts, SamplingParams(max_tokens=10), use_tqdm=False)
    found: list[Any] = [None] * len(prompts)

    def ask(i: int) -> None:
        request = {"text_input": text(prompts[i]), "max_tokens": number(10),
                   "num_draft_tokens": number(i % 5)}  # fmt: skip
        found[i] = whole(repository.infer("specdec_bls", request))[1]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [output.outputs[0].token_ids for output in outputs]


def test_the_target_takes_drafts_of_anybody(repository: Repository, plain: LLM) -> None:
    """The document's own protocol: draft_input_ids in, up to K + 1 tokens out."""
    tokens = answer_of(plain, "abcabc", max_tokens=6).token_ids
    ids = plain.tokenizer("abcabc")["input_ids"]
    request = {
        "input_ids": np.array([ids], np.int32), "input_lengths": number(len(ids)),
        "request_output_len": number(5),
    }  # fmt: skip
    for right in range(5):
        drafts = [*tokens[:right], *[(t + 1) % 256 for t in tokens[right:4]]]
        given = request | {"draft_input_ids": np.array([drafts], np.int32)}
        (part,) = repository.infer("specdec", given)
        assert part["output_ids"].tolist() == [[tokens[: right + 1]]]
        assert part["token_from_draft"].tolist() == [[[True] * right + [False]]]
        assert part["sequence_length"].tolist() == [[right + 1]]
    included = request | {"exclude_input_in_output": number(False, np.bool_)}
    (part,) = repository.infer("specdec", included)
    assert part["output_ids"].tolist() == [[ids + tokens[:5]]]
    logits = request | {"return_generation_logits": number(True, np.bool_)}
    (part,) = repository.infer("specdec", logits)
    assert part["generation_logits"][0, 0].argmax(-1).tolist() == tokens[:5]
    (ended,) = repository.infer("specdec", request | {"end_id": number(tokens[2])})
    assert ended["output_ids"].reshape(-1).tolist() == tokens[: tokens.index(tokens[2]) + 1]


REQUEST = {"text_input": text("abc"), "max_tokens": number(4), "num_draft_tokens": number(2)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": number(0)}, "max_tokens"),
        ({"max_tokens": number(10**6)}, "exceeds max_seq_len"),
        ({"temperature": number(-1.0, np.float32)}, "temperature"),
        ({"top_p": number(2.0, np.float32)}, "top_p"),
        ({"beam_width": number(4)}, "there are no beams; use 1"),
        ({"num_draft_tokens": number(128)}, "num_draft_tokens"),
        ({"num_draft_tokens": number(-1)}, "num_draft_tokens"),
        ({"presence_penalty": number(1.0, np.float32)}, "not in an external loop"),
        ({"text_input": text("")}, "prompt is empty"),
        ({"text_input": text("a" * 100_000)}, "max_seq_len"),
        ({"text_input": np.array([[b"\xff\xfe"]], np.object_)}, "not UTF-8"),
        ({"text_input": np.array([[b"a"], [b"b"]], np.object_)}, "2 rows"),
        ({"max_tokens": number(4.0, np.float32)}, "expected TYPE_INT32"),
        ({"temprature": number(1.0, np.float32)}, "unexpected input temprature"),
    ],
)
def test_a_bad_request_is_one_error(
    repository: Repository, change: dict[str, np.ndarray], said: str
) -> None:
    with pytest.raises(TritonError, match=said) as error:
        repository.infer("specdec_bls", REQUEST | change)
    assert error.value.code() == "INVALID_ARG"
    assert whole(repository.infer("specdec_bls", REQUEST))[1]  # others go on


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_ids": np.array([[5, 9999]], np.int32)}, "vocabulary"),
        ({"draft_input_ids": np.array([[-1]], np.int32)}, "tokens\\[0\\] = -1"),
        ({"draft_logits": np.zeros((1, 1, 3), np.float32)}, "columns"),
        ({"draft_acceptance_threshold": number(0.5, np.float32)}, "without logits"),
        ({"input_lengths": number(0)}, "prompt is empty"),
    ],
)
def test_a_bad_request_of_tokens_is_one_error(
    repository: Repository, change: dict[str, np.ndarray], said: str
) -> None:
    request = {
        "input_ids": np.array([[5, 6]], np.int32), "request_output_len": number(2),
        "draft_input_ids": np.array([[7]], np.int32),
    }  # fmt: skip
    with pytest.raises(TritonError, match=said):
        repository.infer("specdec", request | change)
    (part,) = repository.infer("specdec", request)
    assert part["output_ids"].size


def test_a_client_that_goes_ends_its_request(repository: Repository) -> None:
    request = {
        "input_ids": np.array([[5, 6]], np.int32), "request_output_len": number(450),
        "ignore_eos": number(True, np.bool_), "streaming": number(True, np.bool_),
    }  # fmt: skip
    sender = repository.submit("specdec", request)
    sender.cancelled = True
    parts = list(repository.responses("specdec", sender))
    engine = repository.model("specdec").llm.engine
    assert engine.num_unfinished == 0
    tokens = sum(one.as_numpy().size for part in parts for one in part.output_tensors()
                 if one.name() == "output_ids")  # fmt: skip
    assert parts[-1].has_error() and tokens < 450
