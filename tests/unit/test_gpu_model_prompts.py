"""From how many rows on packed weights are unpacked for torch's products, by the model."""

from __future__ import annotations

import pytest
from benchmarks.gpu import model, model_prompts
from benchmarks.gpu.linear import PROMPT_ROWS, SHAPES
from benchmarks.gpu.machine import Device

from specdec_ext.models.device_unpacked import FEWEST_ROWS, FEWEST_ROWS_E4M3


@pytest.mark.parametrize("format", list(PROMPT_ROWS))
def test_the_fewest_rows_are_where_it_begins_to_be_worth_it(format: str) -> None:
    fewest = FEWEST_ROWS_E4M3 if format == "f8_a8" else FEWEST_ROWS
    device = Device()
    for rows in (fewest, 1024, 2048, 8192):
        ours, unpacked = model_prompts.both_ways(rows, format, device)
        assert unpacked < ours, rows
    ours, unpacked = model_prompts.both_ways(256, format, device)
    assert unpacked > ours


def test_the_unpacking_is_bytes() -> None:
    """Twice the elements, twice its time; of e4m3 half as many are written, and x is narrowed."""
    device = Device()
    columns, depth = SHAPES["down"]
    half, elements, numbers = (
        model_prompts.unpacked_product(512, n, depth, device, format)
        for n, format in ((columns // 2, "q8_0"), (columns, "q8_0"), (columns, "f8_a8"))
    )
    assert [kernel.name for kernel in elements] == ["unpack", "torch"]
    assert [kernel.name for kernel in numbers] == ["e4m3_rows", "unpack", "torch"]
    assert elements[0].needs["HBM"] == pytest.approx(2 * half[0].needs["HBM"])
    moved = columns * depth * (8.5 / 8 + 1) / device.hbm_bytes_per_s * 1e6
    assert numbers[1].needs["HBM"] == pytest.approx(moved)
    assert numbers[2].needs["tensor"] == pytest.approx(elements[1].needs["tensor"] / 2)


def test_the_page_shows_the_table() -> None:
    shown = model.PAGE.read_text().partition(model.PROMPTS)[2].partition(model.PROMPTS_END)[0]
    assert shown.strip() == model_prompts.table(), "python -m benchmarks.gpu.model --write"
