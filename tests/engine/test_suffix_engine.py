"""Suffix decoding in the executor: the text is plain decoding's, the law the target's, rows pay."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from default_model_cases import Decoder
from driver import STEP_COST, Delivery, Engine, Job, hash_engine
from stream_driver import stream_hash_engine
from table_target import assert_law, joint_law, sample_joint
from test_sampling_law import PROMPT, TOKENS, table

from hash_target import HashFunction
from reference import suffix_reference as reference
from reference.sampling_reference import Law

SUFFIX: dict[str, Any] = {
    "method": "suffix", "suffix": {"max_draft_len": 10, "min_token_prob": 0.1},
}  # fmt: skip
WIDE: dict[str, Any] = {
    "method": "suffix", "suffix": {"max_draft_len": 40, "min_token_prob": 0.0},
}  # fmt: skip
FREE = ([1, 128], [1.0, 1.0])
DEAR = ([1, 128], [1.0, 60.0])


def jobs_of(rng: random.Random, function: HashFunction, count: int, room: int) -> list[Job]:
    jobs = []
    for _ in range(count):
        prompt = [rng.randrange(function.vocab) for _ in range(rng.choice([1, 2, 9, 30, 70]))]
        options: dict[str, Any] = {"seed": rng.randrange(2**60)}
        if rng.random() < 0.2:
            options["speculative"] = False
        elif rng.random() < 0.4:
            options["max_draft_len"] = rng.choice([0, 1, 3])
        if rng.random() < 0.3:
            options["stop_token_ids"] = [rng.randrange(function.vocab)]
        if rng.random() < 0.3:
            options["adaptive"] = rng.random() < 0.5
        max_tokens = rng.choice([1, 2, 17, 60, room - len(prompt)])
        cancel = rng.randrange(30) if rng.random() < 0.15 else None
        jobs.append(Job(prompt, max_tokens, options, rng.randrange(15), cancel))
    return jobs


def check(function: HashFunction, job: Job, got: Delivery) -> int:
    """Against the definition; returns the tokens compared."""
    text = function.reference(job.prompt, job.max_tokens)
    stops = job.options.get("stop_token_ids", [])
    ends = [i + 1 for i, token in enumerate(text) if token in stops]
    text = text[: ends[0]] if ends else text
    assert got.tokens == (text[: len(got.tokens)] if got.cancelled else text)
    assert got.cancelled or got.finish_reason == ("stop" if ends else "length")
    return len(got.tokens)


@pytest.mark.parametrize("options", [SUFFIX, WIDE], ids=["likely", "all"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_schedules_ahead(depth: int, options: dict[str, Any]) -> None:
    tokens = accepted = 0
    for seed in range(10):
        rng = random.Random(seed)
        function = HashFunction(vocab=30, surprise=rng.choice([1, 8, 30]), alphabet=4, seed=seed)
        page = rng.choice([1, 4, 16])
        engine: Any = stream_hash_engine(
            function,
            page_size=page,
            num_pages=-(-(200 + 90) // page) + rng.randrange(600) // page,
            max_batch_size=rng.choice([1, 3, 5]),
            max_seq_len=200,
            max_num_tokens=rng.choice([5, 40, 300]),
            depth=depth,
            stub=None if seed % 5 == 0 else seed,
            pads_rows=seed % 2 == 0,
            **options,
        )
        if seed % 3:
            engine.executor.set_step_cost(*rng.choice([FREE, STEP_COST, DEAR]))
        jobs = jobs_of(rng, function, 6, 200)
        for job, got in zip(jobs, engine.run(jobs), strict=True):
            tokens += check(function, job, got)
            accepted += got.num_accepted
    assert tokens > 1000 and accepted > 100


@pytest.mark.parametrize("reuse", [False, True])
def test_random_schedules_on_the_host(reuse: bool) -> None:
    tokens = accepted = 0
    for seed in range(20):
        rng = random.Random(seed)
        function = HashFunction(vocab=30, surprise=rng.choice([1, 8, 30]), alphabet=4, seed=seed)
        page = rng.choice([1, 4, 16])
        engine = hash_engine(
            function,
            page_size=page,
            num_pages=-(-(200 + 128) // page) + rng.randrange(600) // page,
            max_batch_size=rng.choice([1, 3, 5]),
            max_seq_len=200,
            max_num_tokens=rng.choice([12, 40, 300]),
            enable_block_reuse=reuse,
            **rng.choice([SUFFIX, WIDE]),
        )
        jobs = jobs_of(rng, function, 8, 200)
        for job, got in zip(jobs, engine.run(jobs), strict=True):
            tokens += check(function, job, got)
            accepted += got.num_accepted
    assert tokens > 1000 and accepted > 200


def test_drafts_are_those_of_the_definition() -> None:
    """Fixed lengths: each step's tree is the brute-force tree of the text so far."""
    function = HashFunction(vocab=20, surprise=6, alphabet=3, seed=2)
    engine: Engine = hash_engine(
        function, max_batch_size=1, max_seq_len=300, adaptive=False, **SUFFIX
    )
    prompt = [1, 2, 3, 1, 2]
    text = prompt + function.reference(prompt, 200)
    known: list[int] = list(prompt)
    trees = 0

    def compare(plan: Any) -> None:
        nonlocal trees
        if int(plan.kv_len[0]) == 0:
            return
        nodes = reference.draft(known, 10, min_prob=6553, max_depth=205 - len(known) - 1)
        assert plan.tokens.tolist() == [known[-1], *(node.token for node in nodes)]
        assert plan.parents.tolist() == [-1, *(node.parent + 1 for node in nodes)]
        trees += any(node.parent != i - 1 for i, node in enumerate(nodes))

    engine.ex.submit(prompt, max_tokens=200)
    while (outputs := engine.step(compare)) is not None:
        known += [token for out in outputs for token in out.tokens]
    assert known == text
    assert trees > 5


def drafts_of(
    cost: Any, *, surprise: int, ahead: int | None = None, **options: Any
) -> tuple[int, int]:
    """(drafts verified, steps) of one text; surprise 1: no draft is ever right."""
    function = HashFunction(vocab=30, surprise=surprise, alphabet=4, seed=3)
    sizes = {"max_batch_size": 2, "max_seq_len": 300, "max_num_tokens": 300}
    if ahead is None:
        engine: Any = hash_engine(function, **sizes, **WIDE, **options)
        engine.ex.set_step_cost(*cost)
    else:
        engine = stream_hash_engine(function, depth=ahead, stub=5, **sizes, **WIDE, **options)
        engine.executor.set_step_cost(*cost)
    [got] = engine.run([Job([1, 2, 3, 1, 2], 250, {"seed": 7})])
    assert got.tokens == function.reference([1, 2, 3, 1, 2], 250)
    return got.num_drafts, got.forwards


@pytest.mark.parametrize("ahead", [None, 0, 2])
def test_free_rows_are_used_and_dear_ones_are_not(ahead: int | None) -> None:
    _, least = drafts_of(FREE, surprise=8, ahead=ahead, adaptive=False)
    drafts, steps = drafts_of(FREE, surprise=8, ahead=ahead)
    assert drafts > 0 and steps <= 1.15 * least
    always, _ = drafts_of(DEAR, surprise=1, ahead=ahead, adaptive=False)
    drafts, _ = drafts_of(DEAR, surprise=1, ahead=ahead)
    assert drafts < 0.1 * always


@pytest.mark.parametrize("adaptive", [True, False])
def test_chances_that_are_wrong_are_found_out(adaptive: bool) -> None:
    """Rows cost a little, and what followed before does not follow again: soon nearly no draft."""
    function = HashFunction(vocab=30, surprise=1, alphabet=2, seed=3)
    engine = hash_engine(function, max_batch_size=1, max_seq_len=1000, adaptive=adaptive, **SUFFIX)
    engine.ex.set_step_cost([1, 128], [1.0, 8.0])
    rng = random.Random(4)
    noise = [rng.randrange(30) for _ in range(1000)]
    forward = engine.model.forward

    def never_again(plan: Any) -> Any:
        ids = forward(plan)
        for i, row in enumerate(plan.logit_rows.tolist()):
            ids[i] = noise[int(plan.positions[row])]
        return ids

    engine.model.forward = never_again
    engine.ex.submit([1, 2, 3], max_tokens=900)
    drafts: list[int] = []
    while (outputs := engine.step()) is not None:
        drafts += [out.num_drafts for out in outputs]
    assert (sum(drafts) < 0.3 * len(drafts)) == adaptive


LAWS = [Law(1.0), Law(0.5), Law(0.7, top_k=3), Law(1.5, top_p=0.9, min_p=0.1)]


def check_law(law: Law, acceptance: str, draws: int) -> None:
    options = {"acceptance": acceptance, **law.options()}
    counts, stats = sample_joint(table(), PROMPT, TOKENS, draws, options, engine=WIDE, stream=3)
    assert stats["num_accepted_tokens"] > draws / 100
    assert_law(counts, joint_law(table(), PROMPT, TOKENS, law))


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize(("acceptance", "draws"), [("exact_match", 5_000), ("rejection", 20_000)])
def test_samples_have_the_targets_law(acceptance: str, draws: int, law: Law) -> None:
    check_law(law, acceptance, draws)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("acceptance", ["exact_match", "rejection"])
def test_samples_have_the_targets_law_in_a_million(acceptance: str, law: Law) -> None:
    check_law(law, acceptance, 1_000_000)


def test_memory_returns() -> None:
    """A thousand texts one after another, two at a time: nothing grows."""
    function = HashFunction(vocab=20, seed=1)
    engine = hash_engine(function, max_batch_size=2, max_seq_len=80, max_num_tokens=80, **SUFFIX)
    sizes = set()
    for at in range(0, 1000, 2):
        jobs = [Job([at % 20, (at + i) % 20, 3], 12) for i in range(2)]
        for job, got in zip(jobs, engine.run(jobs), strict=True):
            check(function, job, got)
        sizes.add(engine.ex.stats()["pool_bytes"])
    assert sizes == {0}


@pytest.mark.parametrize(
    ("suffix", "match"),
    [
        ({"max_draft_len": 0}, r"suffix\.max_draft_len = 0: give 1\.\.127"),
        ({"max_draft_len": 128}, r"suffix\.max_draft_len = 128: give 0\.\.127"),
        ({"max_tree_depth": 65}, r"suffix\.max_tree_depth = 65: give 1\.\.64"),
        ({"max_spec_factor": -1.0}, r"suffix\['max_spec_factor'\] = -1: give 0\.\.128"),
        ({"min_token_prob": 1.5}, r"suffix\['min_token_prob'\] = 1\.5: give 0\.\.1"),
        ({"depth": 3}, r"suffix\['depth'\]: unknown; the fields are max_draft_len"),
    ],
)
def test_refused(suffix: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        hash_engine(HashFunction(vocab=20), method="suffix", suffix=suffix)


MESSAGES = [
    "Repeat this list three times, one item per line: apple, pear, plum, cherry.",
    "Write a Python function that returns the sum of the squares of a list, and its docstring.",
    "The ferry leaves Harwich at nine in the evening and arrives in Hook of Holland at eight in "
    "the morning. It carries cars, lorries and foot passengers. Summarize the text, then quote its "
    "first sentence.",
]


@pytest.mark.default_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_models_text_is_plain_decodings(dtype: str, default_model_path: Path) -> None:
    decoder = Decoder(default_model_path, dtype)
    prompts = [decoder.encode(message) for message in MESSAGES]
    expected = decoder.plain_texts(prompts, 64)
    for batch, page, adaptive in ((1, 16, True), (3, 2, False)):
        texts, accepted = decoder.decode(prompts, 64, batch, page, adaptive=adaptive, **SUFFIX)
        assert texts == expected
        assert accepted > 20
