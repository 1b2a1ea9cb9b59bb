"""The search for a configuration without a model: spaces, the prediction, the climb, refusals."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec_ext import LookaheadDecodingConfig, NGramDecodingConfig, SamplingParams
from specdec_ext.bench.search_space import SPACES, Point, Space
from specdec_ext.bench.tune import Candidate, Tuning, predicted_speedup, tune
from specdec_ext.bench.tune_report import best_config, draw_png, heat_cells, print_tuning
from specdec_ext.cli import main
from specdec_ext.text.metrics import SpecCounter


@pytest.mark.parametrize("name", SPACES)
def test_every_point_is_a_configuration(name: str) -> None:
    space = SPACES[name]
    points = space.all_points()
    assert len(points) > 100 and len(set(points)) == len(points)
    for point in points:
        config = space.config(point, adaptive=False)
        assert config.max_draft_len == space.draft_len(point) <= 127
        assert not config.adaptive
    coarse = space.coarse_points()
    assert set(coarse) <= set(points)
    assert [space.draft_len(p) for p in coarse] == sorted(space.draft_len(p) for p in coarse)
    for limit in (3, 20, 60):
        assert all(space.draft_len(p) <= limit for p in space.coarse_points(limit))
    for point in points:
        for near in space.neighbours(point, 40):
            assert near in points and space.draft_len(near) <= 40
            assert sum(a != b for a, b in zip(point, near, strict=True)) == 1
            assert point in list(space.neighbours(near))


def test_the_prediction_weighs_every_step_by_its_rows() -> None:
    def cost(rows: int) -> float:
        return 1.0 + 0.1 * (rows - 1)

    assert predicted_speedup(10, [], 10, cost, 1) == 1.0
    # Two steps of 5 rows and one of 1 brought 8 tokens.
    assert predicted_speedup(8, [4, 4], 1, cost, 1) == pytest.approx(8 / (2 * 1.4 + 1))
    assert predicted_speedup(8, [4, 4], 1, cost, 4) == pytest.approx(8 * 1.3 / (2 * 2.9 + 1.3))
    assert predicted_speedup(0, [], 0, cost, 1) == 1.0


SPACE = Space("ngram", ("K", "M"), ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4)), ((2, 6), (1, 3)))


class FakeEngine:
    """A request of K drafts and patterns of M brings tokens by a smooth law with one summit."""

    made: list[Any]

    def __init__(self, config: NGramDecodingConfig | None) -> None:
        self.config = config

    def resolve(self, ids: list[int], params: SamplingParams) -> Any:
        return ids, params

    def submit(self, request: tuple[list[int], SamplingParams]) -> Any:
        ids, params = request
        assert params.max_tokens is not None
        counter = SpecCounter(8)
        counter.count(drafts=0, accepted=0, rows=len(ids), tokens=1, is_prefill=True)
        left = params.max_tokens - 1
        config = self.config
        while left > 0:
            drafts = (
                config.max_draft_len if config and params.speculative_config is not False else 0
            )
            most = 4 - abs(config.max_matching_ngram_size - 2) if config and drafts else 0
            accepted = min(drafts, most, left - 1)
            counter.count(drafts=drafts, accepted=accepted, rows=1 + drafts, tokens=1 + accepted)
            left -= 1 + accepted
        return SimpleNamespace(
            token_ids=list(range(params.max_tokens)), counter=counter, error=None
        )

    def run(self, states: list[Any]) -> None:
        pass

    def cancel(self, state: Any) -> None:
        pass


COST = {rows: 1.0 + 0.05 * (rows - 1) for rows in (1, 2, 4, 8, 16, 32)}


def search(**options: Any) -> Tuning:
    params = SamplingParams(max_tokens=121)
    return tune(FakeEngine, SPACE, [[1, 2], [3]], params, COST, **options)


def exhaustive() -> Point:
    def speed(point: Point) -> float:
        length, size = point
        accepted = min(length, 4 - abs(size - 2))
        steps = -(-120 // (1 + accepted))
        return 120 / (steps * (1.0 + 0.05 * length))

    return max(SPACE.all_points(), key=lambda p: (round(speed(p), 9), -p[0]))


def test_the_climb_finds_the_summit_between_the_coarse_points() -> None:
    result = search()
    assert result.best is not None
    assert result.best.point == exhaustive() == (4, 2)
    assert result.stopped == "complete" and result.identical
    assert [c.is_coarse for c in result.candidates][:4] == [True] * 4
    assert not result.best.is_coarse
    points = [c.point for c in result.candidates]
    assert len(points) == len(set(points)) < len(SPACE.all_points())
    best = result.best
    assert (best.tokens, best.accepted) == (240, 192)
    assert best.drafts == (4,) * 48 and best.plain_steps == 0
    assert best.speedup == pytest.approx(5 / 1.2)
    row = best.to_dict(SPACE.names)
    assert (row["K"], row["M"], row["tokens_per_step"], row["rows_per_step"]) == (4, 2, 5.0, 5.0)
    assert row["mean_acceptance_length"] == 5.0
    assert best_config(result) == NGramDecodingConfig(4, 2).to_dict()


def test_time_ends_the_search_but_not_before_the_first_candidate() -> None:
    result = search(max_seconds=1e-9)
    assert result.stopped == "time"
    assert len(result.candidates) == 1
    assert result.measured_speedup is None
    again = search(max_seconds=1000.0)
    assert again.stopped == "complete" and again.measured_speedup is not None


def test_a_limit_and_a_batch_change_what_pays() -> None:
    assert all(c.draft_len <= 3 for c in search(limit=3).candidates)
    crowd = search(batch_size=200)
    assert crowd.best is not None and crowd.best.speedup < search().best.speedup  # type: ignore


def test_reports_with_and_without_a_winner() -> None:
    result = search()
    stream = io.StringIO()
    print_tuning(result, 1, stream)
    text = stream.getvalue()
    assert "--prompt_lookup_config [4,2]" in text and "*4.17" in text
    cells = heat_cells(result.candidates, 0, 1, (4, 2))
    assert cells[4, 2] == result.best.speedup  # type: ignore[union-attr]
    assert draw_png(result)[:4] == b"\x89PNG"
    loser = Candidate((2, 1), 2, 10, 0, (2,) * 10, 0, 0.8, True)
    lost = Tuning(SPACE, [loser], 10, "time", 1.0, True)
    assert lost.best is None and best_config(lost) is None
    stream = io.StringIO()
    print_tuning(lost, 1, stream)
    assert "plain decoding is faster" in stream.getvalue()
    assert "stopped by --max-seconds" in stream.getvalue()


def test_a_lookahead_map_has_two_planes() -> None:
    space = SPACES["lookahead"]
    candidates = [
        Candidate(p, space.draft_len(p), 10, 5, (3,) * 5, 0, 1.0 + sum(p) / 100, True)
        for p in space.coarse_points()
    ]
    result = Tuning(space, candidates, 10, "complete", 1.0, True)
    assert result.best is not None and result.best.point == (10, 7, 10)
    assert heat_cells(candidates, 0, 1, (10, 7, 10)).keys() == {
        (p[0], p[1]) for p in space.coarse_points() if p[2] == 10
    }
    stream = io.StringIO()
    print_tuning(result, 1, stream)
    assert stream.getvalue().count("predicted speed-up,") == 2
    assert draw_png(result)[:4] == b"\x89PNG"
    assert best_config(result) == LookaheadDecodingConfig(10, 7, 10).to_dict()


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["medusa"], 2, "invalid choice"),
        (["ngram", "--prompt_lookup_config", "[4,2]"], 2, "remove the flags of methods"),
        (["ngram", "--batch_size", "0"], 4, "--batch-size = 0"),
        (["ngram", "--max_seconds", "0"], 4, "--max-seconds = 0"),
        (["ngram", "--limit_draft_len", "1"], 2, "smallest of the first search has 2"),
        (["ngram", "--limit_draft_len", "128"], 4, "--limit-draft-len = 128"),
        (["ngram", "--output", "/no/such/folder/x"], 2, "no such folder"),
        (["ngram", "--step_cost", "/no/such/file"], 4, "expected a JSON file"),
        (["ngram", "--max_output_len", "0"], 2, "max_tokens = 0"),
        (["ngram", "--model", "/no/such/model"], 4, "/no/such/model"),
    ],
)
def test_the_command_refuses(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", argv[0], "--input_text", "x", *argv[1:]]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err), captured.err


@pytest.mark.parametrize("content", ["[]", '{"8": 1.0}', '{"1": 1.0}', '{"1": 0, "2": 1}', "{"])
def test_bad_step_costs(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cost.json"
    file.write_text(content)
    assert main(["tune", "ngram", "--input_text", "x", "--step_cost", str(file)]) == 4
    assert "--step-cost" in capsys.readouterr().err
