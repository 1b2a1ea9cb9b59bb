"""Which attention kernel serves a call, and its scratch: pure functions, over made-up devices."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re

import pytest
import torch

from specdec_ext.ops import (
    AttentionProblem,
    DeviceLimits,
    pick_attention,
    plan_workspace,
    supported_attention,
)

A100 = DeviceLimits(8, 0, 108, 163 << 10, 40 << 20)
RTX3090 = DeviceLimits(8, 6, 82, 99 << 10, 6 << 20)
RTX4090 = DeviceLimits(8, 9, 128, 99 << 10, 72 << 20)
H200 = DeviceLimits(9, 0, 132, 227 << 10, 50 << 20)
B200 = DeviceLimits(10, 0, 148, 227 << 10, 126 << 20)
T4 = DeviceLimits(7, 5, 40, 64 << 10, 4 << 20)
DEVICES = {"A100": A100, "3090": RTX3090, "4090": RTX4090, "H200": H200, "B200": B200}
every_device = pytest.mark.parametrize("limits", DEVICES.values(), ids=DEVICES)

BF16, F16, F8, F32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32
FAST_HEAD_DIMS = (64, 80, 96, 128, 256)
LIMIT = 256 << 20
PROBLEM = AttentionProblem(
    num_heads=32, num_kv_heads=8, head_dim=128, num_rows=64, max_rows=64, max_kv_len=16448
)
ROWS = {row["name"]: row for row in supported_attention()}


def with_(problem: AttentionProblem = PROBLEM, /, **changed: object) -> AttentionProblem:
    return dataclasses.replace(problem, **changed)  # type: ignore[arg-type]


@every_device
@pytest.mark.parametrize("head_dim", FAST_HEAD_DIMS)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kv_dtype", [None, F8])
def test_every_fast_head_dim_has_a_kernel_on_every_device(
    limits: DeviceLimits, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    for page_size in (16, 32, 64, 128):
        problem = with_(head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size)
        row = ROWS[pick_attention(problem, limits)]
        assert row["head_dim"] == head_dim
        assert row["dtype"] == str(dtype).removeprefix("torch.")
        assert row["kv_dtype"] == str(kv_dtype or dtype).removeprefix("torch.")
        assert row["math_dtype"] == row["dtype"]
        assert row["smem_bytes"] <= limits.shared_bytes
        assert row["family"] == "ampere" or (limits.major, limits.minor) == (9, 0)


@every_device
def test_the_arithmetic_does_not_depend_on_the_number_of_rows(limits: DeviceLimits) -> None:
    for head_dim, dtype, kv_dtype in itertools.product(FAST_HEAD_DIMS, (BF16, F16), (None, F8)):
        problem = with_(head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
        rows = [
            ROWS[pick_attention(with_(problem, max_rows=n, num_rows=n * b, num_requests=b), limits)]
            for n in (1, 3, 11, 27, 64, 84, 128, 2000)
            for b in (1, 8, 64)
        ]
        for field in ("family", "granule", "math_dtype"):
            assert len({row[field] for row in rows}) == 1, field  # type: ignore[literal-required]


@every_device
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_e4m3_operands_are_chosen_by_name_alone(limits: DeviceLimits, dtype: torch.dtype) -> None:
    problem = with_(dtype=dtype, kv_dtype=F8)
    assert ROWS[pick_attention(problem, limits)]["math_dtype"] != "float8_e4m3fn"
    if (limits.major, limits.minor) != (9, 0):
        with pytest.raises(ValueError, match=r"instance = \"fp8\": no kernel .* device"):
            pick_attention(problem, limits, "fp8")
        return
    row = ROWS[pick_attention(problem, limits, "fp8")]
    assert (row["math_dtype"], row["kv_dtype"]) == ("float8_e4m3fn", "float8_e4m3fn")
    assert (row["granule"], row["row_tile"]) == (32, 128)
    one = with_(problem, max_rows=1, num_rows=1)
    assert ROWS[pick_attention(one, limits, "fp8")]["row_tile"] == 64
    for other in ({"head_dim": 64}, {"kv_dtype": dtype}, {"page_size": 8}, {"aligned": False}):
        with pytest.raises(ValueError, match=r"instance = \"fp8\": no kernel"):
            pick_attention(with_(problem, **other), limits, "fp8")


@every_device
def test_the_row_tile_follows_the_rows(limits: DeviceLimits) -> None:
    """The fewest row blocks in the smallest tile; on 9.0 a block of few rows costs as 110 do."""
    for n in (1, 4, 5, 16, 17, 32, 48, 64, 84, 128):
        row = ROWS[pick_attention(with_(max_rows=n, num_rows=n), limits)]
        tiles = sorted(
            other["row_tile"]
            for other in ROWS.values()
            if all(
                other[field] == row[field]  # type: ignore[literal-required]
                for field in ("family", "dtype", "kv_dtype", "math_dtype", "head_dim")
            )
            and other["smem_bytes"] <= limits.shared_bytes
        )
        least = 110 if row["family"] == "hopper" else 1
        blocks = [-(-n * 4 // tile) for tile in tiles]
        if least > 1:
            blocks = [count * max(tile, least) for count, tile in zip(blocks, tiles, strict=True)]
        assert row["row_tile"] == tiles[blocks.index(min(blocks))]
    if row["family"] == "hopper":  # G1 of the scoreboard: 256 rows in two blocks
        assert ROWS[pick_attention(with_(max_rows=64, num_rows=64), limits)]["row_tile"] == 128


@every_device
@pytest.mark.parametrize(
    "changed",
    [
        {"head_dim": 8},
        {"head_dim": 72},
        {"head_dim": 248},
        {"page_size": 8},
        {"page_size": 1},
        {"dtype": F32},
        {"kv_dtype": F32},
        {"dtype": F16, "kv_dtype": BF16},
        {"aligned": False},
    ],
)
def test_the_generic_kernel_serves_the_rest(
    limits: DeviceLimits, changed: dict[str, object]
) -> None:
    problem = with_(**changed)
    assert pick_attention(problem, limits) == "generic"
    assert plan_workspace(problem, limits)["total_bytes"] == 0


def test_an_instance_for_small_shared_memory_exists() -> None:
    for head_dim, dtype, kv_dtype in itertools.product(FAST_HEAD_DIMS, (BF16, F16), (None, F8)):
        problem = with_(head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
        assert ROWS[pick_attention(problem, RTX3090)]["smem_bytes"] <= 99 << 10
    tiny = DeviceLimits(8, 6, 10, 32 << 10, 1 << 20)
    assert pick_attention(PROBLEM, tiny) == "generic"


def test_an_old_device_is_refused() -> None:
    text = "the device has compute capability 7.5: these kernels need 8.0 or newer"
    for problem in (PROBLEM, with_(head_dim=8)):
        with pytest.raises(ValueError, match=re.escape(text)):
            pick_attention(problem, T4)


@every_device
def test_a_kernel_can_be_named(limits: DeviceLimits) -> None:
    assert pick_attention(PROBLEM, limits, "generic") == "generic"
    for name, row in ROWS.items():
        problem = with_(
            head_dim=row["head_dim"],
            dtype=getattr(torch, row["dtype"]),
            kv_dtype=getattr(torch, row["kv_dtype"]),
        )
        hopper_elsewhere = row["family"] == "hopper" and (limits.major, limits.minor) != (9, 0)
        if hopper_elsewhere or row["smem_bytes"] > limits.shared_bytes:
            with pytest.raises(ValueError, match=f'instance = "{name}": it needs'):
                pick_attention(problem, limits, name)
        else:
            assert pick_attention(problem, limits, name) == name


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"head_dim": 64}, "it is for another head_dim (q bfloat16, pages bfloat16, head_dim 64"),
        ({"dtype": F16}, "q has another dtype (q float16"),
        ({"kv_dtype": F8}, "the pages have another dtype"),
        ({"page_size": 8}, "its pages hold at least 16 tokens"),
        ({"aligned": False}, "rows have to begin at multiples of 16 bytes"),
    ],
)
def test_a_named_kernel_that_cannot_serve_is_refused(changed: dict[str, object], text: str) -> None:
    name = pick_attention(PROBLEM, A100)
    with pytest.raises(ValueError, match=re.escape(f'instance = "{name}": {text}')):
        pick_attention(with_(**changed), A100, name)


def test_what_makes_no_sense_is_refused() -> None:
    for problem, text in (
        (with_(num_heads=30), "num_heads = 30: a multiple of num_kv_heads = 8 is needed"),
        (with_(dtype=torch.int8), 'dtype = "int8": there are float32, bfloat16'),
        (with_(kv_dtype=torch.int8), 'kv_dtype = "int8": there are'),
        (with_(num_requests=0), "num_requests = 0"),
        (with_(max_rows=-1), "max_rows = -1"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            pick_attention(problem, A100)
    with pytest.raises(ValueError, match='instance = "best": no such kernel'):
        pick_attention(PROBLEM, A100, "best")
    with pytest.raises(ValueError, match="at least one SM, nothing negative"):
        DeviceLimits(8, 0, 0, 1, 1)


# -- Scratch ---------------------------------------------------------------------------------------


EXTREMES = {
    "B=512, ctx 128k": with_(num_requests=512, num_rows=512, max_rows=1, max_kv_len=131072),
    "B=512, M=64": with_(num_requests=512, num_rows=512 * 64, max_rows=64, max_kv_len=131072),
    "B=512, M=128, MHA": with_(
        num_kv_heads=32, num_requests=512, num_rows=512 * 128, max_rows=128, max_kv_len=131072
    ),
    "prefill of 16k rows": with_(num_rows=16384, max_rows=16384, max_kv_len=131072),
    "prefill, MQA": with_(num_kv_heads=1, num_rows=16384, max_rows=16384, max_kv_len=131072),
    "prefill, 128 heads of 256": with_(
        num_heads=128, head_dim=256, num_rows=16384, max_rows=16384, max_kv_len=16384
    ),
    "B=1, ctx 128k": with_(max_kv_len=131072),
    "B=1, M=1": with_(num_rows=1, max_rows=1, max_kv_len=1),
    "nothing": with_(num_rows=0, max_rows=0, max_kv_len=0),
}


@every_device
@pytest.mark.parametrize("problem", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("kv_dtype", [None, F8])
def test_scratch_is_bounded_and_holds_every_job(
    limits: DeviceLimits, problem: AttentionProblem, kv_dtype: torch.dtype | None
) -> None:
    check_plan(with_(problem, kv_dtype=kv_dtype), limits)


def check_plan(problem: AttentionProblem, limits: DeviceLimits) -> None:
    plan = plan_workspace(problem, limits)
    assert 0 < plan["total_bytes"] <= LIMIT
    row = ROWS[plan["instance"]]
    group = problem.num_heads // problem.num_kv_heads
    assert 1 <= plan["pass_kv_heads"] <= problem.num_kv_heads
    assert 1 <= plan["pass_group"] <= group
    assert plan["pass_group"] == group or plan["pass_kv_heads"] == 1
    # Full requests, one-row requests and anything between, as far as the rows go.
    rng = random.Random(0)
    for _ in range(20):
        left, rows = problem.num_rows, []
        for b in range(problem.num_requests):
            most = min(problem.max_rows, left - min(left, problem.num_requests - b - 1))
            rows.append(rng.choice([most, min(1, most), rng.randint(0, max(most, 0))]))
            left -= rows[-1]
        blocks = sum(-(-n * plan["pass_group"] // row["row_tile"]) for n in rows)
        assert plan["pass_kv_heads"] * blocks <= plan["max_jobs"]
    assert plan["max_slots"] >= plan["max_jobs"]
    assert plan["max_units"] >= plan["max_jobs"]
    blocks_per_sm = plan["num_blocks"] // limits.num_sms
    assert plan["num_blocks"] == blocks_per_sm * limits.num_sms
    assert 1 <= blocks_per_sm <= row["blocks_per_sm"]
    assert blocks_per_sm * (row["smem_bytes"] + 1024) <= limits.shared_bytes + 1024
    states = plan["max_slots"] * row["row_tile"] * (problem.head_dim + 2) * 4
    assert states < plan["total_bytes"] <= states + (16 << 20)


@pytest.mark.parametrize("seed", range(200))
def test_scratch_of_random_problems(seed: int) -> None:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 4, 8, 32])
    max_rows = rng.choice([1, 27, 64, 128, 2048, 16384])
    requests = rng.choice([1, 3, 8, 64, 512])
    num_rows = min(requests * max_rows, rng.choice([16384, 65536]))
    problem = AttentionProblem(
        num_heads=kv_heads * rng.choice([1, 2, 4, 7, 8, 16]),
        num_kv_heads=kv_heads,
        head_dim=rng.choice(FAST_HEAD_DIMS),
        dtype=rng.choice([BF16, F16]),
        kv_dtype=rng.choice([None, F8]),
        num_requests=requests,
        num_rows=num_rows,
        max_rows=max_rows,
        max_kv_len=rng.choice([1, 600, 4096, 131072]),
    )
    check_plan(problem, rng.choice(list(DEVICES.values())))


def test_a_job_can_be_cut_into_all_its_chunks_where_that_fits() -> None:
    """One request, one tile: every chunk of 16k keys can leave a state of its own."""
    plan = plan_workspace(with_(num_kv_heads=1, num_heads=1, max_kv_len=16384), H200)
    assert plan["max_jobs"] == 1
    assert plan["max_slots"] == 28  # 8 chunks of 256, 12 of 512, 8 of 1024


def test_more_rows_than_the_scratch_can_hold_are_refused() -> None:
    rows = 1 << 20
    problem = with_(num_rows=rows, max_rows=rows, max_kv_len=rows)
    with pytest.raises(ValueError, match=f"q has {rows} rows: the states of one head take"):
        plan_workspace(problem, H200)


def test_the_table_is_printed() -> None:
    text = str(supported_attention())
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["name", "family", "dtype", "kv_dtype"]
    assert len(lines) == len(ROWS) + 2
    for line, row in zip(lines[1:], ROWS.values(), strict=False):
        assert line.split()[0] == row["name"]
        assert line.split()[7] == str(row["threads"])
    assert "generic" in lines[-1]
    assert len({len(line.split()) for line in lines[:-1]}) == 1
