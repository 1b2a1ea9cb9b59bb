"""The command line without a model: imports of --help, option spelling, exit codes, streams."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import (
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    KvCacheConfig,
    ReDrafterDecodingConfig,
    SchedulerConfig,
    SuffixDecodingConfig,
)
from specdec_ext.cli import main
from specdec_ext.cli.common import human_bytes, normalize_argv, use_color
from specdec_ext.config.acceptance import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD
from specdec_ext.serve.settings import ServerSettings
from specdec_ext.training.collect import CollectConfig
from specdec_ext.training.options import (
    DEFAULT_NEURONS,
    DEFAULT_PROMPTS,
    DEFAULT_VOCAB,
    TrainOptions,
    default_settings,
)

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "yaml", "rich", "specdec_ext._core")


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)


@pytest.mark.parametrize(
    "argv", [["--help"], ["generate", "--help"], ["bench", "--help"], ["--version"], ["env", "-h"]]
)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys; from specdec_ext.cli import main; code = main(sys.argv[1:]);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], code, file=sys.stderr)"
    )
    done = run_python(code, *argv)
    assert done.stderr.strip() == "[] 0"
    assert done.stdout.startswith(("usage: specdec", "specdec "))


def test_importing_the_package_is_light() -> None:
    code = (
        "import specdec_ext as s, sys; s.LookaheadDecodingConfig(7, 7, 7); s.SamplingParams();"
        f"s.max_draft_len(7, 7, 7); print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert run_python(code).stdout.strip() == "[]"


def test_every_export_exists() -> None:
    import specdec_ext

    assert set(specdec_ext.__all__) <= set(dir(specdec_ext))
    for name in specdec_ext.__all__:
        assert getattr(specdec_ext, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Medusa'"):
        _ = specdec_ext.Medusa


def test_option_spelling() -> None:
    argv = ["generate", "--input_text", "a_b", "--max_output_len=3", "--x_y=a_b", "--", "--p_q"]
    assert normalize_argv(argv) == [
        "generate", "--input-text", "a_b", "--max-output-len=3", "--x-y=a_b", "--", "--p_q",
    ]  # fmt: skip


@pytest.mark.parametrize(("argv", "code", "message"), [
    ([], 2, "give a COMMAND, for example specdec chat"),
    (["gnerate"], 2, "there is no command 'gnerate'; did you mean generate?"),
    (["xyzzy"], 2, "there is no command 'xyzzy'; specdec --help lists what there is"),
    (["generate", "--prompt=x", "--lookahead_config=[7,7,x]"], 4, "_verification_set_size = 'x'"),
    (["generate", "--lookahed_config", "[7,7,7]"], 2, "did you mean --lookahead-config"),
    (["generate", "--input_text", "x", "--max_output_len", "three"], 2, "invalid int"),
    (["generate", "--input_text", "x", "--max_output_len", "0"], 2, "max_tokens = 0"),
    (["generate", "--input_text", "x", "--input_file", "y"], 2, "exclude each other"),
    (["generate", "--input_file", "/no/such/file"], 2, "cannot be read"),
    (["generate", "--input_text", "x", "--lookahead_config", "[7,7,7]", "--spec_decode_nextn", "4"],
     2, "each name a method"),
    (["generate", "--input_text", "x", "--lookahead_config", "[7,7,7]",
      "--max_matching_ngram_size", "4"], 2, "each name a method"),
    (["generate", "--input_text", "x", "--medusa", "--redrafter"], 2,
     "--medusa and --redrafter each name a method; give one of them"),
    (["generate", "--input_text", "x", "--n", "2"], 2, "one output per prompt"),
    (["generate", "x"], 2, "arguments: x; a prompt is given in quotes, after --input-text"),
    (["generate", "--input_text", "x", "--lookahead_config", "7,7,7"], 4,
     r"'7,7,7': expected.*for example \[7,7,7\]"),
    (["generate", "--input_text", "x", "--prompt_lookup_config", "10,2"], 4,
     r"'10,2': expected.*for example \[10,2\]"),
    (["generate", "--input_text", "x", "--dtype", "int4"], 3, "--quantization int4"),
    (["generate", "--input_text", "x", "--draft_model", "/no/such/model"], 4,
     "draft model = '/no/such/model' does not exist"),
    (["generate", "--input_text", "x", "--log_level", "loud"], 2, "invalid choice"),
    (["generate", "--input_text", "x", "--engine_dir=x"], 4, "'x' does not exist.*specdec build"),
    (["generate", "--input_text", "x", "--checkpoint_dir=x"], 2, "specdec build makes an engine"),
    (["generate", "--input_text", "x", "--temperature", "-1"], 2, "temperature = -1"),
    (["generate", "--input_text", "x", "--num_beams", "4"], 3, "beam_width = 4"),
    (["generate", "--input_text", "x", "--tp_size", "65"], 4, "tensor_parallel_size = 65"),
    (["generate", "--input_text", "x", "--dtype", "fp8"], 3, "fp8"),
    (["generate", "--input_text", "x", "--speculative_config", '{"method":"mtp"}'], 3,
     "'mtp'.*'draft_target', 'eagle3', 'lookahead', 'medusa', 'ngram', 'redrafter', 'suffix' or "
     "'none'"),
    (["generate", "--input_text", "x", "--speculative_config", '{"method":"eagle3","model":""}'], 4,
     "Eagle3DecodingConfig.model = '': expected the folder of an EAGLE-3 head"),
    (["generate", "--input_text", "x", "--speculative_config="], 4, "'' holds nothing; leave it"),
    (["generate", "--input_text", "x", "--lookahead_config="], 4, "'' holds nothing; leave it"),
    (["generate", "--input_text", "x", "--speculative_config", '{"method": ""}'], 4,
     "method = '': there is no such method; use 'auto'"),
    (["generate", "--input_text", "x", "--speculative_decoding_mode="], 4,
     "speculative_decoding_mode = '': there is no such method; use 'auto'"),
    (["serve", "no/model", "--port=0", "--speculative_config="], 4, "'' holds nothing; leave it"),
    (["generate", "--input_text", "x", "--eagle3_top_k", "65"], 4, "top_k = 65"),
    (["generate", "--input_text", "x", "--eagle3", "--suffix"], 2, "each name a method"),
    (["generate", "--input_text", "x", "--eagle3_model", "y", "--suffix"], 2, "each name a method"),
    (["generate", "--input_text", "x", "--eagle3_model", "no/head"], 4,
     "eagle3 model = 'no/head' does not exist"),
    (["generate", "--input_text", "x", "--speculative_config", '{"method":"medus"}'], 4,
     "'medus': there is no such method; did you mean 'medusa'"),
    (["generate", "--input_text", "x", "--speculative_config", '{"method":"user"}'], 4,
     "no such method; use 'auto', 'draft_target', 'eagle3', 'lookahead', 'medusa', 'ngram', "
     "'redrafter', 'suffix' or 'none'"),
    (["generate", "--input_text", "x", "--lookahead_config", "[0,7,7]"], 4, "max_window_size = 0"),
    (["generate", "--input_text", "x", "--lookahead_config", "[10,9,8]"], 4, "143.*127"),
    (["generate", "--input_text", "x", "--prompt_lookup_config", "[10,2,[0,1]]"], 4, "2 devices"),
    (["generate", "--input_text", "x", "--lookahead_config", "[7,7,7]", "--max_draft_len", "84"],
     4, "84.*83"),
    (["generate", "--input_text", "x", "--speculative_decoding_mode", "lookahead_decoding",
      "--prompt_lookup_config", "[10,2]"], 4, "agree"),
    (["generate", "--input_text", "x", "--tokens_per_block", "48"], 4, "power of two"),
    (["generate", "--input_text", "x", "--model", "/no/such/model"], 4, "/no/such/model"),
    (["generate", "--input_text", "x", "--model", ""], 4,
     "model = '': expected the path .*, got an empty text; give one, or leave model out"),
    (["inspect", "--model", "/no/such/model"], 4, "/no/such/model"),
    (["train-medusa", "--model=", "--output", "no/where", "--data", "no/file"], 4,
     "model = '': expected the path"),
    (["inspect", "--device", "tpu"], 4, "device = 'tpu': expected 'auto', 'cpu', 'cuda'"),
])  # fmt: skip
def test_exit_codes(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""  # data only
    assert re.search(message, captured.err), captured.err
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) <= 3, "usage in one line, then the error"


def test_hardware_that_is_not_there_is_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from specdec_ext import _core

    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "one"}\n')
    none = {"compiled": False, "devices": [], "reason": "no driver"}
    monkeypatch.setattr(_core, "cuda_info", lambda: none)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for argv in (
        ["generate", "--input_text", "x", "--device", "cuda"],
        ["generate", "--input_text", "x", "--device", "cuda:1"],
        ["train-medusa", "--output", "no/where", "--data", str(data), "--device", "cuda"],
    ):
        assert main(argv) == 3, argv
        assert "cpu" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["foo", "0", "-2", "4x", "257", "1.5"])
def test_a_number_of_threads_that_is_none(
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "one"}\n')
    monkeypatch.setenv("SPECDEC_NUM_THREADS", value)
    for argv in (
        ["generate", "--input_text", "x", "--model", "/no/such/model"],
        ["train-medusa", "--output", "no/where", "--data", str(data)],
    ):
        assert main(argv) == 4
        assert f"SPECDEC_NUM_THREADS = '{value}': give a number of" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["", "1", " 256 "])
def test_numbers_of_threads(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_ext.config.build_check import check_threads_variable

    monkeypatch.setenv("SPECDEC_NUM_THREADS", value)
    check_threads_variable()


def test_interrupt_and_internal_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specdec_ext.cli import env

    def raiser(error: BaseException) -> Any:
        def run(_: Any) -> int:
            raise error

        return run

    monkeypatch.setattr(env, "run", raiser(KeyboardInterrupt()))
    assert main(["env"]) == 130
    monkeypatch.setattr(env, "run", raiser(ZeroDivisionError("oops")))
    assert main(["env"]) == 1
    err = capsys.readouterr().err
    assert "internal error: ZeroDivisionError: oops" in err
    assert "Traceback" not in err
    assert main(["env", "--log_level", "debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_env_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["torch"]
    assert report["memory_available_bytes"] > 0
    assert "error" not in report["build"]
    assert main(["env"]) == 0
    assert "python: " in capsys.readouterr().out


def test_env_shows_cuda_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  cuda ")]
    assert "compiled: " in line and "{" not in line


def test_help_shows_the_numbers_that_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """Defaults of configurations, where a help text was written by hand beside them."""
    wanted: dict[str, dict[str, object]] = {
        "generate": {
            "--suffix": SuffixDecodingConfig().max_draft_len,
            "--max-draft-len": DraftTargetDecodingConfig(model="m").max_draft_len,
            "--redrafter-num-beams": ReDrafterDecodingConfig().num_beams,
            "--redrafter-draft-len-per-beam": ReDrafterDecodingConfig().draft_len_per_beam,
            "--eagle3-top-k": Eagle3DecodingConfig().top_k,
            "--eagle3-max-draft-depth": Eagle3DecodingConfig().max_draft_depth,
            "--max-batch-size": SchedulerConfig().max_batch_size,
            "--max-prefill-slowdown": 4,
            "--tokens-per-block": KvCacheConfig().tokens_per_block,
            "--posterior-threshold": POSTERIOR_THRESHOLD,
            "--posterior-alpha": POSTERIOR_ALPHA,
        },
        "serve": {
            "--request-seconds": f"{ServerSettings.request_seconds:g}",
            "--body-seconds": f"{ServerSettings.body_seconds:g}",
            "--send-seconds": f"{ServerSettings.send_seconds:g}",
            "--drain-seconds": f"{ServerSettings.drain_seconds:g}",
            "--max-body-bytes": f"{ServerSettings.max_body_bytes >> 20} MiB",
        },
        "train-medusa": {
            "--max-new-tokens": CollectConfig().max_new_tokens,
            "--max-prompt-len": CollectConfig().max_prompt_len,
            "--collect-batch": CollectConfig().batch_size,
            "--num-prompts": DEFAULT_PROMPTS,
            "--draft-vocab-size": DEFAULT_VOCAB,
            "--intermediate-size": DEFAULT_NEURONS,
            "--num-heads": TrainOptions.num_heads,
            "--num-layers": TrainOptions.num_layers,
            "--draft-len": TrainOptions.draft_len,
            "--measure-prompts": TrainOptions.measure_prompts,
            "--measure-tokens": TrainOptions.measure_tokens,
            "--batch-texts": default_settings("medusa").batch_texts,
            "--accumulation": default_settings("medusa").accumulation,
        },
    }
    for command, numbers in wanted.items():
        assert main([command, "--help"]) == 0
        text = " ".join(capsys.readouterr().out.partition("options:")[2].split())
        for flag, number in numbers.items():
            said = re.search(rf" {flag}[ ,].*?\(default: ([^,;)]*)", text)
            assert said is not None and said[1] == str(number), (flag, number, said and said[1])


def test_help_shows_what_may_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: specdec chat [QUESTION] [options]")
    assert main(["summarize", "--help"]) == 0
    assert (
        "Summarize articles: ROUGE, speed and equal tokens, ours and HF's."
        in capsys.readouterr().out
    )
    assert main(["--help"]) == 0
    assert 'specdec chat "Write a haiku about rivers." --stats' in capsys.readouterr().out


@pytest.mark.parametrize(("name", "level"), [
    ("internal_error", "CRITICAL"), ("error", "ERROR"), ("warning", "WARNING"), ("info", "INFO"),
    ("verbose", "DEBUG"), ("debug", "DEBUG"), ("VERBOSE", "DEBUG"),
])  # fmt: skip
def test_log_levels_are_also_those_of_tensorrt_llm(
    name: str, level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("specdec_ext")
    before = list(logger.handlers), logger.level, logger.propagate
    try:
        assert main(["env", "--json", f"--log_level={name}"]) == 0
        assert logging.getLevelName(logger.level) == level
        monkeypatch.setenv("SPECDEC_LOG_LEVEL", "loud")
        assert main(["env", "--json"]) == 0
        assert logger.level == logging.WARNING
        assert "SPECDEC_LOG_LEVEL = 'loud': expected one of" in capsys.readouterr().err
    finally:
        logger.handlers[:], logger.level, logger.propagate = before


def test_colors_follow_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    with open(os.devnull, "w", encoding="utf-8") as stream:
        assert use_color("always", stream)
        assert not use_color("never", stream)
        assert not use_color("auto", stream)
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert use_color("auto", stream)
        monkeypatch.setenv("NO_COLOR", "1")
        assert not use_color("auto", stream)
        assert use_color("always", stream)


def test_sizes() -> None:
    assert [human_bytes(n) for n in (0, 1023, 2048, 5 << 20, 3 << 30)] == [
        "0 B", "1023 B", "2.0 KiB", "5.0 MiB", "3.00 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--redrafter"], {}),
        (["--redrafter_model", "d"], {"model": "d"}),
        (["--drafter-model-dir=d", "--redrafter-num-beams", "2"], {"model": "d", "num_beams": 2}),
        (["--redrafter", "--redrafter_draft_len_per_beam", "3"], {"draft_len_per_beam": 3}),
        (["--redrafter_model=d", "--redrafter_no_greedy_search", "--no-adaptive"],
         {"model": "d", "greedy_search": False, "adaptive": False}),
        (["--redrafter_model=d", "--redrafter_greedy_search"], {"model": "d"}),
    ],
)  # fmt: skip
def test_redrafter_flags(flags: list[str], expected: dict[str, Any]) -> None:
    from specdec_ext import ReDrafterDecodingConfig
    from specdec_ext.cli.common import SpecdecParser, add_llm_arguments, llm_kwargs

    parser = SpecdecParser()
    add_llm_arguments(parser)
    args = parser.parse_args(normalize_argv(flags))
    assert llm_kwargs(args)["speculative_config"] == ReDrafterDecodingConfig(**expected)


@pytest.mark.parametrize(
    ("flags", "window", "sinks"),
    [
        ([], None, 0),
        (["--max_attention_window_size", "256"], 256, 0),
        (["--max_attention_window_size=256", "--sink_token_length=4"], 256, 4),
        (["--max-attention-window-size", "64", "32", "--sink-token-length", "2"], (64, 32), 2),
    ],
)
def test_window_flags(flags: list[str], window: Any, sinks: int) -> None:
    from specdec_ext.cli.common import SpecdecParser, add_llm_arguments, llm_kwargs

    parser = SpecdecParser()
    add_llm_arguments(parser)
    cache = llm_kwargs(parser.parse_args(normalize_argv(flags)))["kv_cache_config"]
    assert (cache.max_attention_window, cache.sink_token_length) == (window, sinks)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--redrafter", "--redrafter-num-beams", "0"], 4, "num_beams = 0: out of range"),
        (["--redrafter", "--redrafter-num-beams", "64", "--redrafter-draft-len-per-beam", "2"], 4,
         "limit 127"),
        (["--redrafter", "--lookahead-config", "[2,2,1]"], 2, "each name a method"),
        (["--redrafter-num-beams", "2", "--prompt-lookup-config", "[4,2]"], 2,
         "each name a method"),
        (["--redrafter-greedy-search", "--redrafter-no-greedy-search"], 2, "not allowed with"),
    ],
)  # fmt: skip
def test_bad_redrafter_flags(
    flags: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(["generate", "--input-text", "x", "--model", "nowhere", *flags])
    except SystemExit as exit_:
        found = exit_.code
    assert found == code
    assert message in capsys.readouterr().err
