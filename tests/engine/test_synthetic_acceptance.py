"""Synthetic acceptance: the rates asked for, with every method, and outputs that say so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from driver import Engine, hash_engine
from medusa_models import VOCAB, save_heads, save_target

from hash_target import HashFunction
from model.redrafter_cases import random_drafter
from reference.acceptance_reference import uniform
from specdec_ext import (
    LLM,
    ConfigError,
    DraftTargetDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    ReDrafterDecodingConfig,
    RequestError,
    SamplingParams,
    UserDrafterConfig,
)
from specdec_ext.cli import main
from specdec_ext.errors import SyntheticAcceptanceWarning
from tiny_models import save_llama, save_tiny

SYNTHETIC = 6  # the purpose of the random numbers
FUNCTION = HashFunction(vocab=24, surprise=5)
METHODS: dict[str, dict[str, Any]] = {
    "lookahead": {"method": "lookahead", "lookahead": (4, 5, 4)},
    "ngram": {"method": "ngram", "ngram": {"max_draft_len": 5}},
    "proposed": {"method": "proposed"},
}
TREE_TOKENS, TREE_PARENTS = [1, 2, 3, 4, 5, 6, 7], [-1, -1, 0, 1, 2, 3, 5]
# Drafts behind the last kept one, when 0, 1, ... of its deepest path (2, 4, 6, 7) are kept.
TREE_CHILDREN: list[set[int]] = [{1, 2}, {4}, {6}, {7}, set()]


def wanted_length(rates: Sequence[float], seed: int, position: int) -> int:
    u = uniform(seed, position, SYNTHETIC)
    return sum(u < rate for rate in rates)


def propose(engine: Engine, rid: int, method: str) -> None:
    if method == "proposed" and engine.ex.decoding(rid):
        engine.ex.propose(rid, TREE_TOKENS, TREE_PARENTS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_every_step_keeps_what_the_rates_say(
    method: str, temperature: float, adaptive: bool
) -> None:
    """Length by length, by an independent Philox; and what follows is the model's own choice."""
    rates = [0.8, 0.6, 0.25, 0.1]
    engine = hash_engine(
        FUNCTION, page_size=4, adaptive=adaptive, synthetic_acceptance_rates=rates,
        **METHODS[method],
    )  # fmt: skip
    prompts = [[1, 2, 3, 1, 2, 3], [5], [(7 * i) % 24 for i in range(30)]]
    rids = [
        engine.ex.submit(p, max_tokens=200, seed=100 + i, temperature=temperature)
        for i, p in enumerate(prompts)
    ]
    histories = {rid: list(p) for rid, p in zip(rids, prompts, strict=True)}
    ends = {rid: len(p) + 200 for rid, p in zip(rids, prompts, strict=True)}
    kept = own = 0
    while engine.ex.num_unfinished:
        for rid in rids:
            propose(engine, rid, method)
        for out in engine.step() or []:
            history = histories[out.request_id]
            if out.num_drafts > 0:
                seed = 100 + rids.index(out.request_id)
                length = min(wanted_length(rates, seed, len(history)), out.max_path)
                assert out.num_accepted == length
                assert len(out.tokens) == length + 1
                kept += length
                if method == "proposed" and out.max_path == 4:
                    assert out.tokens[:-1] == [2, 4, 6, 7][:length]
                    assert out.tokens[-1] not in TREE_CHILDREN[length], "it looks like a draft"
            else:
                assert out.num_accepted == 0
            history += out.tokens[:-1]
            if temperature == 0.0 and out.tokens:
                choice = FUNCTION.reference(history, 1)[0]
                own += choice == out.tokens[-1]
                # Another token only in place of one more draft, the next that is none.
                assert (out.tokens[-1] - choice) % 24 <= out.num_drafts
            history += out.tokens[-1:]
    engine.assert_idle()
    assert all(len(histories[rid]) == ends[rid] for rid in rids)
    assert kept > 100
    assert own > 50 or temperature > 0


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_keeps_the_same_lengths_in_a_crowd(method: str) -> None:
    def texts(prompts: list[list[int]], batch: int) -> list[list[int]]:
        engine = hash_engine(
            FUNCTION, max_batch_size=batch, adaptive=False, synthetic_acceptance_rates=[0.7, 0.3],
            **METHODS[method],
        )  # fmt: skip
        rids = [engine.ex.submit(p, max_tokens=50, seed=9) for p in prompts]
        result: dict[int, list[int]] = {rid: [] for rid in rids}
        while engine.ex.num_unfinished:
            for rid in rids:
                propose(engine, rid, method)
            for out in engine.step() or []:
                result[out.request_id] += out.tokens
        return [result[rid] for rid in rids]

    prompts = [[1, 2, 1, 2, 1], [3, 4, 5], [6] * 9]
    crowd = texts(prompts, 3)
    assert crowd == [texts([prompt], 1)[0] for prompt in prompts]


def test_requests_without_speculation_and_without_rates_keep_the_models_text() -> None:
    prompt = [1, 2, 3, 1, 2, 3]
    plain = FUNCTION.reference(prompt, 60)
    engine = hash_engine(
        FUNCTION, synthetic_acceptance_rates=[1.0, 1.0], **METHODS["ngram"], adaptive=False
    )
    rid = engine.ex.submit(prompt, max_tokens=60, speculative=False, external_drafts=[9, 9])
    tokens = []
    while engine.ex.num_unfinished:
        for out in engine.step() or []:
            assert out.request_id == rid
            tokens += out.tokens
    assert tokens == plain


@pytest.mark.parametrize("rates", [[0.5, 0.6], [1.1], [-0.1], [float("nan")], [0.1] * 128])
def test_the_executor_refuses_rates_that_are_none(rates: list[float]) -> None:
    with pytest.raises(ValueError, match="synthetic_acceptance_rates"):
        hash_engine(FUNCTION, synthetic_acceptance_rates=rates, **METHODS["ngram"])


# -- through LLM ----------------------------------------------------------------------------------


class Counter:
    """Drafts that have nothing to do with the model."""

    def propose(self, history: list[int], budget: int) -> Any:
        return [(history[-1] + i) % VOCAB for i in range(min(budget, 6))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def configurations(target: Path, folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "lookahead": LookaheadDecodingConfig(4, 5, 4, **options),
        "ngram": NGramDecodingConfig(8, 2, **options),
        "draft_target": DraftTargetDecodingConfig(
            save_llama(folder / "draft", 4, VOCAB, num_hidden_layers=1), 5, **options
        ),
        "tree": DraftTargetDecodingConfig(
            save_llama(folder / "draft2", 4, VOCAB, num_hidden_layers=1), 9, top_k=3, **options
        ),
        "medusa": MedusaDecodingConfig(save_heads(folder / "heads"), "mc_sim_7b_63", **options),
        "redrafter": ReDrafterDecodingConfig(
            random_drafter(folder / "redrafter", "apple", 32, VOCAB), 3, 4, **options
        ),
        "user": UserDrafterConfig(Counter(), 6, **options),
    }


GREEDY = SamplingParams(max_tokens=300, ignore_eos=True)
OFF = dataclasses.replace(GREEDY, speculative=False)
LONG = {"max_seq_len": 400}
NAMES = ["lookahead", "ngram", "draft_target", "tree", "medusa", "redrafter", "user"]


def warns() -> Any:
    return pytest.warns(SyntheticAcceptanceWarning, match="the text is NOT the model's")


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_is_what_was_asked_for(target: Path, tmp_path: Path, name: str) -> None:
    """Within 4.75 standard deviations (p = 1e-6 on either side), and marked everywhere."""
    wanted = 2.3 if name == "tree" else 3.3  # what every tree of nine nodes is deep enough for
    needed = math.ceil(wanted - 1)
    options = {"adaptive": False, "synthetic_acceptance_length": wanted}
    config = configurations(target, tmp_path, **options)[name]
    rates = pytest.approx([1.0] * (needed - 1) + [0.3])
    assert list(config.synthetic_rates) == rates
    params = [dataclasses.replace(GREEDY, seed=i) for i in range(6)]
    prompts = [[1, 2, 3, 1, 2, 3, i] for i in range(6)]
    with warns(), LLM(target, speculative_config=config, scheduler_config=LONG) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        plain = llm.generate(
            prompts, dataclasses.replace(GREEDY, speculative=False), use_tqdm=False
        )
        metrics = llm.get_metrics()
        with pytest.raises(RequestError, match="keeps drafts at synthetic rates"):
            llm.generate([[1]], SamplingParams(temperature=1.0, acceptance="rejection"))
    steps = sum(o.metrics["speculative_decoding"]["num_spec_steps"] for o in outputs)
    accepted = sum(o.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for o in outputs)
    # A chain of prompt lookup can be too short, and the last steps have no room.
    short = sum(
        sum(1 for n in o.metrics["speculative_decoding"]["per_step_drafted"] if n < needed)
        for o in outputs
    )
    assert steps > 200 and short < 0.15 * steps
    deviation = math.sqrt(0.3 * 0.7 / steps)
    assert 1 + accepted / steps < wanted + 4.75 * deviation
    assert 1 + (accepted + needed * short) / steps > wanted - 4.75 * deviation
    for output in outputs:
        assert output.metrics["lossless"] is False
        assert output.metrics["acceptance"] == "synthetic (not the model's text)"
        said = output.to_json_dict()["synthetic_acceptance"]
        assert said["mean_acceptance_length"] == pytest.approx(wanted)
        assert "not the model's" in said["note"]
    assert metrics["synthetic_acceptance"]["rates"] == rates
    assert [o.outputs[0].token_ids for o in outputs] != [o.outputs[0].token_ids for o in plain]
    for output in plain:
        assert output.metrics["lossless"] is True
        assert "synthetic_acceptance" not in output.to_json_dict()
    with LLM(target, speculative_config=None, scheduler_config=LONG) as llm:
        own = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.get_metrics()["synthetic_acceptance"] is None
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in own]


def test_a_lossy_default_beside_synthetic_rates_is_refused(tmp_path: Path) -> None:
    heads = save_heads(tmp_path / "heads")
    for rule in ("typical", "rejection"):
        with pytest.raises(ConfigError, match="with synthetic acceptance"):
            MedusaDecodingConfig(heads, acceptance=rule, synthetic_acceptance_length=2.0)
    # The tree is cut to the heads, the options stay.
    config = MedusaDecodingConfig(heads, max_concurrency=3).with_heads(2, 10)
    assert config.max_concurrency == 3 and config.num_medusa_heads == 2


def test_the_command_marks_it(tmp_path: Path, capsys: Any) -> None:
    import json

    folder = str(save_tiny(tmp_path / "m"))
    argv = ["generate", "--model", folder, "--input_text", "abcabc", "--max_output_len", "60",
            "--json", "--stats", "--ignore_eos", "--prompt_lookup_config", "[4,2]",
            "--no_adaptive", "--synthetic_acceptance_rates", "[1, 0.5]"]  # fmt: skip
    capsys.readouterr()
    assert main(argv) == 0
    captured = capsys.readouterr()
    line = json.loads(captured.out)
    assert line["synthetic_acceptance"]["rates"] == [1.0, 0.5]
    assert line["metrics"]["lossless"] is False
    assert "acceptance: synthetic (not the model's text)" in captured.err
    assert "the text is NOT the model's" in captured.err
    assert main([*argv, "--verify"]) == 2
    assert "--verify with synthetic acceptance" in capsys.readouterr().err
