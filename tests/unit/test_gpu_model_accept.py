"""Predictions of drawing tokens and accepting drafts: in reads of the scores."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.gpu import model_accept, model_ops
from benchmarks.gpu.cells import StepCell
from benchmarks.gpu.machine import Device

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", ["sample", "match"])
@pytest.mark.parametrize(("requests", "rows"), [(1, 64), (8, 8), (8, 64)])
def test_rows_are_drawn_from_and_matched_within_three_reads(
    kind: str, requests: int, rows: int
) -> None:
    """64 rows of 128k scores, whichever path they hold: no row, and no request, is one block's."""
    prediction = model_ops.step_op(StepCell(kind, requests, rows), Device())
    most = 3.0
    assert prediction.us <= most * prediction.floor_us
    slower = Device(clock_hz=Device().clock_hz / 2)
    if kind == "sample":  # of a path's rows alone memory decides
        assert model_ops.step_op(StepCell(kind, requests, rows), slower).us > 1.3 * prediction.us


@pytest.mark.parametrize(
    ("kind", "cut", "most"),
    [
        ("sample", "top_k", 3.2),
        ("sample", "top_p", 3.2),
        ("match", "top_k", 2.8),
        ("match", "top_p", 3.1),
    ],
)
def test_rows_that_are_cut_cost_one_list_more(kind: str, cut: str, most: float) -> None:
    """64 rows whose cuts lie within their lists: what the last row's list takes misses the target,
    3, where rows are sampled, and by a little where top_p's are matched."""
    cell, device = StepCell(kind, 1, 64), Device()
    plain, prediction = (model_ops.step_op(cell, device, law) for law in ("", cut))
    assert plain.us < prediction.us <= most * prediction.floor_us
    needs = prediction.kernels[1].needs
    weighs = cut == "top_p"  # top_k alone needs no row's mass
    assert (needs["issue"] > needs["HBM"]) == weighs
    lists = (ROOT / "cuda" / "accept" / "row_lists.cuh").read_text()
    reads = f"kGroupReads = {model_accept.GROUP_READS}, kKeptReads = {model_accept.KEPT_READS};"
    assert reads in lists


ACCEPT_MOST = 3.0


def test_rejection_holds_its_drafts_while_rows_are_weighed() -> None:
    """64 rows, a path of four: of the sums and what is left nothing is one block's."""
    one = model_ops.step_op(StepCell("accept", 1, 64), Device())
    assert one.us <= ACCEPT_MOST * one.floor_us
    match = model_ops.step_op(StepCell("match", 1, 64), Device())
    assert one.kernels[1].needs["HBM"] > match.kernels[1].needs["HBM"], "it reads probabilities"
    sample = model_ops.step_op(StepCell("sample", 1, 64), Device())
    assert match.us < sample.us, "most rows are on no path"
    # What is decided last has nothing to hide behind: 8 trees of 8 rows miss the target, 3.
    many = model_ops.step_op(StepCell("accept", 8, 8), Device())
    assert 3.0 * many.floor_us < many.us <= 4.4 * many.floor_us
    assert model_ops.step_op(StepCell("accept", 8, 64), Device()).us <= 2.0 * 8 * one.floor_us


CHAIN = [-1, 0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_what_is_done_of_rows_that_no_path_leads_to() -> None:
    reach = model_accept.reach
    # Known at once: the path's four drafts, its end, and the draft rejected there.
    assert reach([CHAIN], 0.5, True) == model_accept.Reach(6, 5, 1, 1, 6.0, 4)
    assert reach([CHAIN], 0.5, False) == model_accept.Reach(5, 0, 0, 0, 4.5, 4)
    # Known too late: everything is done, and each row behind the path rejects its draft.
    late = reach([CHAIN], 100.0, True)
    assert (late.weighed, late.summed, late.subtracted) == (10, 9, 5)
    # Two siblings at the end: the second is held against what the first has left, so both are read.
    fork = reach([[-1, 0, 1, 2, 3, 4, 4]], 0.0, True)
    assert (fork.summed, fork.subtracted, fork.left) == (6, 3, 2)
    both = reach([CHAIN, CHAIN], 0.5, True)
    assert (both.weighed, both.summed, both.end) == (12, 10, 16.0)
