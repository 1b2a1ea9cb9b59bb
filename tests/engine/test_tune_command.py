"""`specdec tune` on a tiny model: counts of real decoding, a result that the flags take."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import LLM, ConfigError, NGramDecodingConfig, SamplingParams
from specdec_ext.cli import main
from specdec_ext.config.parse import parse_speculative_config
from tiny_models import save_tiny

PROMPTS = ["abcabcabc", "the cat sat on the mat, the cat sat"]
# A machine on which eight rows cost what one does.
COST = {"1": 1.0, "8": 1.0, "16": 1.6, "64": 4.0, "128": 8.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny") / "m"))


def run_tune(folder: str, tmp_path: Path, capsys: Any, method: str, *argv: str) -> dict[str, Any]:
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(COST))
    capsys.readouterr()
    assert main(["tune", method, "--model", folder, "--input_text", *PROMPTS, "--max_output_len",
                 "60", "--step_cost", str(cost), "--json", *argv]) == 0  # fmt: skip
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize("method", ["lookahead", "ngram"])
def test_counts_are_those_of_decoding_and_the_same_in_every_run(
    folder: str, tmp_path: Path, capsys: Any, method: str
) -> None:
    out = tmp_path / "best.json"
    report = run_tune(folder, tmp_path, capsys, method, "--output", str(out), "--limit_draft_len",
                      "40")  # fmt: skip
    again = run_tune(folder, tmp_path, capsys, method, "--limit_draft_len", "40")
    assert report["candidates"] == again["candidates"]
    assert report["best"] == again["best"] is not None
    assert report["identical_to_plain"] is True and report["stopped"] == "complete"
    assert report["measured_speedup"] > 0
    assert json.loads(out.read_text()) == report["best"]
    assert all(c["max_draft_len"] <= 40 for c in report["candidates"])
    best = report["best_candidate"]
    assert best["predicted_speedup"] == max(c["predicted_speedup"] for c in report["candidates"])
    # The same configuration in an engine of its own.
    config = parse_speculative_config({**report["best"], "adaptive": False})
    with LLM(folder, speculative_config=config) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=60), use_tqdm=False)
    spec = [o.metrics["speculative_decoding"] for o in outputs]
    tokens = sum(len(o.outputs[0].token_ids) - 1 for o in outputs)
    steps = sum(o.metrics["num_forward_passes"] - o.metrics["num_prefill_passes"] for o in outputs)
    assert best["num_draft_tokens"] == sum(s["num_draft_tokens"] for s in spec)
    assert best["num_accepted_draft_tokens"] == sum(s["num_accepted_draft_tokens"] for s in spec)
    assert best["tokens_per_step"] == pytest.approx(tokens / steps)

    def cost(rows: int) -> float:
        points = sorted((int(r), s) for r, s in COST.items())
        for (a, low), (b, high) in itertools.pairwise(points):
            if a <= rows <= b:
                return low + (high - low) * (rows - a) / (b - a)
        raise AssertionError(rows)

    drafted = [count for s in spec for count in s["per_step_drafted"]]
    spent = sum(cost(1 + count) for count in drafted) + (steps - len(drafted))
    assert best["predicted_speedup"] == pytest.approx(tokens / spent)
    # The flags take it, and the text is the plain one.
    flag = {"lookahead": "--lookahead_config", "ngram": "--prompt_lookup_config"}[method]
    assert main(["generate", "--model", folder, "--input_text", *PROMPTS, flag, str(out),
                 "--max_output_len", "60", "--verify"]) == 0  # fmt: skip


def test_tables_maps_and_a_short_time(folder: str, tmp_path: Path, capsys: Any) -> None:
    capsys.readouterr()
    png, report = tmp_path / "map.png", tmp_path / "report.json"
    argv = ["tune", "ngram", "--model", folder, "--input_text", *PROMPTS, "--max_output_len", "40",
            "--max_seconds", "0.001", "--png", str(png), "--output_json", str(report),
            "--batch_size", "4"]  # fmt: skip
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "stopped by --max-seconds" in text and "candidates" in text
    assert png.stat().st_size > 1000
    content = json.loads(report.read_text())
    assert content["stopped"] == "time" and len(content["candidates"]) == 1
    assert len(content["step_cost"]) >= 2 and content["workload"]["batch_size"] == 4


def test_engines_over_one_model_keep_to_its_plan(folder: str) -> None:
    """What engine_for() makes decodes as an LLM of its own; more than was planned is refused."""
    params = SamplingParams(max_tokens=30)
    with LLM(folder, speculative_config=NGramDecodingConfig(6, 2, adaptive=False)) as llm:
        ids = [list(llm.tokenizer(p)["input_ids"]) for p in PROMPTS]
        first = llm.generate(PROMPTS, params, use_tqdm=False)
        for config in (NGramDecodingConfig(3, 1, adaptive=False), None):
            engine = llm._builder.engine_for(config)
            states = [engine.submit(engine.resolve(i, params)) for i in ids]
            engine.run(states)
            assert [s.token_ids for s in states] == [o.outputs[0].token_ids for o in first]
            drafted = sum(s.counter.num_drafts for s in states)
            assert (drafted > 0) == (config is not None)
        with pytest.raises(ConfigError, match="more than the 6 drafts"):
            llm._builder.engine_for(NGramDecodingConfig(7))
