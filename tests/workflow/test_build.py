"""specdec build and the engines that it writes: limits, and the three places that hold them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from engine_cases import LIMITS, Capture, generate, make, tokens_of

from engine.medusa_models import save_heads
from model.redrafter_cases import random_drafter
from specdec_ext import (
    ConfigError,
    LookaheadDecodingConfig,
    RequestError,
    SamplingParams,
)
from specdec_ext.cli import main
from specdec_ext.workflow.build import BuildOptions
from specdec_ext.workflow.convert import ConvertOptions, convert
from specdec_ext.workflow.engine_folder import EngineFolder
from tiny_models import save_tiny


@pytest.fixture(scope="module")
def lookahead(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "lookahead"
    return make(checkpoint, folder, "--max_draft_len=83",
                "--speculative_decoding_mode=lookahead_decoding")  # fmt: skip


def test_an_engine_decodes_as_its_model(
    lookahead: Path, plain_tokens: list[int], capsys: Capture
) -> None:
    assert generate(lookahead, "--lookahead_config=[7,7,7]", "--verify") == 0
    assert tokens_of(capsys.readouterr().out) == plain_tokens


def test_the_checkpoint_may_lie_in_the_engine_folder(
    long_tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
    """As in the documents: CKPT_DIR=tmp/engine/ckpt."""
    engine = tmp_path / "engine"
    inside = convert(long_tiny, engine / "ckpt", ConvertOptions()).folder
    make(inside, engine)
    make(inside, engine)  # and again
    assert (inside / "manifest.json").is_file()
    assert generate(engine) == 0
    shutil.rmtree(inside)
    assert generate(engine) == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("--lookahead_config=[7,7,6]", r"max_draft_len = 83, .*\(7, 7, 6\).* = 77; ask for a "
         r"\(W,N,G\) with 83, such as \[7,7,7\], or build"),
        ("--lookahead_config=[4,3,4]", r"max_draft_len = 83, .*\(4, 3, 4\).* = 15"),
        ("--prompt_lookup_config=[10,2]", "'lookahead_decoding' and max_draft_len = 83, asked for "
         "ngram with max_draft_len = 10.*--max_draft_len=10 --speculative_decoding_mode=ngram"),
        ("", r"max_draft_len = 83: .*--lookahead_config=\[W,N,G\]"),
    ],
)  # fmt: skip
def test_run_time_is_held_against_the_build(
    config: str, words: str, lookahead: Path, capsys: Capture
) -> None:
    assert generate(lookahead, *([config] if config else [])) == 4
    assert re.search(words, capsys.readouterr().err)


def test_a_request_is_held_against_the_run_time(lookahead: Path) -> None:
    engine = EngineFolder.open(lookahead)
    with engine.load([7, 7, 7]) as llm:
        assert llm.scheduler_config.max_batch_size == 4
        smaller = SamplingParams(max_tokens=4, speculative_config=LookaheadDecodingConfig(4, 3, 4))
        assert llm.generate("abc", smaller, use_tqdm=False)[0].outputs[0].token_ids
        larger = SamplingParams(speculative_config=LookaheadDecodingConfig(8, 7, 6))
        with pytest.raises(RequestError, match=r"8.*7"):
            llm.generate("abc", larger, use_tqdm=False)


@pytest.mark.parametrize(
    "flags",
    [
        ['--prompt_lookup_config=[10,2,[0]]', "--kv_cache_enable_block_reuse"],
        ['--prompt_lookup_config=[4,2,[0]]', "--prompt_lookup_style=v1"],
        [],
    ],
)  # fmt: skip
def test_drafts_from_outside(
    flags: list[str], external: Path, plain_tokens: list[int], capsys: Capture
) -> None:
    assert generate(external, *flags) == 0
    assert tokens_of(capsys.readouterr().out) == plain_tokens


def test_more_drafts_than_the_build_has_room_for(external: Path, capsys: Capture) -> None:
    for style in ("v1", "v2"):
        flags = ["--prompt_lookup_config=[11,2]", f"--prompt_lookup_style={style}"]
        assert generate(external, *flags) == 4
        said = capsys.readouterr().err
        assert "built with max_draft_len = 10, asked for ngram with max_draft_len = 11" in said
        assert "; ask for at most 10, or build it again" in said
        assert "--max_draft_len=11 --speculative_decoding_mode=draft_tokens_external" in said


def test_a_draft_engine(
    external: Path, checkpoint: Path, tmp_path: Path, plain_tokens: list[int], capsys: Capture
) -> None:
    draft = make(checkpoint, tmp_path / "draft")
    flags = [f"--draft_engine_dir={draft}", "--draft_target_model_config=[4,[0],[1],False]"]
    capsys.readouterr()
    assert generate(external, *flags, "--kv_cache_enable_block_reuse") == 0
    assert tokens_of(capsys.readouterr().out) == plain_tokens
    small = make(checkpoint, tmp_path / "small", "--max_batch_size=1")
    assert generate(external, f"--draft_engine_dir={small}") == 4
    assert "max_batch_size = 1, the target has 4" in capsys.readouterr().err
    assert generate(external, flags[0], "--draft_target_model_config=[4,0,1]") == 4
    assert "expected [K,[draft's devices]" in capsys.readouterr().err
    assert generate(external, flags[1]) == 2
    assert "needs --draft-engine-dir" in capsys.readouterr().err


def test_a_draft_engine_of_another_vocabulary(
    external: Path, tmp_path: Path, plain_tokens: list[int], capsys: Capture
) -> None:
    other = save_tiny(tmp_path / "other", seed=6, backwards=True, max_position_embeddings=8192)
    draft = make(convert(other, tmp_path / "ckpt", ConvertOptions()).folder, tmp_path / "draft")
    flags = [f"--draft_engine_dir={draft}", "--draft_target_model_config=[4,[0],[1],False]"]
    capsys.readouterr()
    assert generate(external, *flags) == 4
    assert "allow_vocab_mapping=True" in capsys.readouterr().err
    assert generate(external, *flags, "--allow_vocab_mapping") == 0
    assert tokens_of(capsys.readouterr().out) == plain_tokens


@pytest.mark.parametrize("method", ["medusa", "redrafter"])
def test_heads_of_the_checkpoint(
    method: str, long_tiny: Path, tmp_path: Path, plain_tokens: list[int], capsys: Capture
) -> None:
    vocab = json.loads((long_tiny / "config.json").read_text())["vocab_size"]
    heads = (
        save_heads(tmp_path / "heads", vocab=vocab)
        if method == "medusa"
        else random_drafter(tmp_path / "heads", "apple", 32, vocab)
    )
    options = ConvertOptions(**{f"{method}_model": heads})
    folder = convert(long_tiny, tmp_path / "ckpt", options).folder
    mode = {"medusa": "medusa", "redrafter": "explicit_draft_tokens"}[method]
    engine = make(folder, tmp_path / "engine", f"--speculative_decoding_mode={mode}")
    capsys.readouterr()
    assert generate(engine) == 0
    said = capsys.readouterr().out
    assert tokens_of(said) == plain_tokens
    assert json.loads(said.splitlines()[-1])["metrics"]["speculative_decoding"]["num_draft_tokens"]
    if method == "medusa":
        assert generate(engine, "--medusa_choices=[[0],[0,0],[1]]") == 0
        assert tokens_of(capsys.readouterr().out) == plain_tokens
        few = make(folder, tmp_path / "few", "--speculative_decoding_mode=medusa",
                   "--max_draft_len=2")  # fmt: skip
        assert generate(few, "--medusa_choices=[[0],[0,0],[1]]") == 4
        assert "max_draft_len = 2, asked for medusa with max_draft_len = 3" in (
            capsys.readouterr().err
        )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max_batch_size=5"], "max_batch_size = 4, asked for max_batch_size = 5"),
        (["--max_seq_len=97"], "max_seq_len = 96, asked for max_seq_len = 97"),
        (["--dtype=float16"], "built in float32, asked for dtype = 'float16'"),
        (["--device=cuda:7"], "built for device 'cpu'"),
    ],
)
def test_limits_of_the_build_hold(
    flags: list[str], words: str, external: Path, capsys: Capture
) -> None:
    assert generate(external, *flags) == 4
    assert words in capsys.readouterr().err


def test_the_page_size_is_that_of_the_build(
    checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    engine = make(checkpoint, tmp_path / "engine", "--tokens_per_block=8")
    with EngineFolder.open(engine).load() as llm:
        assert llm.memory.tokens_per_block == 8
    assert generate(engine) == 0
    assert generate(engine, "--tokens_per_block=16") == 4
    assert "built with tokens_per_block = 8, asked for 16" in capsys.readouterr().err


def test_a_prompt_beyond_max_input_len_is_refused(external: Path, capsys: Capture) -> None:
    assert generate(external, text="a" * 64) == 0
    assert generate(external, text="a" * 65) == 1
    assert "prompt has 65 tokens, SchedulerConfig.max_input_len = 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_beam_width": 2}, "max_beam_width = 2: limit 1"),
        ({"max_input_len": 96, "max_seq_len": 96}, "max_input_len = 96.*max_seq_len = 96"),
        ({"speculative_decoding_mode": "eagle"}, "eagle"),
    ],
)
def test_bad_limits_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BuildOptions(**options)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--max_num_tokens=40", "--max_draft_len=10", "--speculative_decoding_mode=ngram"], 4,
         "max_num_tokens = 40 is less than max_batch_size x (max_draft_len + 1) = 4 x 11 = 44"),
        (["--speculative_decoding_mode=lookahead_decoding"], 4, "(7,7,7) needs 83"),
        (["--max_draft_len=4"], 4, "without speculative_decoding_mode"),
        (["--speculative_decoding_mode=medusa"], 4, "convert again with --medusa_model=DIR"),
        (["--max_seq_len=9000"], 4, "max_seq_len = 9000"),
        (["--remove_input_padding=disable"], 3, "cannot be switched off"),
        (["--paged_kv_cache=disable"], 3, "cannot be switched off"),
    ],
)  # fmt: skip
def test_a_build_that_contradicts_itself(
    flags: list[str], code: int, words: str, checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    target = tmp_path / "engine"
    command = ["build", f"--checkpoint_dir={checkpoint}", f"--output_dir={target}", *LIMITS]
    assert main([*command, *flags]) == code
    assert words in capsys.readouterr().err
    assert not target.exists()
