"""Benchmarks without a model: statistics, prompts, tables, refusals of the command."""

from __future__ import annotations

import io
import random
import re
import statistics
from typing import Any

import numpy as np
import pytest

from specdec_ext import LookaheadDecodingConfig, NGramDecodingConfig, SamplingParams
from specdec_ext.bench.machine import about_machine, clocks, described
from specdec_ext.bench.measure import (
    Call,
    Comparison,
    compare,
    percentile,
    plain_params,
    random_prompts,
    series,
)
from specdec_ext.bench.tables import heat_map, shade
from specdec_ext.cli import main
from specdec_ext.text.metrics import SpecCounter


def test_percentiles_are_numpys() -> None:
    rng = random.Random(1)
    for count in (1, 2, 5, 17):
        values = [rng.random() for _ in range(count)]
        for percent in (0, 10, 25, 50, 75, 90, 99, 100):
            assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_random_prompts_follow_from_the_seed() -> None:
    prompts = random_prompts(50, 4, 30, 7)
    assert [len(p) for p in prompts] == [30] * 4
    assert {token for p in prompts for token in p} <= set(range(50))
    assert prompts == random_prompts(50, 4, 30, 7) != random_prompts(50, 4, 30, 8)
    assert len({tuple(p) for p in prompts}) == 4


def test_plain_parameters_ask_for_no_drafts_and_change_nothing_else() -> None:
    params = SamplingParams(
        max_tokens=7, temperature=0.5, seed=3, max_draft_len=4, adaptive=True, speculative=True
    )
    plain = plain_params(params)
    assert plain == SamplingParams(max_tokens=7, temperature=0.5, seed=3, speculative=False)


def make_call(seconds: float, tokens: list[list[int]], **fields: Any) -> Call:
    counter = SpecCounter(4, keep_steps=False)
    for ids in tokens:
        counter.count(drafts=4, accepted=2, rows=5, tokens=len(ids))
    return Call(seconds, 10, tokens, [1.0], [2.0], counter, 3, 0.1, 0.02, 0.03, **fields)


def test_ratios_are_taken_within_rounds() -> None:
    calls = [make_call(s, [[1, 2, 3]]) for s in (1.0, 2.0, 10.0)]
    plain = [make_call(s, [[1, 2, 3]]) for s in (2.0, 3.0, 40.0)]
    result = Comparison(calls, plain)
    assert result.speedups == [2.0, 1.5, 4.0]
    report = result.to_dict()
    assert report["speedup"] == 2.0
    assert report["speedup_range"] == [1.5, 4.0]
    assert report["identical_to_plain"] is True
    assert report["speculative_decoding"]["mean_acceptance_length"] == 3.0
    figures = series(calls)
    assert figures["median_latency"] == 2.0
    assert figures["avg_latency"] == pytest.approx(13 / 3)
    assert figures["output_tokens_per_second"] == statistics.median([3.0, 1.5, 0.3])
    assert set(figures["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert figures["tokens_per_forward_pass"] == 3.0
    assert Comparison([*calls, make_call(1.0, [[1, 2, 4]])], plain).identical is False
    assert Comparison(calls, []).to_dict()["speedup"] is None
    assert Comparison(calls, []).identical is None
    failed = Comparison([make_call(1.0, [[1]], errors=["x"])], [make_call(1.0, [[1]])])
    assert failed.to_dict()["failed_requests"] == 1


class FakeLLM:
    """Notes which kind of call came when."""

    def __init__(self, config: Any) -> None:
        self.speculative_config = config
        self.calls: list[str] = []
        self.resets = 0

    def reset_prefix_cache(self) -> int:
        self.resets += 1
        return 0

    def get_metrics(self) -> dict[str, Any]:
        return {
            "num_forward_passes": 0, "drafter": None, "time": {"forward_s": 0.0, "step_s": 0.0},
        }  # fmt: skip

    def generate(self, prompts: Any, params: SamplingParams, use_tqdm: bool) -> list[Any]:
        self.calls.append("plain" if params.speculative_config is False else "drafts")
        return []


def test_kinds_take_turns_and_the_order_turns_round() -> None:
    llm = FakeLLM(NGramDecodingConfig())
    seen: list[Any] = []
    result = compare(
        llm, [[1]], SamplingParams(), num_iters=3, num_iters_warmup=1,
        on_call=lambda *args: seen.append(args),
    )  # fmt: skip
    assert llm.calls == [
        "drafts", "plain", "drafts", "plain", "plain", "drafts", "drafts", "plain",
    ]  # fmt: skip
    assert (len(result.calls), len(result.plain)) == (3, 3)
    assert llm.resets == 8
    assert seen == [("warm-up", 1, 1), ("round", 1, 3), ("round", 2, 3), ("round", 3, 3)]
    plain = FakeLLM(None)
    result = compare(plain, [[1]], SamplingParams(), num_iters=2, num_iters_warmup=0)
    assert (len(result.calls), result.plain, plain.calls) == (2, [], ["drafts", "drafts"])


def test_the_machine_is_described_without_its_paths() -> None:
    about = about_machine("cpu")
    for key in ("version", "device", "cpu", "cpus", "threads", "torch", "python", "date"):
        assert about[key]
    assert about["command"].startswith("specdec")
    assert clocks("cpu")["load_average"]
    assert "gpu" not in clocks("cpu")
    assert clocks("cuda:7")["gpu"] is None or isinstance(clocks("cuda:7")["gpu"], dict)
    config = NGramDecodingConfig(8, draft_len_schedule={4: 8})
    assert described(config)["draft_len_schedule"] == {"4": 8}
    assert described(LookaheadDecodingConfig(synthetic_acceptance_rates=[0.5]))[
        "synthetic_acceptance_rates"
    ] == [0.5]


def test_heat_maps_mark_the_best_cell() -> None:
    stream = io.StringIO()
    values = {(1, "a"): 0.5, (1, "b"): 1.25, (2, "a"): 2.0}
    heat_map("speed-up", "batch", [1, 2], "draft", ["a", "b"], values, stream)
    text = stream.getvalue()
    assert "*2.00" in text and " 1.25" in text and "\x1b" not in text
    assert text.count("*2.00") == text.count("*") - 1 == 1
    assert re.search(r"2│\s*\*2\.00\s*│\s*\.", text), text
    assert shade(0.0, 0.0, 1.0) != shade(1.0, 0.0, 1.0)
    assert shade(1.0, 1.0, 1.0) == shade(0.0, 0.0, 1.0)


NGRAM = ["--prompt_lookup_config", "[8,2]"]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["latency", "--num_iters", "4"], 4, "--num-iters = 4: out of range.*says little"),
        (["latency", "--num_iters_warmup", "-1"], 4, "--num-iters-warmup = -1"),
        (["latency", "--batch_size", "0"], 4, "--batch-size = 0"),
        (["latency", "--num_prompts", "3"], 2, "--num-prompts belongs to 'bench throughput'"),
        (["throughput", "--batch_size", "3"], 2, "--batch-size belongs to 'bench latency'"),
        (["latency", "--draft_lens", "3"], 2, "--draft-lens belongs to 'bench sweep'"),
        (["latency", "--input_len", "0"], 4, "--input-len = 0"),
        (["latency", "--input_len", "4", "--input_file", "x"], 2, "exclude each other"),
        (["latency", "--input_file", "/no/such/file"], 2, "cannot be read"),
        (["latency", "--output_len", "0"], 2, "max_tokens = 0"),
        (["latency", "--output_json", "/no/such/folder/x.json"], 2, "no such folder"),
        (["latency", *NGRAM, "--prompt_lookup_style", "v1"], 2, "use v2"),
        (["sweep"], 2, "needs a method"),
        (["sweep", *NGRAM, "--triples", "[2,2,2]"], 2, "--triples needs --lookahead-config"),
        (["sweep", *NGRAM, "--draft_lens", "9"], 4, r"--draft-lens\[0\] = 9.*max_draft_len = 8"),
        (["sweep", *NGRAM, "--batch_sizes", "2", "0"], 4, r"--batch-sizes\[1\] = 0"),
        (["sweep", "--lookahead_config", "[4,4,4]", "--draft_lens", "3"], 2, "give --triples"),
        (["sweep", "--lookahead_config", "[4,4,4]", "--triples", "[4,5,4]"], 4, "not within"),
        (["speed"], 2, "invalid choice"),
        (["latency", "--model", "/no/such/model"], 4, "/no/such/model"),
    ],
)  # fmt: skip
def test_the_command_refuses(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err), captured.err
