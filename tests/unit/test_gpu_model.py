"""The performance model: the dealing is the planner's, the L2 simulation, the tables, the docs."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import (
    cells,
    dealing,
    floors,
    linear,
    machine,
    model,
    model_attention,
    model_fusions,
    model_linear,
    model_ops,
)
from benchmarks.gpu.cells import AttentionCell, StepCell
from benchmarks.gpu.dealing import Step, Unit
from benchmarks.gpu.machine import Device, Kernel, Prediction

import emulators
from specdec_ext import ops

ROOT = Path(__file__).resolve().parents[2]

# -- the dealing, against the plan kernel ---------------------------------------------------------

JOB, UNIT, HEADER = struct.Struct("11i"), struct.Struct("6i"), struct.Struct("4i")


@contextmanager
def limits_of(num_sms: int) -> Iterator[None]:
    before = os.environ.get("SPECDEC_EMU_LIMITS")
    os.environ["SPECDEC_EMU_LIMITS"] = f"9.0,{num_sms},232448"
    try:
        yield
    finally:
        if before is None:
            del os.environ["SPECDEC_EMU_LIMITS"]
        else:
            os.environ["SPECDEC_EMU_LIMITS"] = before


def planned(
    requests: int, rows: int, context: int, kv_heads: int, group: int, num_sms: int, exact: bool
) -> tuple[list[tuple[int, int, int, int]], tuple[int, int, int, int], Step]:
    """What the plan kernel writes: (job, first chunk, end chunk, block) of units, its header."""
    heads, dim, page = kv_heads * group, 64, 64
    pages = -(-(context + rows) // page)
    k = torch.zeros(requests * pages, kv_heads, page, dim, dtype=torch.bfloat16)
    table = torch.arange(requests * pages, dtype=torch.int32).view(requests, pages)
    problem = ops.AttentionProblem(
        heads,
        kv_heads,
        dim,
        torch.bfloat16,
        page_size=page,
        num_requests=requests,
        num_rows=requests * rows,
        max_rows=rows,
        max_kv_len=context + rows,
    )
    with limits_of(num_sms):
        plan = ops.plan_workspace(problem, ops.device_limits("cuda-emu-fast"))
        scratch = torch.zeros(plan["total_bytes"] + 256, dtype=torch.uint8)
        scratch = scratch[-scratch.data_ptr() % 256 :]  # where the package begins to use it
        q = torch.zeros(requests * rows, heads, dim, dtype=torch.bfloat16)
        ops.spec_attention(
            q,
            k,
            k.clone(),
            table,
            torch.full((requests,), context, dtype=torch.int32),
            (torch.arange(requests + 1) * rows).to(torch.int32),
            is_tree=torch.zeros(requests, dtype=torch.uint8),
            out=torch.empty_like(q),
            scale=1.0,
            exact=exact,
            max_depth=15,
            max_rows=rows,
            max_kv_len=context + rows,
            workspace=scratch,
            backend="cuda-emu-fast",
        )
    row = next(x for x in ops.supported_attention() if x["name"] == plan["instance"])
    data = bytes(scratch.numpy())
    header = HEADER.unpack_from(data)

    def align(size: int) -> int:
        return -(-size // 256) * 256

    first = align(HEADER.size) + align(JOB.size * plan["max_jobs"])
    units = [UNIT.unpack_from(data, first + i * UNIT.size) for i in range(header[1])]
    step = Step(
        requests, rows, context, kv_heads, group, row["row_tile"], plan["num_blocks"], exact,
        granule=row["granule"], tree=False,
    )  # fmt: skip
    return [(j, a, b, block) for j, a, b, _, block, _ in units], header, step


@emulators.EMULATED
@pytest.mark.parametrize(
    ("requests", "rows", "context", "kv_heads", "group", "num_sms", "exact"),
    [
        (1, 3, 2500, 2, 2, 7, True),  # cut
        (2, 40, 700, 1, 4, 3, True),  # several tiles, the last one short
        (2, 5, 300, 2, 1, 4, False),  # whole
        (1, 5, 1030, 3, 1, 17, False),  # a block for each chunk, though shares would join two
        (1, 5, 1100, 3, 1, 17, True),
        (1, 5, 1030, 3, 1, 14, False),  # one block too few for that
        (1, 5, 12, 1, 4, 2, True),  # nothing but a tail
        (3, 40, 700, 2, 4, 7, True),  # lanes, cut; one block is left over
        (4, 40, 300, 2, 4, 8, False),  # lanes, whole
        (2, 100, 300, 2, 4, 9, False),  # lanes would leave too many blocks idle
    ],
)
def test_the_dealing_is_the_plan_kernels(
    requests: int, rows: int, context: int, kv_heads: int, group: int, num_sms: int, exact: bool
) -> None:
    units, header, step = planned(requests, rows, context, kv_heads, group, num_sms, exact)
    ours = dealing.deal(step)
    assert [(u.job, u.first_chunk, u.end_chunk, u.block) for u in ours.units] == units
    assert (ours.num_jobs, len(ours.units), ours.states, int(ours.whole)) == header


# -- what L2 keeps --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "group", "kv_heads", "rows", "context", "one_line"),
    [
        (8, 4, 8, 64, 16384, 1.0),
        (32, 4, 8, 64, 8192, 2.0),
        (32, 8, 4, 64, 8192, 3.9),
        (8, 4, 8, 84, 16384, 3.0),
        (8, 8, 8, 64, 16384, 2.0),
    ],
)
def test_sibling_tiles_read_their_stream_together(
    requests: int,
    group: int,
    kv_heads: int,
    rows: int,
    context: int,
    one_line: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    once = requests * kv_heads * (context // dealing.KEYS)

    def reads() -> tuple[float, int]:
        plan = dealing.deal(Step(requests, rows, context, kv_heads, group, 128, device.sms))
        traffic = dealing.simulate(plan, device.sms, device.l2_bytes // (2 * 64 * 128 * 2))
        return traffic.read / once, traffic.busiest

    lanes, busiest = reads()
    assert lanes <= 1.1
    monkeypatch.setattr(dealing, "MAX_LANES", 1)  # jobs on one line, row tiles fastest
    flat, least = reads()
    assert flat == pytest.approx(one_line, abs=0.05)
    assert busiest <= 1.04 * least


def test_the_cache_forgets_the_least_recently_used() -> None:
    def unit(stream: int, block: int, keys: int) -> Unit:
        return Unit(0, stream, block, 0, 1, 0, keys * dealing.KEYS, 1)

    # Two blocks in step share every read; one after the other only what the cache still holds.
    together = dealing.Deal([unit(0, 0, 10), unit(0, 1, 10)], 2, True)
    assert dealing.simulate(together, 2, 1) == dealing.Traffic(20, 10, 11)
    in_turn = dealing.Deal([unit(0, 0, 10), unit(0, 0, 10)], 2, True)
    assert dealing.simulate(in_turn, 2, 9).read == 20
    assert dealing.simulate(in_turn, 2, 10) == dealing.Traffic(20, 10, 22)


# -- predictions ----------------------------------------------------------------------------------


# The simulation of long contexts takes seconds: of those the docs' table has the targets.
LONG = re.compile(r"-b32-.*ctx(16384|65536)|-b8-.*ctx65536")


@pytest.mark.parametrize("name", [name for name in model.modelled() if not LONG.search(name)])
def test_every_modelled_cell_lies_above_its_floor(name: str) -> None:
    prediction = model.modelled()[name](Device())
    assert prediction.floor_us <= prediction.us * 1.001
    assert prediction.us < 60 * prediction.floor_us + 60
    assert prediction.bound


def test_what_bounds_a_kernel() -> None:
    device = Device()
    decode = model_attention.attention(AttentionCell(8, 1, 16384), device)
    assert decode.bound == "main: HBM"
    tree = model_attention.attention(AttentionCell(8, 64, 16384), device)
    assert tree.bound == "main: tensor"
    half = Device(hbm_bytes_per_s=floors.BANDWIDTH / 2)
    assert model_attention.attention(AttentionCell(8, 1, 16384), half).us > 1.8 * decode.us
    argmax = model_ops.step_op(StepCell("argmax", 8, 64), device)
    sample = model_ops.step_op(StepCell("sample", 8, 64), device)
    assert sample.us > argmax.us, "drawing looks at the scores again"
    assert Kernel("k", {"a": 2.0, "b": 1.0}, 0.5).us == 2.5
    assert Kernel("k", {"a": 2.0}, 3.0).bound == "latency"
    with pytest.raises(KeyError):
        machine.loops_of("renamed_kernel")


@pytest.mark.parametrize(("tokens", "most_us"), [(4096, 50), (65536, 500)])
def test_a_prompt_is_indexed_in_time(tokens: int, most_us: float) -> None:
    kernel = (ROOT / "cuda" / "step" / "commit_step.cu").read_text()
    assert f"kCommitThreads = {model_ops.ENTERING_THREADS};" in kernel
    entered = model_ops.enter_prompt(tokens, tokens + 1024, 3, Device())
    assert entered.us <= most_us
    assert model_ops.enter_prompt(2 * tokens, 2 * tokens, 3, Device()).us > 1.5 * entered.us


@emulators.EMULATED
def test_how_a_product_is_dealt() -> None:
    """Against the scratch that the package asks for, a row of every slice's sums, and against the
    table of the kernels."""
    for columns, depth in ((6144, 4096), (28672, 4096), (4096, 4096), (4096, 14336), (1024, 9000)):
        slices = model_linear.linear_slices(columns, depth)
        wanted = ops.linear_scratch_bytes(1, columns, depth, torch.bfloat16, backend="cuda-emu")
        groups = -(-depth // 4096)  # of one row on 8.0, where these are too few columns to walk all
        cut = groups if groups > 1 and columns < 120 * 32 else 1
        assert wanted == (0 if max(slices, cut) == 1 else max(slices, cut) * columns * 4)
    text = (ROOT / "cpp" / "backend" / "linear_instances.h").read_text()
    table = re.findall(r"bf16_r\w+\", DType::kBF16, (\d+), (\d+), \d+, \d+, (\d+)\}", text)
    tiles = [(model_linear.Tile(*t, "bf16"), t) for t in model_linear.LINEAR_TILES]
    assert [tuple(map(int, row)) for row in table] == [(*t, tile.stages) for tile, t in tiles]


def test_the_model_chooses_the_tiles_that_the_package_does() -> None:
    """Those that tests/simt/drive_linear.cc holds pick_linear() to, for a device of 132."""
    text = (ROOT / "tests" / "simt" / "drive_linear.cc").read_text()
    table = text.partition("int widths[][4] = {")[2].partition(";")[0]
    chosen = re.findall(r"\{(\d+), (\d+), (\d+), (\d+)\}", table)
    assert len(chosen) > 12
    for rows, columns, depth, wanted in ([int(n) for n in row] for row in chosen):
        tile = model_linear.linear_tile(rows, columns, depth, Device(), "bf16")
        assert tile.columns == wanted, (rows, columns, depth)


@pytest.mark.parametrize(
    ("name", "most"), [("qkv", 1.55), ("o", 1.4), ("gate-up", 1.06), ("down", 1.35), ("head", 1.08)]
)
def test_what_84_rows_take_beside_one(name: str, most: float) -> None:
    """With the weights of an 8B model, by the loops of the compiled kernels. An H200 measured 1.59,
    1.39, 1.14, 1.21 and 1.08: what L2 delivers decides."""
    columns, depth = linear.SHAPES[name]
    one, many = (model_ops.product(rows, columns, depth, Device()) for rows in (1, 84))
    assert many.us / one.us <= most
    assert (one.bound, many.bound) == ("HBM", "L2")


@pytest.mark.parametrize("format", list(linear.PACKED_BITS))
def test_how_a_packed_product_is_dealt(format: str) -> None:
    """Against the package's tiles and bytes, and the multiprocessors' memory."""
    text = (ROOT / "cpp" / "backend" / "linear_pick.h").read_text()
    table = text[text.index("kPackedTiles") :].partition(";")[0]
    tiles = [(int(r), int(c)) for r, c in re.findall(r"\{(\d+), (\d+)\}", table)]
    assert tuple(tiles) == model_linear.PACKED_TILES
    for rows, columns in tiles:
        tile = model_linear.Tile(rows, columns, format)
        assert 3 <= tile.stages <= 12
        assert tile.resident * (tile.stages * (tile.stage_bytes + 16) + 1024) <= 228 << 10
    weight = linear.random_packed(32, 256, format, torch.Generator().manual_seed(1))
    assert weight.format == format and weight.nbytes == 4 * model_linear.FORMATS[format][1]


@pytest.mark.parametrize("name", list(linear.SHAPES))
def test_packed_weights_take_less_time_for_few_rows(name: str) -> None:
    """By the loops of the compiled kernels; less than the bytes would allow: issue slots bound
    them."""
    columns, depth = linear.SHAPES[name]

    def us(rows: int, format: str) -> float:
        return model_ops.linear_cell(
            linear.LinearCell(name, rows, columns, depth, format), Device()
        ).us

    for format in linear.PACKED_BITS:
        most = 0.9 if format == "f8_a8" else 0.85  # a kernel more
        assert us(1, format) < most * us(1, "bf16")
        assert us(11, format) < 1.3 * us(1, format)


def test_a_result_file_stands_beside_the_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near, off = "compact-b8-m64", "rope-append-b8-m64"
    predicted = {p.cell: p.us for p in model.predict(f"^({near}|{off})$")}
    result = {
        "emulated": False,
        "stages": {
            "bench-kernel": {
                "cells": {
                    near: {"status": "ok", "us": predicted[near] * 1.2},
                    off: {"status": "ok", "us": predicted[off] * 1.5},
                    "attn-b8-m64-g4-ctx16384": {"programs": {"exact": {"us": 250.0}}},
                    "argmax-b1-m27": {"status": "hung"},
                }
            }
        },
    }
    file = tmp_path / "h200.json"
    file.write_text(json.dumps(result))
    assert model.measured_us(result)["attn-b8-m64-g4-ctx16384"] == 250.0
    assert model.main([f"^({near}|{off})$", str(file)]) == 0
    out = capsys.readouterr().out
    assert "predicted / measured" in out and "| 0.67" in out
    assert "More than 25% off: 1" in out
    assert f"- {off}: predicted" in out
    file.write_text(json.dumps({**result, "emulated": True}))
    with pytest.raises(SystemExit):
        model.main([str(file)])
    assert "it holds no times" in capsys.readouterr().err


def test_of_each_cell_the_newest_measurement_counts(tmp_path: Path) -> None:
    def write(name: str, benchmark: str, **cells: tuple[str, float]) -> None:
        found = {cell: {"measured": at, "us": us} for cell, (at, us) in cells.items()}
        data = {"benchmark": benchmark, "stages": {"bench-kernel": {"cells": found}}}
        (tmp_path / name).write_text(json.dumps(data))

    write("h200-1.json", "gpu", a=("2026-11-26T10", 1.0), b=("2026-11-26T12", 2.0))
    write("h200-2.json", "gpu", a=("2026-11-26T11", 3.0), b=("2026-11-26T11", 4.0))
    write("h200-3.json", "other", a=("2026-11-26T13", 5.0))
    write("h100-4.json", "gpu", a=("2026-11-26T13", 6.0))
    assert model.newest(tmp_path) == {"a": (3.0, "h200-2.json"), "b": (2.0, "h200-1.json")}


def test_far_is_a_quarter_of_the_measurement() -> None:
    def of(us: float) -> list[str]:
        return model.far([Prediction("c", 1.0, (Kernel("k", {}, us),))], {"c": 100.0})

    assert of(125.0) == of(75.0) == []
    assert len(of(126.0)) == len(of(74.0)) == 1


# -- the docs -------------------------------------------------------------------------------------

MICROSECONDS = re.compile(r"\d\s?(?:us\b|µs|microseconds?\b)")


def test_docs_give_no_time_of_a_gpu_but_the_models_and_the_targets() -> None:
    """Pages of kernels and devices; those of the CPU give what result files of CPUs show."""
    text = (ROOT / "docs" / "gpu.md").read_text()
    before, table, after = (
        text.partition(model.BEGIN)[0],
        text.partition(model.BEGIN)[2].partition(model.END)[0],
        text.partition(model.END)[2],
    )
    assert table.strip() == model.beside_measured(), "python -m benchmarks.gpu.model --write"
    fused = after.partition(model.FUSIONS)[2].partition(model.FUSIONS_END)[0]
    assert fused.strip() == model_fusions.table(model_fusions.fusions()), "--write"
    wanted = before.partition("## Targets")[2].partition("## ")[0]
    assert MICROSECONDS.search(wanted), "targets are wanted, not claimed"
    pages = {"docs/gpu.md": before.replace(wanted, "") + after}
    for page in [*(ROOT / "docs" / "kernels").glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        if page.name != "gpu.md" and not page.name.startswith("cpu_"):
            pages[page.relative_to(ROOT).as_posix()] = page.read_text()
    found = [
        f"{name}: {line.strip()}"
        for name, content in pages.items()
        for line in content.splitlines()
        if MICROSECONDS.search(line)
    ]
    assert not found


def test_what_joining_kernels_would_save() -> None:
    """Launches and bytes: of a call in fast mode the states, of a step a launch for each layer."""
    device = Device()
    found = {(f.what, f.where): f for f in model_fusions.fusions(device)}
    assert len(found) == 11
    main = [f for (what, _), f in found.items() if what.startswith("main")]
    few, many, of_short_texts = main
    assert many.saved_us == pytest.approx(4 * few.saved_us), "states of four times the requests"
    assert of_short_texts.saved_us == pytest.approx(many.saved_us), "as many states"
    assert of_short_texts.of_us < many.of_us / 4
    sums = [f for (what, _), f in found.items() if what == model_fusions.SUMS]
    assert {f.worth_it for f in [*main, *sums]} == {"built"}
    for f in sums:
        assert 3 * 32 * device.launch_us < f.saved_us < 0.03 * f.of_us
    for (what, where), f in found.items():
        if f in sums:
            continue
        assert 0.0 < f.saved_us < (0.05 if f is of_short_texts else 0.01) * f.of_us
        if what.startswith("append"):
            assert f.saved_us > 32 * device.launch_us
        elif not where.startswith("attn"):
            assert f.saved_us < model_fusions.WORTH_US
    slow = {(f.what, f.where): f for f in model_fusions.fusions(Device(launch_us=3.0))}
    assert all(slow[key].saved_us >= f.saved_us for key, f in found.items())


def test_the_table_shows_every_target() -> None:
    assert set(model.TARGETS) <= set(model.modelled())
    groups = {g for c in cells.attention_cells() if c.name in model.TARGETS for g in c.groups}
    assert {"G1", "G2", "G3", "G4", "G5"} <= groups
