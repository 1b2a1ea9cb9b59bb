"""Drafters in Python: what they see, and that nothing they do changes the output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import LLM, ConfigError, RequestError, SamplingParams, UserDrafterConfig
from tiny_models import save_llama

PROMPTS = [[5, 9, 2, 9, 2, 9], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], list(range(40, 10, -1))]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
VOCAB = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tiny"), 11, VOCAB, max_position_embeddings=256)


def make_llm(folder: Path, config: Any = None, **kwargs: Any) -> LLM:
    return LLM(
        folder,
        speculative_config=config,
        scheduler_config={"max_batch_size": 3, "max_seq_len": 200},
        **kwargs,
    )


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    with make_llm(folder) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outputs]


class Oracle:
    """Knows what the target will say."""

    def __init__(self, plain: list[list[int]]) -> None:
        self.texts = [p + o for p, o in zip(PROMPTS, plain, strict=True)]
        self.ended: list[list[int]] = []

    def rest(self, history: list[int]) -> list[int]:
        (text,) = (t for t in self.texts if t[: len(history)] == history)
        return text[len(history) :]

    def propose(self, history: list[int], budget: int) -> Any:
        return self.rest(history)[:budget]

    def end(self, history: list[int]) -> None:
        self.ended.append(history)


class Tree(Oracle):
    """The right path behind wrong siblings."""

    def propose(self, history: list[int], budget: int) -> Any:
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in self.rest(history)[: budget // 2]:
            tokens += [(token + 1) % VOCAB, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return tokens, parents


class Raises(Oracle):
    def propose(self, history: list[int], budget: int) -> Any:
        raise RuntimeError("broken on purpose")


def answers(value: Any) -> type[Oracle]:
    class Answers(Oracle):
        def propose(self, history: list[int], budget: int) -> Any:
            return value

    return Answers


GARBAGE: dict[str, type[Oracle]] = {
    "raises": Raises,
    "no list": answers(17),
    "text": answers("abc"),
    "ids too large": answers([VOCAB]),
    "negative ids": answers([-1]),
    "a cycle": answers(([1, 2], [1, 0])),
    "a parent behind its child": answers(([1, 2], [1, -1])),
    "fewer parents than tokens": answers(([1, 2, 3], [-1])),
    "more than the budget": answers(list(range(60)) * 20),
    "infinite": answers([float("inf")]),
}


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("drafter", [Oracle, Tree])
def test_a_perfect_drafter_is_accepted_in_full(
    folder: Path, plain: list[list[int]], drafter: Callable[[Any], Oracle], impl: str
) -> None:
    mine = drafter(plain)
    config = UserDrafterConfig(drafter=mine, max_draft_len=8)
    with make_llm(folder, config, model_impl=impl) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        metrics = llm.get_metrics()
    assert [list(out.outputs[0].token_ids) for out in outputs] == plain
    per_step = 8 if drafter is Oracle else 4
    steps = -(-39 // (per_step + 1))  # the first token comes from the prompt's own pass
    accepted = metrics["speculative_decoding"]["num_accepted_draft_tokens"]
    assert accepted == len(PROMPTS) * (39 - steps)
    assert metrics["drafter"]["failures"] == metrics["drafter"]["refused_proposals"] == 0
    assert [out.metrics["num_forward_passes"] for out in outputs] == [1 + steps] * len(PROMPTS)


@pytest.mark.parametrize("name", GARBAGE)
def test_a_misbehaving_drafter_changes_nothing(
    folder: Path, plain: list[list[int]], name: str
) -> None:
    config = UserDrafterConfig(drafter=GARBAGE[name](plain), max_draft_len=8)
    with make_llm(folder, config) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [list(out.outputs[0].token_ids) for out in outputs] == plain
    assert all(out.finished for out in outputs)


def test_requests_with_and_without_drafts_share_steps(folder: Path, plain: list[list[int]]) -> None:
    mine = Oracle(plain)
    params = [
        PARAMS,
        SamplingParams(max_tokens=40, ignore_eos=True, speculative=False),
        SamplingParams(max_tokens=40, ignore_eos=True, max_draft_len=2),
        SamplingParams(max_tokens=40, ignore_eos=True, max_draft_len=0),
    ]
    with make_llm(folder, UserDrafterConfig(drafter=mine, max_draft_len=8)) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        with pytest.raises(RequestError, match="max_draft_len = 9 is greater than the engine's 8"):
            llm.generate([1], SamplingParams(max_draft_len=9), use_tqdm=False)
    assert [list(out.outputs[0].token_ids) for out in outputs] == plain
    assert [out.metrics["speculative_decoding"]["num_draft_tokens"] > 0 for out in outputs] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected an object with propose"),
        ({"drafter": 3}, "expected an object with propose"),
        ({"max_draft_len": 0}, "max_draft_len = 0: out of range"),
        ({"max_draft_len": 128}, "max_draft_len = 128: out of range"),
        ({"adaptive": 1}, "adaptive = 1: expected true or false"),
    ],
)
def test_a_bad_configuration_is_refused(arguments: dict[str, Any], message: str) -> None:
    if arguments and "drafter" not in arguments:
        arguments = {"drafter": Oracle([[] for _ in PROMPTS]), **arguments}
    with pytest.raises(ConfigError, match=message):
        UserDrafterConfig(**arguments)
