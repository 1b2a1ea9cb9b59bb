"""Predicted output: drafts from a cursor in it beside any method; no token and no law changes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from driver import STEP_COST, Job, hash_engine
from stream_driver import stream_hash_engine
from table_target import assert_law, joint_law, sample_joint
from test_sampling_law import PROMPT, TOKENS, table

from hash_target import HashFunction
from reference.prediction_reference import Chances, Cursor, worth
from reference.sampling_reference import Law
from specdec_ext import _core

METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "lookahead": {"method": "lookahead", "lookahead": (4, 3, 4)},
    "ngram": {"method": "ngram", "ngram": {"max_draft_len": 4, "max_matching_ngram_size": 2}},
    "suffix": {"method": "suffix"},
    "proposed": {"method": "proposed"},
}
DRAFTS = 16  # of a step that weighs nothing


def edited(rng: random.Random, text: list[int], vocab: int) -> list[int]:
    """The text with a few tokens replaced, left out and put in, or wherever they stand."""
    result = list(text)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(result) + 1)
        how = rng.randrange(4)
        if how == 3 and at < len(result):
            name = [rng.randrange(vocab) for _ in range(rng.randrange(4))]
            one = result[at]
            result = [other for token in result for other in (name if token == one else [token])]
        elif how == 0:
            result[at : at + rng.randrange(1, 9)] = []
        elif how == 1:
            result[at:at] = [rng.randrange(vocab) for _ in range(rng.randrange(1, 9))]
        else:
            result[at : at + 1] = [rng.randrange(vocab)]
    return result[:200] or [0]


def test_drafts_are_those_behind_the_cursor() -> None:
    """Fixed lengths, plain engine: each step verifies what the definition says comes next."""
    resynced = repeated = refuted = 0
    for seed in range(40):
        rng = random.Random(seed)
        function = HashFunction(vocab=20, surprise=rng.choice([3, 8]), alphabet=4, seed=seed)
        prompt, count = [rng.randrange(20) for _ in range(rng.choice([1, 5, 30]))], 120
        text = function.reference(prompt, count)
        prediction = edited(rng, text, 20)
        cursor = Cursor(prediction)
        engine = hash_engine(function, max_batch_size=1, max_seq_len=200, adaptive=False)
        known: list[int] = []
        was_lost = False

        def compare(plan: Any, cursor: Cursor = cursor, prompt: list[int] = prompt,
                    known: list[int] = known) -> None:  # fmt: skip
            room = len(prompt) + 120 - (len(prompt) + len(known)) - 1
            wanted = cursor.following[: min(DRAFTS, room)]
            rows = plan.tokens.tolist()
            assert rows[-len(wanted) :] == wanted or not wanted
            first = len(prompt) if not known else 1
            assert len(rows) == first + len(wanted)

        engine.ex.submit(prompt, max_tokens=count, prediction=prediction)
        while (outputs := engine.step(compare)) is not None:
            for out in outputs:
                known += out.tokens
                for token in out.tokens:
                    cursor.take(token)
                    resynced += was_lost and not cursor.lost
                    was_lost = cursor.lost
        assert known == text
        repeated, refuted = repeated + cursor.repeated, refuted + cursor.refuted
    assert resynced > 20 and repeated > 20 and refuted > 5, (resynced, repeated, refuted)


def inconsistently_renamed(rng: random.Random) -> tuple[list[int], list[int]]:
    """An output behind a preamble, and a prediction with the same names in place of others, of
    which two begin alike: who expects the one may have written a part of it."""
    first, old = rng.randrange(40), [rng.randrange(40) for _ in range(rng.randrange(1, 3))]
    new = [[first, *(rng.randrange(40) for _ in range(n))] for n in (1, 2, 3)]
    output = [rng.randrange(40) for _ in range(rng.randrange(4))]
    prediction: list[int] = []
    at_first = [rng.randrange(40)]  # comes again: what stood in front of it may not
    for _ in range(8):
        between = at_first + [rng.randrange(40) for _ in range(rng.randrange(3, 9))]
        output += between + new[min(rng.randrange(5), 2)]
        prediction += between + old
    return output, prediction


def test_edits_that_are_made_in_several_ways() -> None:
    """Scripted outputs: each step's drafts, of which some are left in the middle of an edit."""
    repeated = refuted = 0
    for seed in range(300):
        rng = random.Random(seed)
        output, prediction = inconsistently_renamed(rng)
        pages = torch.zeros(1, 8, 1, 32, 8)
        executor = _core.Executor(
            pages, pages.clone(), vocab_size=40, max_batch_size=1, max_seq_len=200,
            max_num_tokens=64, adaptive=False,
        )  # fmt: skip
        cursor, known = Cursor(prediction), 0
        executor.submit([1], max_tokens=len(output), prediction=prediction)
        while known < len(output):
            plan = executor.plan()
            drafts = cursor.following[: min(DRAFTS, len(output) - known - 1)]
            assert plan.tokens.tolist()[1:] == drafts, (seed, known)
            chosen = [output[i] for i in plan.positions.tolist()]
            for out in executor.commit(plan, torch.tensor(chosen, dtype=torch.int32)):
                assert out.tokens == output[known : known + len(out.tokens)]
                known += len(out.tokens)
                for token in out.tokens:
                    cursor.take(token)
        repeated, refuted = repeated + cursor.repeated, refuted + cursor.refuted
    assert repeated > 300 and refuted > 300, (repeated, refuted)


def test_adaptive_drafts_are_those_that_are_worth_it() -> None:
    """The law by which a prediction's drafts are cut, step by step: from guesses behind one equal
    token to whole drafts."""
    guessed, lengths = 0, set()
    rows: list[list[int]] = []
    for seed in range(20):
        rng = random.Random(seed)
        function = HashFunction(vocab=20, surprise=rng.choice([3, 8, 30]), alphabet=8, seed=seed)
        prompt, count = [rng.randrange(20) for _ in range(rng.choice([1, 5, 30]))], 150
        text = function.reference(prompt, count)
        prediction = edited(rng, edited(rng, text, 20), 20)
        cost = _core.StepCost(dict(zip(*STEP_COST, strict=True)))
        cursor, chances = Cursor(prediction), Chances()
        engine = hash_engine(function, max_batch_size=1, max_seq_len=200)
        known: list[int] = []
        engine.ex.submit(prompt, max_tokens=count, prediction=prediction)
        while (outputs := engine.step(lambda plan: rows.append(plan.tokens.tolist()))) is not None:
            match = max(cursor.agreement, 1)
            drafts = cursor.guessed[: max(0, count - len(known) - 1)]
            if known:
                kept = worth(chances.survival(match, len(drafts)), cost)
                assert rows[-1][1:] == drafts[:kept]
                lengths.add(kept)
                guessed += cursor.lost and kept > 0
            for out in outputs:
                if known:
                    chances.observe(match, drafts, out.tokens)
                known += out.tokens
                for token in out.tokens:
                    cursor.take(token)
        assert known == text
    assert guessed > 30 and {0, 1, 2} <= lengths, (guessed, lengths)
    assert max(lengths) > DRAFTS, "longer than a step that weighs nothing"


@pytest.mark.parametrize(("options", "most"), [({}, 64), ({"max_draft_depth": 24}, 24),
                                               ({"adaptive": False}, DRAFTS),
                                               ({"attention_window": 200}, DRAFTS)])  # fmt: skip
def test_a_step_drafts_no_more_than_it_may(options: dict[str, Any], most: int) -> None:
    """Rows cost nothing, and the prediction is right."""
    function = HashFunction(vocab=30, surprise=2, alphabet=4, seed=3)
    text = function.reference([1, 2, 3], 190)
    engine = hash_engine(function, max_batch_size=1, max_seq_len=200, **options)
    engine.ex.set_step_cost([1, 1024], [1.0, 1.0])
    rows: list[int] = []
    engine.ex.submit([1, 2, 3], max_tokens=190, prediction=text)
    written: list[int] = []
    while (outputs := engine.step(lambda plan: rows.append(len(plan.tokens)))) is not None:
        written += [token for out in outputs for token in out.tokens]
    assert written == text
    assert rows[0] == 3 + DRAFTS and max(rows[1:]) == 1 + most


def test_the_first_step_learns_how_outputs_begin() -> None:
    """As many of the prediction's first tokens are verified with the prompt as are worth their
    rows, by what earlier requests have shown."""
    function = HashFunction(vocab=30, surprise=2, alphabet=4, seed=3)
    text = function.reference([1, 2, 3], 60)
    verified: dict[bool, list[int]] = {}
    for right in (True, False):
        prediction = text if right else [(text[0] + 1) % 30, *text]
        engine = hash_engine(function, max_batch_size=1, max_seq_len=200)
        for _ in range(20):
            first: list[int] = []
            engine.ex.submit([1, 2, 3], max_tokens=60, prediction=prediction)
            while engine.step(lambda plan, rows=first: rows.append(len(plan.tokens))) is not None:
                pass
            verified.setdefault(right, []).append(first[0] - 3)
    assert verified[True][0] == verified[False][0], "nothing is known yet"
    assert 0 < verified[True][0] < verified[True][-1] <= DRAFTS
    assert verified[False][-1] == 0
    assert verified[True] == sorted(verified[True])
    assert verified[False] == sorted(verified[False], reverse=True)


def test_a_depth_that_no_step_could_have_is_refused() -> None:
    function = HashFunction(vocab=30, surprise=2, alphabet=4, seed=3)
    for depth in (15, 128):
        with pytest.raises(ValueError, match=rf"max_draft_depth = {depth}: give 16\.\.127"):
            hash_engine(function, max_batch_size=1, max_seq_len=200, max_draft_depth=depth)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ahead", [None, 0, 1, 2])
def test_random_schedules(ahead: int | None, method: str) -> None:
    accepted = predicted = 0
    for seed in range(8):
        rng = random.Random(seed)
        function = HashFunction(vocab=30, surprise=rng.choice([1, 8, 30]), alphabet=4, seed=seed)
        sizes: dict[str, Any] = {
            "page_size": rng.choice([1, 4, 16]),
            "max_batch_size": rng.choice([1, 3, 5]),
            "max_seq_len": 200,
            "max_num_tokens": rng.choice([5, 40, 300]),
            "enable_block_reuse": seed % 2 == 0,
        }
        if ahead is None:
            engine: Any = hash_engine(function, **sizes, **METHODS[method])
        else:
            engine = stream_hash_engine(
                function, depth=ahead, stub=seed, **sizes, **METHODS[method]
            )
            if seed % 3:
                engine.executor.set_step_cost(*STEP_COST)
        jobs = []
        for _ in range(6):
            prompt = [rng.randrange(30) for _ in range(rng.choice([1, 9, 40]))]
            tokens = rng.choice([1, 2, 17, 100])
            options: dict[str, Any] = {"adaptive": rng.random() < 0.7}
            if rng.random() < 0.8:
                text = function.reference(prompt, tokens)
                options["prediction"] = edited(rng, text, 30)[:200]
            if rng.random() < 0.3:
                options["stop_token_ids"] = [rng.randrange(30)]
            jobs.append(Job(prompt, tokens, options))
        for job, got in zip(jobs, engine.run(jobs), strict=True):
            text = function.reference(job.prompt, job.max_tokens)
            stops = job.options.get("stop_token_ids", [])
            ends = [i + 1 for i, token in enumerate(text) if token in stops]
            assert got.tokens == (text[: ends[0]] if ends else text)
            accepted += got.num_accepted if "prediction" in job.options else 0
            predicted += "prediction" in job.options
    assert predicted > 20 and accepted > 10 * predicted


@pytest.mark.parametrize("method", METHODS)
def test_a_useless_prediction_costs_one_step_of_drafts(method: str) -> None:
    """Nothing in it ever fits: the first step verifies its start, then the method goes on alone."""
    function = HashFunction(vocab=30, surprise=8, alphabet=4, seed=3)
    counts = []
    for prediction in ([], [29] * 150):
        engine = hash_engine(
            function, max_batch_size=1, max_seq_len=300, adaptive=False, **METHODS[method]
        )
        engine.ex.submit([1, 2, 3, 1, 2], max_tokens=200, prediction=prediction)
        text: list[int] = []
        drafts = predicted = accepted = steps = 0
        while (outputs := engine.step()) is not None:
            steps += 1
            for out in outputs:
                text += out.tokens
                drafts += out.num_drafts
                counts_of = {source: count for source, *count in out.sources}
                mine = counts_of.get(_core.DRAFT_SOURCES.index("prediction"), (0, 0))
                predicted += mine[0]
                accepted += mine[1]
        assert text == function.reference([1, 2, 3, 1, 2], 200)
        assert (predicted, accepted) == (DRAFTS if prediction else 0, 0)
        counts.append((steps, drafts - predicted))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("method", ["none", "suffix"])
def test_a_true_prediction_is_read_in_few_steps(method: str) -> None:
    function = HashFunction(vocab=30, surprise=2, alphabet=4, seed=3)
    text = function.reference([1, 2, 3], 170)
    engine = hash_engine(function, max_batch_size=1, max_seq_len=300, **METHODS[method])
    [got] = engine.run([Job([1, 2, 3], 170, {"prediction": text})])
    assert got.tokens == text and got.forwards <= 13


@pytest.mark.parametrize("method", METHODS)
def test_a_text_that_fills_its_pages(method: str) -> None:
    """Pages for the text and the method's own drafts, no more: predictions need none besides."""
    function = HashFunction(vocab=30, surprise=8, alphabet=4, seed=3)
    drafts = {"lookahead": 15, "ngram": 4, "suffix": 24, "proposed": 127}.get(method, 0)
    pages = -(-(96 - 1 + drafts) // 4)
    engine = hash_engine(
        function, max_batch_size=1, max_seq_len=96, page_size=4, num_pages=pages, **METHODS[method]
    )
    text = function.reference([1, 2, 3], 93)
    for prediction in (text, text[:50], [*text[:70], 7, *text[71:]]):
        for adaptive in (True, False):
            options = {"prediction": prediction, "adaptive": adaptive}
            [got] = engine.run([Job([1, 2, 3], 93, options)])
            assert got.tokens == text and got.num_accepted > 40


LAWS = [Law(1.0), Law(0.7, top_k=3), Law(1.5, top_p=0.9, min_p=0.1)]


def likely() -> list[int]:
    """The greedy text behind the prompt."""
    text = list(PROMPT)
    for _ in range(TOKENS):
        text.append(int(table()[text[-2], text[-1]].argmax()))
    return text[len(PROMPT) :]


def biased(row: np.ndarray, history: Any) -> np.ndarray:
    row = row.copy()
    row[5] += 0.7
    return row


def check_law(law: Law, acceptance: str, draws: int, processors: dict[str, Any]) -> None:
    options = {
        "acceptance": acceptance, "prediction": likely(), **law.options(), **processors,
    }  # fmt: skip
    counts, stats = sample_joint(table(), PROMPT, TOKENS, draws, options, engine={}, stream=5)
    assert stats["num_accepted_tokens"] > draws / 100
    process = biased if processors else None
    assert_law(counts, joint_law(table(), PROMPT, TOKENS, law, process))


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize(("acceptance", "draws"), [("exact_match", 5_000), ("rejection", 20_000)])
@pytest.mark.parametrize("processors", [{}, {"logit_bias": {5: 0.7}}], ids=["raw", "biased"])
def test_samples_have_the_targets_law(
    processors: dict[str, Any], acceptance: str, draws: int, law: Law
) -> None:
    check_law(law, acceptance, draws, processors)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("acceptance", ["exact_match", "rejection"])
def test_samples_have_the_targets_law_in_a_million(acceptance: str, law: Law) -> None:
    check_law(law, acceptance, 1_000_000, {})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prediction": [20]}, r"prediction holds token id 20: this model's ids are 0\.\.19"),
        ({"prediction": [1] * 41}, "the prediction has 41 tokens, max_seq_len is 40"),
        ({"prediction": [1], "external_drafts": [2]}, "a prediction and external drafts"),
    ],
)
def test_refused(options: dict[str, Any], match: str) -> None:
    engine = hash_engine(HashFunction(vocab=20), max_batch_size=1, max_seq_len=40)
    with pytest.raises(ValueError, match=match):
        engine.ex.submit([1, 2], max_tokens=4, **options)
    assert engine.ex.num_unfinished == 0
