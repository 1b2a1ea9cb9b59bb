"""Stops, limits and score processors under speculation: exact, token by token, at every offset.

The trick (HF#47912): decode once, then declare a token that the model really produced to be an end
token, so that the stop falls at every offset inside an accepted block. What a request delivers,
what it counts and its finish reason follow from the definition alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import Delivery, Job, hash_engine

from hash_target import HashFunction

PROMPT = [5, 9, 2, 5, 9, 2, 5]
METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "lookahead": {"method": "lookahead", "lookahead": (4, 4, 4), "adaptive": False},
    "ngram": {
        "method": "ngram",
        "ngram": {"max_draft_len": 6, "max_matching_ngram_size": 2},
        "adaptive": False,
    },
    "ngram-public": {
        "method": "ngram",
        "ngram": {"max_draft_len": 6, "max_matching_ngram_size": 2, "is_public_pool": True},
        "adaptive": False,
    },
}
SPECULATIVE = [name for name in METHODS if name != "none"]


def looping(seed: int = 4) -> HashFunction:
    return HashFunction(vocab=40, surprise=30, seed=seed)


def run(function: HashFunction, method: str, jobs: list[Job]) -> list[Delivery]:
    engine = hash_engine(
        function, page_size=4, max_batch_size=4, max_seq_len=200, **METHODS[method]
    )
    return engine.run(jobs)


def stopped(text: list[int], stops: set[int], limit: int) -> tuple[list[int], str]:
    """Returns the delivered tokens and finish reason that the rules define."""
    for i, token in enumerate(text[:limit]):
        if token in stops:
            return text[: i + 1], "stop"
    return text[:limit], "length"


@pytest.mark.parametrize("method", METHODS)
def test_every_stop_offset_and_every_limit(method: str) -> None:
    """Each produced token as end token x max_tokens 1..2K+3, as an end token and as a stop id."""
    function = HashFunction(vocab=40, surprise=60, alphabet=14, seed=20)
    # A token is drafted only if it occurred before: the prompt holds the loop already, so that the
    # stop falls inside accepted drafts.
    prompt = PROMPT + function.reference(PROMPT, 50)
    text = function.reference(prompt, 30)
    assert len(set(text) & set(prompt)) >= 8
    jobs, expected = [], []
    for stop in dict.fromkeys(text):
        for limit in range(1, 2 * 6 + 4):
            for kind in ("eos_token_ids", "stop_token_ids"):
                jobs.append(Job(prompt, limit, {kind: [stop]}))
                expected.append((*stopped(text, {stop}, limit), stop, kind))
    deliveries = run(function, method, jobs)
    for job, got, (tokens, reason, stop, kind) in zip(jobs, deliveries, expected, strict=True):
        assert (got.tokens, got.finish_reason) == (tokens, reason), job
        is_stop_id = reason == "stop" and kind == "stop_token_ids"
        assert got.stop_reason == (stop if is_stop_id else None), job
        # The counter stops where delivery stops: the first token is never a draft.
        assert got.num_accepted < max(2, len(tokens)), job
    if method != "none":
        assert sum(got.num_accepted for got in deliveries) > len(jobs)


@pytest.mark.parametrize("method", METHODS)
def test_every_limit_without_stops(method: str) -> None:
    function = looping(7)
    text = function.reference(PROMPT, 120)
    deliveries = run(function, method, [Job(PROMPT, limit) for limit in range(1, 121)])
    for limit, got in enumerate(deliveries, 1):
        assert got.tokens == text[:limit]
        assert got.finish_reason == "length"
        # The counters stop where delivery stops.
        assert got.num_accepted <= limit - 1


@pytest.mark.parametrize("method", METHODS)
def test_end_of_context(method: str) -> None:
    """Prompts that leave 1..12 positions: the request ends by length at max_seq_len exactly."""
    function = looping(3)
    engine = hash_engine(function, page_size=4, max_batch_size=2, max_seq_len=64, **METHODS[method])
    for left in range(1, 13):
        prompt = (PROMPT * 10)[: 64 - left]
        (got,) = engine.run([Job(prompt, 100)])
        assert got.tokens == function.reference(prompt, left)
        assert got.finish_reason == "length"


@pytest.mark.parametrize("method", METHODS)
def test_ignore_eos(method: str) -> None:
    function = looping()
    text = function.reference(PROMPT, 30)
    on, off = run(
        function,
        method,
        [
            Job(PROMPT, 30, {"eos_token_ids": [text[5]], "ignore_eos": True}),
            Job(PROMPT, 30, {"eos_token_ids": [text[5]]}),
        ],
    )
    assert (on.tokens, on.finish_reason) == (text, "length")
    assert off.finish_reason == "stop"
    assert len(off.tokens) <= 6


def test_earliest_rule_wins() -> None:
    """The end token on the last allowed place is a stop, not a length."""
    function = looping()
    text = function.reference(PROMPT, 30)
    at = max(i for i in range(15) if text[i] not in text[:i])
    for method in METHODS:
        (got,) = run(function, method, [Job(PROMPT, at + 1, {"eos_token_ids": [text[at]]})])
        assert (got.finish_reason, len(got.tokens)) == ("stop", at + 1)


# Score processors: an independent reference on whole histories.


def processed(scores: np.ndarray, prompt: list[int], output: list[int], p: dict[str, Any]) -> Any:
    """Applies a request's processors to one score row, by their definitions."""
    scores = scores.astype(np.float32).copy()
    if p.get("allowed_token_ids"):
        keep = np.zeros(len(scores), bool)
        keep[p["allowed_token_ids"]] = True
        scores[~keep] = -np.inf
    history = prompt + output
    for word in p.get("bad_words", []):
        if len(word) == 1 or history[-(len(word) - 1) :] == word[:-1]:
            scores[word[-1]] = -np.inf
    if len(output) < p.get("min_tokens", 0):
        banned = list(p.get("stop_token_ids", []))
        banned += [] if p.get("ignore_eos") else list(p.get("eos_token_ids", []))
        scores[banned] = -np.inf
    for token, bias in p.get("logit_bias", {}).items():
        scores[token] += np.float32(bias)
    repetition = np.float32(p.get("repetition_penalty", 1.0))
    for token in set(history):
        if repetition != 1.0:
            positive = scores[token] > 0
            scores[token] = scores[token] / repetition if positive else scores[token] * repetition
        count = output.count(token)
        scores[token] -= np.float32(p.get("frequency_penalty", 0.0)) * np.float32(count)
        if count:
            scores[token] -= np.float32(p.get("presence_penalty", 0.0))
    return scores


def decode(function: HashFunction, prompt: list[int], limit: int, p: dict[str, Any]) -> Any:
    """Returns (tokens, finish reason) of greedy decoding with processors, by the definition."""
    output: list[int] = []
    stops = set(p.get("stop_token_ids", []))
    stops |= set() if p.get("ignore_eos") else set(p.get("eos_token_ids", []))
    while len(output) < limit:
        scores = processed(function.reference_scores(prompt + output), prompt, output, p)
        output.append(int(scores.argmax()))
        if output[-1] in stops:
            return output, "stop"
    return output, "length"


TEXT = looping().reference(PROMPT, 60)
COMMON = max(set(TEXT), key=TEXT.count)
PROCESSORS: dict[str, dict[str, Any]] = {
    "min_tokens-eos": {"eos_token_ids": [TEXT[2]], "min_tokens": 17},
    "min_tokens-stop": {"stop_token_ids": [TEXT[3], TEXT[1]], "min_tokens": 9},
    "min_tokens-all": {"eos_token_ids": [TEXT[0]], "min_tokens": 60},
    "bad_word": {"bad_words": [[COMMON]]},
    "bad_words-pair": {"bad_words": [TEXT[20:22], TEXT[30:33]]},
    "bad_words-over-prompt": {"bad_words": [[*PROMPT[-2:], TEXT[0]]]},
    "logit_bias-down": {"logit_bias": {COMMON: -10.0}},
    "logit_bias-up": {"logit_bias": {39: 1.2, 38: 0.3}},
    "allowed": {"allowed_token_ids": [1, 3, 5, 7, 11, 13]},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 0.9},
    "presence-negative": {"presence_penalty": -0.7},
    "frequency": {"frequency_penalty": 0.4},
    "mixed": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "logit_bias": {4: 0.5},
        "bad_words": [[COMMON, TEXT[1]], [TEXT[9]]],
        "eos_token_ids": [TEXT[12]],
        "min_tokens": 30,
    },
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(name: str, method: str) -> None:
    """Processors act per tree node: speculative == plain == definition, and on != off."""
    function, options = looping(), PROCESSORS[name]
    expected = decode(function, PROMPT, 60, options)
    off = decode(function, PROMPT, 60, {})
    assert expected[0] != off[0], "the case must change something"
    # A neighbour without processors shares the steps.
    on, neighbour = run(function, method, [Job(PROMPT, 60, options), Job(PROMPT, 60)])
    assert (on.tokens, on.finish_reason) == expected
    assert (neighbour.tokens, neighbour.finish_reason) == off


@pytest.mark.parametrize("method", METHODS)
def test_every_min_tokens(method: str) -> None:
    """The ban on stopping ends at the same token when that token lies inside accepted drafts."""
    function = HashFunction(vocab=40, surprise=60, alphabet=14, seed=20)
    prompt = PROMPT + function.reference(PROMPT, 50)
    text = function.reference(prompt, 40)
    stops = [token for token in dict.fromkeys(text) if token in prompt][:6]
    jobs, expected = [], []
    for stop in stops:
        for least in range(1, 30):
            options = {"eos_token_ids": [stop], "min_tokens": least}
            jobs.append(Job(prompt, 40, options))
            expected.append(decode(function, prompt, 40, options))
    for job, got, want in zip(jobs, run(function, method, jobs), expected, strict=True):
        assert (got.tokens, got.finish_reason) == want, job


def test_processors_still_speculate() -> None:
    """Drafts are accepted while a processor is on (the equality is not won by switching off)."""
    function = looping()
    for method in SPECULATIVE:
        (got,) = run(function, method, [Job(PROMPT, 60, {"logit_bias": {39: 0.01}})])
        assert got.num_accepted > 10, method


@pytest.mark.parametrize("method", METHODS)
def test_nothing_allowed_ends_the_request_alone(method: str) -> None:
    function = looping()
    bad = {"allowed_token_ids": [3], "bad_words": [[3]]}
    broken, fine = run(function, method, [Job(PROMPT, 20, bad), Job(PROMPT, 20)])
    assert broken.finish_reason == "error"
    assert broken.error is not None and "allowed" in broken.error
    assert broken.tokens == []
    assert fine.tokens == function.reference(PROMPT, 20)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs(method: str, top: int) -> None:
    """One entry per delivered token, from the raw scores after that token's own history."""
    function = looping()
    options = {"logprobs": top, "bad_words": [[COMMON]]}
    tokens, _ = decode(function, PROMPT, 40, options)
    (got,) = run(function, method, [Job(PROMPT, 40, options)])
    assert got.tokens == tokens
    assert len(got.logprobs) == len(tokens)
    for i, (logprob, rank, best) in enumerate(got.logprobs):
        scores = function.reference_scores(PROMPT + tokens[:i]).astype(np.float64)
        expected = scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
        order = np.lexsort((np.arange(len(scores)), -scores))
        assert logprob == pytest.approx(expected[tokens[i]], abs=1e-5)
        assert rank == 1 + int((scores > scores[tokens[i]]).sum())
        assert [token for token, _ in best] == order[:top].tolist()
        assert [p for _, p in best] == pytest.approx(expected[order[:top]].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"min_tokens": 21}, "min_tokens"),
        ({"eos_token_ids": [40]}, "eos_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {40: 1.0}}, "logit_bias"),
        ({"logit_bias": {4: float("nan")}}, "is nan: give a number"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 99]}, "allowed_token_ids"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [[1, -5]]}, "bad_words"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 41}, "logprobs"),
        ({"lookahead": (5, 4, 4)}, "lookahead"),
        ({"lookahead": (0, 4, 4)}, "0"),
        ({"max_draft_len": 3}, "max_draft_len"),
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [1, 40]}, "40"),
        ({"prompt_ids": [-1]}, "-1"),
        ({"prompt_ids": [1] * 200}, "200"),
    ],
)
def test_refusals_name_the_field_and_leave_no_trace(options: dict[str, Any], text: str) -> None:
    """Bad input is one ValueError at submit; nothing is queued or held."""
    function = looping()
    engine = hash_engine(function, max_batch_size=2, max_seq_len=200, **METHODS["lookahead"])
    arguments = {"prompt_ids": PROMPT, "max_tokens": 20, **options}
    with pytest.raises(ValueError, match=text):
        engine.ex.submit(arguments.pop("prompt_ids"), **arguments)
    engine.assert_idle()
    (after,) = engine.run([Job(PROMPT, 20)])
    assert after.tokens == function.reference(PROMPT, 20)


def test_request_larger_than_the_pool_is_refused_at_once() -> None:
    function = looping()
    engine = hash_engine(
        function, page_size=4, num_pages=20, max_batch_size=2, max_seq_len=200, **METHODS["ngram"]
    )
    first = engine.ex.submit(PROMPT, max_tokens=20)
    with pytest.raises(ValueError, match="20"):
        engine.ex.submit(PROMPT, max_tokens=180)
    tokens: list[int] = []
    while engine.ex.num_unfinished:
        for out in engine.step() or []:
            assert out.request_id == first
            tokens += out.tokens
    assert tokens == function.reference(PROMPT, 20)
    engine.assert_idle()
