"""Predictions of drawing tokens and accepting drafts: in reads of the scores."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from benchmarks.gpu import model_accept, model_lists, model_ops
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
        ("sample", "top_k", 3.8),
        ("sample", "top_p", 5.0),
        ("match", "top_k", 4.2),
        ("match", "top_p", 5.4),
        ("accept", "top_k", 4.4),
        ("accept", "top_p", 4.7),
    ],
)
def test_rows_that_are_cut_miss_the_target(kind: str, cut: str, most: float) -> None:
    """64 rows whose cuts lie within their lists. The last row's list is one block's work that hides
    behind nothing: all of these miss the target, 3."""
    cell, device = StepCell(kind, 1, 64), Device()
    plain, prediction = (model_ops.step_op(cell, device, law) for law in ("", cut))
    assert max(3.0 * prediction.floor_us, plain.us) < prediction.us <= most * prediction.floor_us
    lists = (ROOT / "cuda" / "accept" / "row_lists.cuh").read_text()
    reads = f"kGroupReads = {model_lists.GROUP_READS}, kKeptReads = {model_lists.KEPT_READS};"
    assert reads in lists


@pytest.mark.parametrize(("cut", "least", "most"), [("top_k", 1.9, 2.1), ("top_p", 2.85, 3.0)])
def test_what_is_left_of_three_reads_for_the_last_list(cut: str, least: float, most: float) -> None:
    """Launches, first loads and the work of all multiprocessors, waiting for nothing: with top_p,
    whose rows have to be weighed, that is the target already."""
    device = Device()
    prediction = model_ops.step_op(StepCell("sample", 1, 64), device, cut)
    launches = len(prediction.kernels) * device.launch_us + 2 * device.first_load_us
    work = max(prediction.kernels[1].needs.values()) + launches
    assert least * prediction.floor_us < work < most * prediction.floor_us


@pytest.mark.parametrize("cut", ["top_k", "top_p"])
def test_every_loop_of_a_list_costs_time(cut: str) -> None:
    """A block's and, since each row has a list, that of all multiprocessors."""
    device = Device()
    counts = model_lists.cell_counts(StepCell("sample", 1, 64).vocab, cut)
    trips = model_lists.list_trips(counts, cut)
    if cut == "top_p":
        trips = trips + model_lists.cut_trips(counts, cut)
    whole, needs = model_lists.trips_us(trips, 0, device), model_lists.trips_needs(trips, device)
    for left_out in range(len(trips)):
        others = trips[:left_out] + trips[left_out + 1 :]
        assert trips[left_out].between or model_lists.trips_us(others, 0, device) < whole
        assert model_lists.trips_needs(others, device)["issue"] < needs["issue"]
    tasks = model_accept.tasks_of(StepCell("sample", 1, 64).vocab, device, "sample", cut)
    one = model_accept.reach([[-1]], tasks, False, cut)
    many = model_accept.reach([[-1]] * 64, tasks, False, cut)
    assert (one.listed, many.listed) == (1, 64)
    assert many.needs["issue"] == pytest.approx(64 * one.needs["issue"])
    assert many.needs["issue"] > 64 * tasks.listing["issue"]


def test_lists_of_rows_that_nobody_wants_are_made_until_that_is_known() -> None:
    """By top_k a row is never weighed: a search, and its list at once."""
    tasks = model_accept.Tasks(
        search={"x": 1.0}, weigh={"x": 1.0}, listing={"x": 0.5}, list_us=2.0, mark_us=1.0
    )
    star = [-1, *[0] * 9]
    found = model_accept.reach([star], tasks, False, "top_k")
    # Row 0 is searched at 1.0 and its share of the list done at 1.5, its token known at 3.5, a mark
    # at 4.5: when two others, one of them unwanted, have been searched and listed.
    assert (found.weighed, found.listed) == (0, 3)
    late = model_accept.reach([star], dataclasses.replace(tasks, list_us=50.0), False, "top_k")
    assert late.listed == 10
    assert late.end == pytest.approx(late.now + 50.0), "the last list is waited for, wanted or not"
    by_mass = model_accept.reach([star], tasks, False, "top_p")
    assert by_mass.weighed >= by_mass.listed > 1


def test_the_order_of_tasks() -> None:
    """RowOrder of cuda/accept/row_laws.cu: each row once of each kind, four and then twos ahead."""
    order = list(model_accept.turns(12, 1 << 20))
    assert sorted(order) == [(n, s) for n in range(12) for s in (False, True)]
    assert [n for n, searches in order if searches] == list(range(12))
    assert order[:8] == [(n, True) for n in range(4)] + [
        (4, True), (5, True), (0, False), (6, True)
    ]  # fmt: skip
    few = list(model_accept.turns(12, 1 << 30))  # nothing fits: one for one
    assert few[4:8] == [(4, True), (0, False), (5, True), (1, False)]


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


def done(found: model_accept.Reach) -> tuple[int, ...]:
    return found.weighed, found.summed, found.subtracted, found.left


def test_what_is_done_of_rows_that_no_path_leads_to() -> None:
    def reach(trees: list[list[int]], late: float, holds: bool) -> model_accept.Reach:
        tasks = model_accept.Tasks({}, {"x": 1.0}, draw_us=late / 2, mark_us=late / 2)
        return model_accept.reach(trees, tasks, holds)

    # Known at once: the path's four drafts, its end, and the draft rejected there.
    assert done(reach([CHAIN], 0.0, True)) == (6, 5, 1, 1)
    assert done(reach([CHAIN], 0.0, False)) == (5, 0, 0, 0)
    # The mark comes when the row behind the path has been begun; its token is waited for.
    assert done(reach([CHAIN], 0.5, False))[0] == 6
    assert reach([CHAIN], 0.5, False).end == 6.25
    # Known too late: everything is done, and each row behind the path rejects its draft.
    assert done(reach([CHAIN], 100.0, True)) == (10, 9, 5, 5)
    # Two siblings at the end: the second is held against what the first has left, so both are read.
    fork = reach([[-1, 0, 1, 2, 3, 4, 4]], 0.0, True)
    assert done(fork)[1:] == (6, 3, 2)
    both = reach([CHAIN, CHAIN], 0.0, True)
    assert done(both)[:2] == (12, 10)
    # Blocks that have begun with a turn do not ask again.
    tasks = model_accept.Tasks({}, {"x": 1.0}, in_flight=6)  # three rows, each searched and weighed
    assert done(model_accept.reach([CHAIN], tasks, False)) == (8, 0, 0, 0)
