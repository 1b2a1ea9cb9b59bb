"""T(rows, context) is there from the first step, kept up by served steps, and remembered."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import (
    LLM,
    DraftTargetDecodingConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
    set_num_threads,
)
from specdec_ext._core import StepCost
from specdec_ext.cli import main
from specdec_ext.engine import served_cost
from specdec_ext.engine.served_cost import cost_key, guess_cost, recall, remember
from specdec_ext.text.metrics import describe_budget
from tiny_models import save_tiny

PROMPT = [5, 6, 7, 8] * 8
TABLE = StepCost({1: 1.0, 4: 1.5, 128: 40.0}, {1: 1e-4, 4: 1e-4, 128: 1e-3}, 128.0)
METHODS = ["ngram", "lookahead", "draft-target"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(served_cost, "cache_root", lambda: tmp_path)
    return tmp_path / "step_cost"


def config(method: str, folder: Path) -> Any:
    return {
        "ngram": NGramDecodingConfig(4),
        "lookahead": LookaheadDecodingConfig(4, 3, 4),
        "draft-target": DraftTargetDecodingConfig(folder, max_draft_len=3),
    }[method]


def passes_to_first_token(llm: LLM, adaptive: bool) -> Counter[str]:
    """Forward passes of both models until the first token is there."""
    seen: Counter[str] = Counter()
    for name, model in (("target", llm.model), ("draft", llm.draft_model)):
        if model is None:
            continue
        forward = model.forward

        def counted(*args: Any, name: str = name, forward: Any = forward) -> Any:
            seen[name] += 1
            return forward(*args)

        model.forward = counted  # type: ignore[method-assign]
    state = llm.engine.submit(
        llm.engine.resolve(PROMPT, SamplingParams(max_tokens=8, adaptive=adaptive))
    )
    while not state.token_ids:
        llm.engine.step()
    first = seen.copy()
    llm.engine.run([state])
    return first


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_the_first_token_waits_for_no_measurement(
    method: str, depth: int, folder: Path, cache: Path
) -> None:
    seen = []
    for adaptive in (False, True):
        with LLM(
            folder,
            speculative_config=config(method, folder),
            scheduler_config={"overlap_depth": depth},
        ) as llm:
            seen.append(passes_to_first_token(llm, adaptive))
            assert (llm.engine._served_cost is not None) == adaptive
    fixed, adaptive_passes = seen
    assert adaptive_passes["target"] == fixed["target"]
    assert adaptive_passes["draft"] <= fixed["draft"]  # at depth 1 the next step is drafted, too


def test_a_guess_knows_what_reading_hides(folder: Path, cache: Path) -> None:
    """Floats: eight rows nearly at the price of one, as measured (docs/results.md, "Cost of rows");
    blocks: each row costs. Both ascend, and a pass reads its bytes."""
    guesses = {}
    for quantization in (None, "int4"):
        with LLM(folder, speculative_config=None, quantization=quantization) as llm:
            guesses[quantization] = guess_cost(llm.model)
            bytes_read = llm.model.info.weight_bytes
        rows, seconds, *_ = guesses[quantization].columns
        assert seconds == sorted(seconds) and rows[0] == 1
        assert seconds[0] == pytest.approx(bytes_read / served_cost._READ_RATE)
    wide, narrow = (
        {n: seconds / columns[1][0] for n, seconds in zip(*columns[:2], strict=True)}
        for columns in (guesses[None].columns, guesses["int4"].columns)
    )
    assert 1.1 < wide[8] < 1.2 and 1.6 < wide[16] < 1.9 and 6.5 < wide[64] < 7.5
    assert narrow[8] > 1.5


def test_a_guess_knows_that_tiles_are_fast(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folder, speculative_config=None, dtype="bfloat16") as llm:
        shares = {}
        for isa in ("avx512_bf16", "amx"):
            monkeypatch.setattr(served_cost._core, "cpu_isa", lambda isa=isa: isa)
            rows, seconds, *_ = guess_cost(llm.model).columns
            shares[isa] = {n: s / seconds[0] for n, s in zip(rows, seconds, strict=True)}
    assert shares["avx512_bf16"][8] == shares["amx"][8]
    assert shares["avx512_bf16"][128] > 13 and 4 < shares["amx"][128] < 5


def test_a_guess_knows_that_tiles_widen_e4m3(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {}
    for quantization in ("fp8", "int8"):
        with LLM(folder, speculative_config=None, quantization=quantization) as llm:
            for isa in ("avx512_vnni", "amx"):
                with monkeypatch.context() as patch:
                    patch.setattr(served_cost._core, "cpu_isa", lambda isa=isa: isa)
                    rows, seconds, *_ = guess_cost(llm.model).columns
                share = {n: s / seconds[0] for n, s in zip(rows, seconds, strict=True)}
                shares[quantization, isa] = share[128]
    assert 9 < shares["fp8", "amx"] < 10
    assert shares["fp8", "avx512_vnni"] == shares["int8", "amx"] > 18


@pytest.mark.skipif(served_cost._core.cpu_isa() != "amx", reason="a processor without tiles")
def test_a_guess_knows_that_tiles_widen_blocks_in_fast_numerics(folder: Path, cache: Path) -> None:
    shares = {}
    for numerics in ("exact", "fast"):
        how: Any = {"quantization": "int4", "numerics": numerics}
        with LLM(folder, speculative_config=None, **how) as llm:
            rows, seconds, *_ = guess_cost(llm.model).columns
            shares[numerics] = {n: s / seconds[0] for n, s in zip(rows, seconds, strict=True)}
    assert 9 < shares["fast"][128] < 10 and shares["exact"][128] > 2 * shares["fast"][128]


@pytest.mark.parametrize("method", METHODS)
def test_a_table_is_kept_up_and_remembered(method: str, folder: Path, cache: Path) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    with LLM(folder, speculative_config=config(method, folder)) as llm:
        text = llm.generate([PROMPT], params)[0].outputs[0].token_ids
        served = llm.engine._served_cost
        assert served.is_guess
        assert served._times.observed >= 16
        learnt = served.cost.columns
        assert learnt != guess_cost(llm.model).columns
    files = list(cache.iterdir())
    # The same model as its own draft, with the same threads, is one table.
    assert len(files) == 1 and files[0].suffix == ".json"
    with LLM(folder, speculative_config=config(method, folder)) as llm:
        assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == text
        assert not llm.engine._served_cost.is_guess
        again = recall(cost_key(llm.model))
    assert again is not None
    content = json.loads(files[0].read_text())
    assert content["version"] == 1 and len(content["rows"]) == len(content["seconds"])


def test_what_a_table_says_never_shows_in_the_text(folder: Path, cache: Path) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with LLM(folder) as llm:
        plain = llm.generate([PROMPT], params)[0].outputs[0].token_ids
    drafts = []
    for table in (StepCost({1: 1.0, 128: 1.0}), StepCost({1: 1e-9, 128: 1e9})):
        with LLM(folder, speculative_config=NGramDecodingConfig(4)) as llm:
            remember(cost_key(llm.model), table, 1)
        with LLM(folder, speculative_config=NGramDecodingConfig(4)) as llm:
            out = llm.generate([PROMPT], params)[0]
            assert not llm.engine._served_cost.is_guess
            assert out.outputs[0].token_ids == plain
            drafts.append(llm.get_metrics()["executor"]["num_draft_tokens"])
    assert drafts[0] > drafts[1]


def test_a_table_belongs_to_files_threads_and_build(folder: Path, cache: Path) -> None:
    with LLM(folder) as llm:
        key = cost_key(llm.model)
        assert key["threads"] and key["cpu"] and key["isa"] and key["files"] and key["build"]
        assert json.loads(json.dumps(key)) == key
        remember(key, TABLE, 7)
        assert recall(key).columns == TABLE.columns  # type: ignore[union-attr]
        for name in key:
            assert recall({**key, name: "another"}) is None
        threads = key["threads"]
        set_num_threads(threads + 1)
        try:
            assert recall(cost_key(llm.model)) is None
        finally:
            set_num_threads(threads)
        file = folder / "config.json"
        about = file.stat()
        file.touch()
        assert recall(cost_key(llm.model)) is None
        import os

        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
        assert recall(cost_key(llm.model)) is not None


def changed(**values: Any) -> Any:
    return lambda text: json.dumps({**json.loads(text), **values})


HOSTILE: dict[str, Any] = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no object": lambda text: "[1, 2]",
    "deep": lambda text: "[" * 60_000,
    "long": lambda text: text + " " * 100_000 + "x",
    "binary": lambda text: "\x00\xff" * 50,
    "version": changed(version=2),
    "format": changed(format="something"),
    "other key": changed(key={}),
    "text": changed(rows="abc"),
    "floats": changed(rows=[1.5, 2.0, 3.0]),
    "bools": changed(rows=[True, 4, 128]),
    "huge rows": changed(rows=[1, 4, 1 << 70]),
    "falling rows": changed(rows=[1, 128, 4]),
    "many": changed(rows=list(range(1, 999)), seconds=[1.0] * 998, growth=[0.0] * 998),
    "short": changed(seconds=[1.0]),
    "negative": changed(seconds=[1.0, -1.0, 2.0]),
    "nan": changed(seconds=[1.0, float("nan"), 2.0]),
    "infinite": changed(growth=[0.0, float("inf"), 2.0]),
    "null": changed(context_len=None),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_file_that_says_nothing_is_ignored_and_written_anew(
    how: str, folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(folder, speculative_config=NGramDecodingConfig(4)) as llm:
        key = cost_key(llm.model)
    remember(key, TABLE, 7)
    (file,) = cache.iterdir()
    file.write_text(HOSTILE[how](file.read_text()), encoding="utf-8")
    logging.getLogger("specdec_ext").addHandler(caplog.handler)
    try:
        with LLM(folder, speculative_config=NGramDecodingConfig(4)) as llm:
            llm.generate([PROMPT], SamplingParams(max_tokens=100, ignore_eos=True))
            assert llm.engine._served_cost.is_guess
    finally:
        logging.getLogger("specdec_ext").removeHandler(caplog.handler)
    # Two handlers may have seen it.
    lines = {record.getMessage() for record in caplog.records if str(file) in record.getMessage()}
    assert len(lines) == 1 and "is ignored and will be written anew" in lines.pop()
    assert recall(key) is not None
    assert [f.name for f in cache.iterdir()] == [file.name]


def test_a_cache_that_cannot_be_written_disturbs_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setattr(served_cost, "cache_root", lambda: file)
    with LLM(folder, speculative_config=NGramDecodingConfig(4)) as llm:
        out = llm.generate([PROMPT], SamplingParams(max_tokens=100, ignore_eos=True))[0]
        assert len(out.outputs[0].token_ids) == 100
    assert file.read_text() == "no folder"


def test_where_drafts_do_not_pay_the_command_and_the_log_say_why(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    table = StepCost({1: 1.0, 7: 5.0, 128: 900.0})  # the least that is on offer is six drafts
    with LLM(folder) as llm:
        remember(cost_key(llm.model), table, 1)
        assert describe_budget(llm.get_metrics()["executor"]) is None  # nothing to weigh
    caplog.set_level(logging.INFO, "specdec_ext")
    logging.getLogger("specdec_ext").addHandler(caplog.handler)
    try:
        with LLM(folder, speculative_config=LookaheadDecodingConfig(7, 7, 7)) as llm:
            # Only the table that is there counts.
            llm.engine._calibrate = lambda: llm.engine.executor.set_step_cost(*table.columns)
            llm.generate([PROMPT], SamplingParams(max_tokens=60, ignore_eos=True))
            stats = llm.get_metrics()["executor"]
    finally:
        logging.getLogger("specdec_ext").removeHandler(caplog.handler)
    assert stats["budget_weighed"] == stats["budget_refused"] > 20
    assert stats["num_draft_tokens"] == 0
    assert stats["budget_refused_tokens"] == pytest.approx(0.25 * stats["budget_weighed"])
    assert stats["budget_refused_price"] == pytest.approx(5.0 * stats["budget_weighed"])
    said = describe_budget(stats)
    assert said is not None
    assert f"drafts paid in 0 of {stats['budget_weighed']} offers" in said
    assert "the best drafts were expected to bring 0.25 tokens more in 5.00 times the time" in said
    assert said in caplog.text
    argv = ["generate", "--model", str(folder), "--input_text", "a b a b", "--max_output_len", "30",
            "--ignore_eos", "--lookahead_config", "[7,7,7]", "--stats"]  # fmt: skip
    assert main(argv) == 0
    assert "adaptive drafting: drafts paid in " in capsys.readouterr().err


def test_the_folder_is_bounded(cache: Path) -> None:
    for i in range(80):
        remember({"model": i}, TABLE, i)
    assert len(list(cache.iterdir())) == 64
    assert recall({"model": 79}) is not None and recall({"model": 0}) is None


@pytest.mark.usefixtures("on_stream")
def test_where_no_step_could_correct_a_guess_the_model_is_timed_once(
    folder: Path, cache: Path
) -> None:
    seen = []
    for _ in range(2):
        with LLM(
            folder, speculative_config=NGramDecodingConfig(4), scheduler_config={"overlap_depth": 1}
        ) as llm:
            seen.append(passes_to_first_token(llm, True)["target"])
    assert seen[0] > seen[1] + 20
