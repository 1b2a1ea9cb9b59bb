"""Predicted times of attention: the planner's dealing through the L2 cache, then the units."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu import dealing
from benchmarks.gpu.cells import MAX_DEPTH, AttentionCell
from benchmarks.gpu.machine import TENSOR_SHARE, Device, Kernel, Prediction, loops_of, slots

PLAN_BARRIERS = {True: 7, False: 9}  # whole jobs; cut ones are counted, then written
PLAN_ROUND_US = 1.3  # a sum over a block of 1024 threads and what hangs on it; measured on an H200
# A finish warp takes one head while a multiprocessor has no more than so many (kFinishWarps x
# kFinishBlocks<1, 4>); then as many tail keys, values and states are on their way at once, else as
# many of all heads. In front of them stand accesses that decide each other: the request, its
# lengths, the mask, a page.
FEW_HEADS, FINISH_BATCHES = 16, {True: (16, 16, 8), False: (8, 4, 2)}
FINISH_LOOKUPS = 6


def tail_keys(cell: AttentionCell, granule: int) -> float:
    """Keys that a row's exact tail holds on average: from W(p) to its own position."""
    from benchmarks.gpu.problem import random_tree

    parents = random_tree(cell.rows, MAX_DEPTH, seed=1)
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    positions = [cell.context + depth for depth in depths]
    tails = [p + 1 - max(0, p - MAX_DEPTH) // granule * granule for p in positions]
    return sum(tails) / len(tails)


def picked(cell: AttentionCell, device: Device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the plan of a cell's scratch and the row of the table that serves it."""
    import torch

    from specdec_ext import ops

    problem = ops.AttentionProblem(
        cell.num_heads,
        cell.num_kv_heads,
        cell.head_dim,
        getattr(torch, cell.dtype),
        getattr(torch, cell.kv_dtype),
        cell.page_size,
        num_requests=cell.requests,
        num_rows=cell.requests * cell.rows,
        max_rows=cell.rows,
        max_kv_len=cell.context + cell.rows,
    )
    limits = ops.DeviceLimits(9, 0, device.sms, device.shared_bytes, device.l2_bytes)
    plan = ops.plan_workspace(problem, limits, "fp8" if cell.fp8_math else None)
    row = next(row for row in ops.supported_attention() if row["name"] == plan["instance"])
    return plan, dict(row)


def key_block(cell: AttentionCell, consumers: int, device: Device) -> dict[str, float]:
    """Returns the microseconds that one multiprocessor needs for a key block of all its tiles."""
    widens = cell.kv_item_bytes == 1 and not cell.fp8_math
    tile = (
        f"HopperFp8Tile<{cell.head_dim}, {consumers}>"
        if cell.fp8_math
        else f"HopperTile<{cell.head_dim}, {consumers}, {str(widens).lower()}>"
    )
    found = loops_of(f"hopper_main<bf16, {tile} >")
    products = [loop["always"] for loop in found if loop["always"].get("tensor_ops")]
    steady = min(products, key=lambda counts: counts["issue"])
    math_bytes = 1 if cell.fp8_math else 2
    rate = device.tensor_flops * (2 if cell.fp8_math else 1) / device.sms
    tensor = steady["tensor_ops"] / rate * 1e6 / TENSOR_SHARE
    cycle = 1e6 / device.clock_hz
    softmax = {pipe: cycles * cycle for pipe, cycles in slots(steady).items()}
    stage = 2 * dealing.KEYS * cell.head_dim  # numbers of K and V
    # A warpgroup's products read K and V from shared memory; the copy engine has written them.
    shared = (consumers * stage * math_bytes + stage * cell.kv_item_bytes) / 128 * cycle
    needs = {"tensor": consumers * tensor, "shared memory": shared}
    needs |= {pipe: consumers * us for pipe, us in softmax.items()}
    # S, then its softmax while the values of the block before are added: one warpgroup's chain.
    needs["one tile's chain"] = tensor / 2 + max(tensor / 2, *softmax.values())
    if widens:
        # Three warps of three schedulers turn 8-bit tiles into 16-bit ones: 1 byte in, 2 out.
        bodies = [loop["body"] for loop in found if "tensor_ops" not in loop["body"]]
        turn = max(
            (c for c in bodies if "shared_bytes" in c and "load_bytes" not in c),
            key=lambda counts: counts["issue"],
        )
        trips = 3 * stage / (32 * turn["shared_bytes"]) / 3
        needs["widening"] = trips * max(slots(turn).values()) * cycle
    needs["L2 port"] = stage * cell.kv_item_bytes / device.l2_bytes_per_cycle * cycle
    return needs


def tail_slots(cell: AttentionCell, keys: float, device: Device) -> dict[str, float]:
    """Returns the microseconds that finish's loops over K and V of all tails need at least.

    A warp walks the keys of one row for the query heads of a KV head, the columns over its lanes.
    """
    heads = 1
    if not takes_one_head(cell, device):
        heads = max(h for h in (1, 2, 4, 8) if cell.group_size % h == 0)
    kv = "bf16" if cell.kv_item_bytes == 2 else "e4m3"
    lane_bytes = keys * cell.group_size / heads * cell.head_dim * cell.kv_item_bytes / 32
    cycles = dict.fromkeys(slots({}), 0.0)
    for loop in loops_of(f"finish<bf16, {kv}, {heads}, {cell.head_dim // 32}>"):
        body = loop["body"]
        if not {"load_bytes", "shared_bytes", "fp32"} <= body.keys() or "store_bytes" in body:
            continue  # neither over K nor over V
        for pipe, each in slots(loop["always"]).items():
            cycles[pipe] += lane_bytes / body["load_bytes"] * each
    return {pipe: c / (4 * device.sms) / device.clock_hz * 1e6 for pipe, c in cycles.items()}


def takes_one_head(cell: AttentionCell, device: Device) -> bool:
    """Whether a finish warp takes one query head (launch_finish_types)."""
    return cell.requests * cell.rows * cell.num_heads <= FEW_HEADS * device.sms


def finish_waits(cell: AttentionCell, keys: float, states: float, device: Device) -> float:
    """Returns the microseconds that a warp of finish waits for accesses, one after another.

    keys, states  of a row: of its tail; of a query head
    """
    of_keys, of_values, of_states = FINISH_BATCHES[takes_one_head(cell, device)]
    rounds = FINISH_LOOKUPS + -(-keys // of_keys) + -(-keys // of_values) + -(-states // of_states)
    return rounds * device.l2_latency_us


def attention(
    cell: AttentionCell, device: Device, exact: bool = True, main_writes: bool = True
) -> Prediction:
    """Returns the prediction of one attention call: plan, main pass, finish.

    main_writes  whether in fast mode the main pass writes the output of jobs that are not cut
    """
    plan, row = picked(cell, device)
    if row["family"] != "hopper":
        raise ValueError(f"{cell.name}: served by {row['name']}, which is not modelled")
    step = dealing.Step(
        cell.requests,
        cell.rows,
        cell.context,
        plan["pass_kv_heads"],
        plan["pass_group"],
        row["row_tile"],
        plan["num_blocks"],
        exact,
        MAX_DEPTH,
        row["granule"],
        tree=cell.rows > 1 and not cell.is_prompt,
    )
    passes = cell.num_kv_heads // step.kv_heads * (cell.group_size // step.group)
    dealt = dealing.deal(step, plan["max_units"], plan["max_slots"])
    block_bytes = 2 * dealing.KEYS * cell.head_dim * cell.kv_item_bytes
    traffic = dealing.simulate(dealt, step.num_blocks, device.l2_bytes // block_bytes)
    queries = cell.requests * cell.rows * cell.num_heads * cell.head_dim * 2  # read or written
    written = dealt.jobs_of_one_state if main_writes and not exact else 0
    by_main = queries * written / dealt.num_jobs  # of the output
    left = dealt.states - written
    states = passes * row["row_tile"] * (left * (cell.head_dim + 2) + written * 2) * 4
    busiest = {
        name: passes * traffic.busiest * us
        for name, us in key_block(cell, row["row_tile"] // 64, device).items()
    }
    main = Kernel(
        "main",
        {
            "HBM": (passes * traffic.read * block_bytes + queries + by_main)
            / device.hbm_bytes_per_s
            * 1e6,
            "L2": (passes * traffic.asked * block_bytes + states) / device.l2_bytes_per_s * 1e6,
            **busiest,
        },
        passes * (device.launch_us + device.first_load_us),
    )
    needs = {"HBM": (queries - by_main) / device.hbm_bytes_per_s * 1e6}
    tails = own_keys = 0.0
    if exact:
        own_keys = tail_keys(cell, row["granule"])
        keys = own_keys * cell.requests * cell.rows * cell.num_kv_heads
        tails = keys * 2 * cell.head_dim * cell.kv_item_bytes
        needs |= tail_slots(cell, keys, device)
    needs["L2"] = (tails + states) / device.l2_bytes_per_s * 1e6
    jobs = step.kv_heads * cell.requests * -(-cell.rows * step.group // row["row_tile"])
    waits = finish_waits(cell, own_keys, -(-dealt.states // jobs), device)
    finish = Kernel("finish", needs, passes * (device.launch_us + waits))
    fixed = device.launch_us + device.first_load_us + PLAN_BARRIERS[dealt.whole] * PLAN_ROUND_US
    plan_kernel = Kernel("plan", {}, passes * fixed)
    return Prediction(cell.name, cell.work().floor_us, (plan_kernel, main, finish))
