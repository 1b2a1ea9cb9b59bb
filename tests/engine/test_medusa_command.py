"""Medusa from the command line: generate --verify, tree --measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from medusa_models import make_heads, save_heads, save_target

from specdec_ext.cli import main
from specdec_ext.drafters.medusa.heads import save_medusa_heads


@pytest.mark.parametrize("tree", [[], ["--medusa_choices", "vicuna_7b_stage2"]])
def test_generate_verifies(tmp_path: Path, capsys: Any, tree: list[str]) -> None:
    target, heads = save_target(tmp_path / "t"), save_heads(tmp_path / "h")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [3, 4, 5]}\n{"prompt_token_ids": [7]}\n')
    argv = ["generate", "--model", str(target), "--medusa_model", str(heads), *tree, "--json",
            "--input_file", str(prompts), "--max_output_len", "30", "--max_seq_len", "100",
            "--max_batch_size", "2", "--verify", "--no-adaptive"]  # fmt: skip
    capsys.readouterr()
    assert main(argv) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["identical"] for line in lines] == [True, True]
    for line in lines:
        counts = line["metrics"]["speculative_decoding"]
        assert counts["num_draft_tokens"] > 63 and counts["num_spec_tokens"] == 4


@pytest.mark.default_model
def test_tree_measures_rates(default_model_path: Path, tmp_path: Path, capsys: Any) -> None:
    heads = make_heads(hidden=576, vocab=49152, number=2, lm_head="target", scale=0.0)
    save_medusa_heads(tmp_path / "h", heads)
    prompts, out = tmp_path / "p.txt", tmp_path / "tree.json"
    prompts.write_text("Repeat the word yes twenty times.\n")
    argv = ["tree", "--measure", "--medusa-model", str(tmp_path / "h"), "--input-file",
            str(prompts), "--max-output-len", "24", "--max-nodes", "8", "--nodes", "5", "--json",
            "--output", str(out)]  # fmt: skip
    capsys.readouterr()
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["guess_rates"]) == 2 and len(report["guess_rates"][0]) == 10
    assert all(0.0 <= sum(row) <= 1.0 + 1e-9 for row in report["guess_rates"])
    assert report["nodes"] <= 5 and report["sizes"][0] == {
        "nodes": 0, "tokens": 1.0, "cost": 1.0, "gain": 1.0,
    }  # fmt: skip
    assert json.loads(out.read_text())["medusa_choices"] == report["medusa_choices"]
