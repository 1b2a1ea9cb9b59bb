"""What a longer context adds to T(rows): measured against a model that keeps its own time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec_ext.engine import step_cost
from specdec_ext.engine.step_cost import measure_cost, measure_growth

ROWS = [1, 2, 4, 8, 12, 16, 32, 64, 96, 128]


class Clockwork:
    """A model whose passes take the time that `seconds` says, on a clock of its own."""

    def __init__(self, seconds: Any, max_position: int = 8192) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.max_position = max_position
        self.contexts: set[int] = set()
        self.rows: set[int] = set()

    def forward(self, plan: Any) -> None:
        self.contexts.add(int(plan.kv_len[0]))
        self.rows.add(plan.num_rows)
        self.now += self.seconds(plan.num_rows, int(plan.kv_len[0]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(seconds: Any, **options: Any) -> Any:
        model: Any = Clockwork(seconds, **options)
        monkeypatch.setattr(step_cost, "time", SimpleNamespace(perf_counter=lambda: model.now))
        return model

    return start


def pages(num_pages: int, page_size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((2, 1, num_pages, 1, page_size, 8), 7.0).unbind()  # type: ignore[return-value]


def test_each_row_reads_the_cache(clock: Any) -> None:
    model = clock(lambda rows, context: 1e-3 + rows * 1e-5 + (2e-6 + rows * 1e-7) * context)
    growth = measure_growth(model, ROWS, pages(256))
    assert growth[:8] == pytest.approx([2e-6 + n * 1e-7 for n in ROWS[:8]])
    # Behind the last measured count it is in proportion.
    assert growth[8:] == pytest.approx([growth[7] * n / 64 for n in (96, 128)])
    assert model.contexts == {128, 2048}


def test_a_short_cache_says_nothing(clock: Any) -> None:
    model = clock(lambda rows, context: 1.0)
    assert measure_growth(model, ROWS, pages(32)) == [0.0] * len(ROWS)
    assert not model.contexts
    model = clock(lambda rows, context: 1.0, max_position=500)
    assert measure_growth(model, ROWS, pages(256)) == [0.0] * len(ROWS)


def test_noise_is_never_negative(clock: Any) -> None:
    model = clock(lambda rows, context: 2.0 if context == 128 else 1.0)
    assert measure_growth(model, ROWS, pages(256)) == [0.0] * len(ROWS)


def test_a_slow_model_is_measured_briefly(clock: Any) -> None:
    model = clock(lambda rows, context: rows * (0.4 + context * 1e-4))
    growth = measure_growth(model, ROWS, pages(256))
    assert model.now < 5.0
    assert growth == pytest.approx([n * 1e-4 for n in ROWS])


def test_the_pages_that_it_reads_are_real_memory(clock: Any) -> None:
    """Untouched zeros would all be one page of the machine, in its fastest cache."""
    model = clock(lambda rows, context: 1.0)
    k, v = pages(256)
    measure_growth(model, ROWS, (k, v))
    read = -(-(2048 + 64) // 16)
    assert not k[:, :read].any() and not v[:, :read].any()
    assert k[:, read:].eq(7).all() and v[:, read:].eq(7).all()


def test_the_whole_table(clock: Any) -> None:
    model = clock(lambda rows, context: 1e-3 + rows * (1e-5 + 1e-7 * context))
    measured = measure_cost(model, pages(256))
    assert measured is not None
    rows, seconds, context_len, growth, _ = measured.columns
    assert context_len == 128.0
    assert seconds == pytest.approx([1e-3 + n * (1e-5 + 128e-7) for n in rows])
    assert growth == pytest.approx([n * 1e-7 for n in rows])
    assert [measured.at(1, 1152)(n) for n in rows] == pytest.approx(
        [1e-3 + n * (1e-5 + 1152e-7) for n in rows]
    )
    assert measured.at(2, 1152)(8) == pytest.approx(measured(8) + 2 * 1024 * 4e-7)


def test_rows_are_limited_and_a_tiny_cache_says_nothing(clock: Any) -> None:
    model = clock(lambda rows, context: 1e-3 + rows * 1e-5)
    measured = measure_cost(model, pages(256), max_rows=32)
    assert measured is not None and measured.columns[0][-1] == max(model.rows) == 32
    assert measure_cost(model, pages(1, page_size=1)) is None
