"""Speculation and slot cells of benchmarks/gpu: their sizes, and what the report makes of them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
from benchmarks.gpu import cells, engine_cells, report, slot_ops, spec_step, texts, timing
from benchmarks.gpu.run import Target

from specdec_ext import LookaheadDecodingConfig

HOST = Target("cpu", "cpu")


def test_names_are_all_different_and_lookahead_has_the_rows_that_its_cell_says() -> None:
    found: list[Any] = [*engine_cells.model_cells(), *engine_cells.speculation_cells()]
    found += [*engine_cells.texts_cells(), *cells.slot_cells()]
    assert len({cell.name for cell in found}) == len(found)
    for cell in engine_cells.speculation_cells():
        if cell.method == "lookahead":
            config = LookaheadDecodingConfig(
                *cell.lookahead, synthetic_acceptance_length=cell.mean_tokens
            )
            assert config.max_draft_len + 1 == cell.rows


def figures(**changed: Any) -> dict[str, Any]:
    """Cells of one request: T(1) 4 ms, T(84) 5 ms, speculation twice as fast as plain decoding."""
    spec = {
        "kind": "spec", "method": "lookahead", "requests": 1, "rows": 84, "us": 5100.0,
        "tokens_per_s": 500.0, "accepted_tokens_per_step": 3.0,
        "step_times": {"decode": {"steps": 10, "draft": 2e-4, "verify": 5e-2, "accept": 1e-4}},
    }  # fmt: skip
    return {
        "model-b1-m1": {"us": 4000.0, "floor_us": 3520.0},
        "model-b1-m84": {"us": 5000.0},
        "peer-model-b1-m1": {"us": 6000.0},
        "decode-b1-m1-ahead1-graphs": {"us": 4000.0},
        "spec": {**spec, **changed},
        "texts-fast": {"kind": "texts", "prompts": 100, "not_near_ties": 0},
    }


def test_the_report_sets_speculation_against_what_its_rows_allow() -> None:
    rows = {(group, figure): value for group, figure, _, value in report.step_targets(figures())}
    assert rows["G7", "transformers, static cache, compiled / T(1)"] == pytest.approx(1.5)
    assert rows["G8", "spec: draft and accept, us"] == pytest.approx(30.0)
    # Twice as fast, where 3 tokens a step and T(84) / T(1) = 1.25 allow 2.4 times.
    assert rows["G11", "spec: against plain decoding"] == pytest.approx(2.0)
    assert rows["G11", "spec: speedup / limit"] == pytest.approx(2.0 / 2.4)
    assert rows["texts", "texts-fast: of 100 texts, differing without a near-tie"] == 0
    without = report.step_targets(figures(tokens_per_s=None))
    assert not [row for row in without if row[0] in ("G8", "G11")]


@pytest.mark.parametrize("method", ["lookahead", "ngram"])
def test_slots_that_draft_differently_are_noticed(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cells.SlotCell(method, 2, 80, alphabet=9)
    assert slot_ops.measure(cell, HOST, timing.NoTimer())["status"] == "ok"
    state, calls = slot_ops.Slots.state, iter(range(100))

    def off_by_one(self: slot_ops.Slots) -> list[Any]:
        found = state(self)
        found[0][0] += next(calls) == 3
        return found

    monkeypatch.setattr(slot_ops.Slots, "state", off_by_one)
    with pytest.raises(ArithmeticError, match="step 1"):
        slot_ops.measure(cell, HOST, timing.NoTimer())


@pytest.mark.parametrize(("tie", "numerics", "fails"), [
    (0.01, "fast", False), (0.5, "fast", True), (0.01, "exact", True),
])  # fmt: skip
def test_texts_may_differ_at_near_ties_alone(
    tie: float, numerics: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake:
        def get_metrics(self) -> dict[str, Any]:
            return {"speculative_decoding": {"num_accepted_draft_tokens": 4}}

    @contextmanager
    def engine_of(*_: Any) -> Any:
        yield Fake()

    def generate(engine: Any, prompts: Any, count: int, **options: Any) -> list[list[int]]:
        return [[1, 2, 3], [4, 5, 6 if options else 7]]

    def gap(engine: Any, history: list[int], tokens: tuple[int, int]) -> float:
        assert history[-2:] == [4, 5]
        assert tokens == (6, 7)
        return tie

    monkeypatch.setattr(texts, "engine_of", engine_of)
    monkeypatch.setattr(texts, "generate", generate)
    monkeypatch.setattr(texts, "gap", gap)
    cell = engine_cells.TextsCell(prompts=2, new_tokens=3, numerics=numerics)
    if fails:
        with pytest.raises(ArithmeticError, match=r"texts \[1\] differ"):
            texts.measure(cell, HOST)
    else:
        record = texts.measure(cell, HOST)
        assert (record["differing"], record["not_near_ties"]) == (1, 0)


def test_random_heads_are_of_the_cells_sizes(tmp_path: Any) -> None:
    for cell in engine_cells.speculation_cells()[-3:]:
        config = spec_step.config_of(cell.tiny(), tmp_path / cell.method)
        assert config.max_draft_len + 1 == cell.rows
        assert config.synthetic_acceptance_length == cell.mean_tokens
