"""Writes the instances of the attention kernels; --check fails if what is checked in is stale.

One row of the table below is one compiled kernel. From it come its explicit instantiation
(cuda/attention/instances/*.cu), its entry in the table that pick() chooses from
(cpp/backend/attention/instances.h) and its launching function (launchers.h, launchers.cc). The
numbers are repeated here because the table must be readable without a GPU compiler; each generated
file asserts that its kernels agree.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from linear_instances import DTYPES, ENUMS, HEADER, LINEAR_FOLDER, linear_files

ROOT = Path(__file__).resolve().parent.parent
TABLE = "cpp/backend/attention/instances.h"
FOLDER = "cuda/attention/instances"

ROW_VIEW = 32  # bytes of what a block of the Hopper family knows about a row (kRowViewBytes)
BYTES = {"bf16": 2, "f16": 2, "e4m3": 1}
BLOCK_KEYS = 64


@dataclass(frozen=True)
class Instance:
    """A kernel: what it is for, and what a block of it takes."""

    family: str
    dtype: str
    kv: str
    head_dim: int
    row_tile: int
    threads: int
    smem_bytes: int
    blocks_per_sm: int
    file: str  # that instantiates it
    launcher: str  # C++ name of the launching template with its arguments
    facts: tuple[tuple[str, int], ...]  # C++ constants and what they have to be
    math: str = ""  # operands of the matrix instructions, if not of dtype

    @property
    def name(self) -> str:
        suffix = "_fp8" if self.math == "e4m3" else ""
        return f"{self.family}_{self.dtype}_{self.kv}_k{self.head_dim}_r{self.row_tile}{suffix}"

    @property
    def granule(self) -> int:
        return 32 if self.math == "e4m3" else 16


def ampere(dtype: str, kv: str, head_dim: int, row_tile: int) -> Instance:
    """A row of the Ampere family; the formulas are those of ampere_config.cuh."""
    widen = kv == "e4m3"
    stages = 1 if head_dim > 128 else 2 if head_dim > 64 else 3
    tile = BLOCK_KEYS * head_dim * BYTES[dtype]
    operands = tile if widen and head_dim > 128 else 2 * tile * (1 if widen else stages)
    raw = stages * 2 * BLOCK_KEYS * head_dim if widen else 0
    smem = row_tile * head_dim * BYTES[dtype] + operands + raw + 128 * 8
    threads = row_tile * 2
    blocks = {32: 3, 128: 2}.get(threads, 1)
    config = f"AmpereConfig<{DTYPES[dtype]}, {DTYPES[kv]}, {head_dim}, {row_tile}>"
    facts = (
        (f"{config}::kThreads", threads),
        (f"{config}::kSmemBytes", smem),
        (f"{config}::kBlocksPerSm", blocks),
    )
    size = "wide" if head_dim > 128 else "narrow" if head_dim < 128 else "k128"
    return Instance(
        "ampere", dtype, kv, head_dim, row_tile, threads, smem, blocks,
        f"ampere_{dtype}_{kv}_{size}", f"launch_ampere<{config}>", facts,
    )  # fmt: skip


def hopper(dtype: str, kv: str, head_dim: int, consumers: int) -> Instance:
    """A row of the Hopper family; the formulas are those of hopper_tile.h."""
    widen = kv == "e4m3"
    tile = -(-head_dim // 64) * 64 * BLOCK_KEYS * 2
    load = BLOCK_KEYS * head_dim
    row_tile = 64 * consumers
    in_registers = head_dim <= 64 or (head_dim <= 128 and consumers <= 2)
    query = 16 if in_registers else consumers * tile
    fold = 16 if in_registers and not (widen and consumers > 1) else row_tile * head_dim * 4
    rows = row_tile * ROW_VIEW
    room = 227 * 1024 - query - fold - rows - 512
    if widen:
        stages = min(3, (room - 4 * load) // (2 * tile))
        raw_stages, raw = min(5, (room - stages * 2 * tile) // (2 * load)), load
    else:
        stages, raw_stages, raw = min(6, room // (2 * tile)), 1, 16
    smem = 0
    for part, alignment in (
        (2 * stages * tile + query, 1024), (raw_stages * raw, 128), (raw_stages * raw, 128),
        (fold, 16), (rows, 16), (40 * stages + 32 * raw_stages, 8), (0, 1024),
    ):  # fmt: skip
        smem = -(-smem // alignment) * alignment + part
    threads = 128 * (consumers + (2 if widen else 1))
    tile_type = f"HopperTile<{head_dim}, {consumers}, {str(widen).lower()}>"
    facts = (
        (f"{tile_type}::kRowTile", row_tile),
        (f"{tile_type}::kThreads", threads),
        (f"hopper_shared_bytes<{tile_type}>()", smem),
    )
    size = "wide" if head_dim > 128 else "narrow" if head_dim < 128 else "k128"
    return Instance(
        "hopper", dtype, kv, head_dim, row_tile, threads, smem, 1,
        f"hopper_{dtype}_{kv}_{size}", f"launch_hopper<{DTYPES[dtype]}, {tile_type}>", facts,
    )  # fmt: skip


def hopper_fp8(dtype: str, head_dim: int, consumers: int) -> Instance:
    """The same with e4m3 operands; the formulas are those of hopper_fp8_tile.h."""
    stages, value_stages = 6, 4
    tile = BLOCK_KEYS * head_dim
    row_tile = 64 * consumers
    fold = row_tile * head_dim * 4
    smem = (2 * stages + value_stages) * tile + fold + row_tile * ROW_VIEW
    smem = -(-(smem + 32 * stages + 16 * value_stages) // 1024) * 1024
    threads = 128 * (consumers + 1)
    tile_type = f"HopperFp8Tile<{head_dim}, {consumers}>"
    facts = (
        (f"{tile_type}::kRowTile", row_tile),
        (f"{tile_type}::kThreads", threads),
        (f"hopper_shared_bytes<{tile_type}>()", smem),
    )
    return Instance(
        "hopper", dtype, "e4m3", head_dim, row_tile, threads, smem, 1, f"hopper_{dtype}_e4m3_fp8",
        f"launch_hopper<{DTYPES[dtype]}, {tile_type}>", facts, "e4m3",
    )  # fmt: skip


# Row tiles of the Ampere family: one warp for plain decoding and small drafts, four for trees, and
# eight where so many rows read K/V (prefill) that reading it twice as often would show. A head 256
# wide has no room for eight, and neither 80, 96 nor e4m3 pages are worth more kernels.
def table() -> list[Instance]:
    rows = []
    for dtype in ("bf16", "f16"):
        for kv in (dtype, "e4m3"):
            for head_dim in (64, 80, 96, 128, 256):
                large = head_dim in (64, 128) and kv == dtype
                for row_tile in (16, 64, 128) if large else (16, 64):
                    rows.append(ampere(dtype, kv, head_dim, row_tile))
    # The Hopper family has as many warpgroups of 64 rows as registers and shared memory allow,
    # fewer where no common model needs them.
    for dtype in ("bf16", "f16"):
        for kv in (dtype, "e4m3"):
            for head_dim in (64, 80, 96, 128, 256):
                large = head_dim in (64, 128)
                most = 1 if head_dim > 128 else 2 + large if kv == dtype else 1 + large
                rows += [hopper(dtype, kv, head_dim, n + 1) for n in range(most)]
    # e4m3 operands, which are chosen by name alone: the head_dim of nearly all models.
    rows += [hopper_fp8(dtype, 128, n) for dtype in ("bf16", "f16") for n in (1, 2)]
    return rows


FINISH = [("bf16", "bf16"), ("bf16", "e4m3"), ("f16", "f16"), ("f16", "e4m3")]


def instance_file(rows: list[Instance]) -> str:
    family = rows[0].family
    header = {"ampere": "attention/ampere.cuh", "hopper": "attention/hopper_launch.cuh"}[family]
    facts = {fact for row in rows for fact in row.facts}
    checks = [f"static_assert({what} == {value});" for what, value in sorted(facts)]
    functions = [
        f"void {row.name}(const AttentionLaunch& launch) {{ {row.launcher}(launch); }}"
        for row in rows
    ]
    return "\n".join(
        [
            HEADER + f'#include "{header}"',
            '#include "attention/instances/launchers.h"\n',
            "namespace specdec::attention {\n",
            *checks,
            "",
            *functions,
            "\n}  // namespace specdec::attention",
        ]
    )


def finish_file(dtype: str, kv: str) -> str:
    return f"""{HEADER}#include "attention/finish.cuh"
#include "attention/instances/launchers.h"

namespace specdec::attention {{

void finish_{dtype}_{kv}(const AttentionLaunch& launch) {{
  launch_finish_types<{DTYPES[dtype]}, {DTYPES[kv]}>(launch);
}}

}}  // namespace specdec::attention"""


def launchers_header(rows: list[Instance]) -> str:
    names = [row.name for row in rows] + [f"finish_{dtype}_{kv}" for dtype, kv in FINISH]
    return "\n".join(
        [
            HEADER + "#pragma once\n",
            '#include "attention/spec_attention.h"\n',
            "namespace specdec::attention {\n",
            *[f"void {name}(const AttentionLaunch& launch);" for name in names],
            "\n}  // namespace specdec::attention",
        ]
    )


def launchers_source(rows: list[Instance]) -> str:
    cases = [
        f"  if (launch.call.dtype == DType::{ENUMS[dtype]} && "
        f"launch.call.cache.dtype == DType::{ENUMS[kv]}) return finish_{dtype}_{kv}(launch);"
        for dtype, kv in FINISH
    ]
    return "\n".join(
        [
            HEADER + '#include "attention/instances/launchers.h"\n',
            '#include "backend/attention/instances.h"',
            '#include "base/check.h"\n',
            "namespace specdec::attention {\n",
            "MainLauncher main_launcher(std::size_t index) {",
            "  static constexpr MainLauncher kLaunchers[] = {",
            *[f"    {row.name}," for row in rows],
            "  };",
            "  static_assert(std::size(kLaunchers) == std::size(kInstances));",
            "  return kLaunchers[index];",
            "}\n",
            "void launch_finish(const AttentionLaunch& launch) {",
            *cases,
            "  SPECDEC_ENSURE(false, dtype_name(launch.call.dtype), "
            '" rows over ", dtype_name(launch.call.cache.dtype), " pages have no instance");',
            "}\n",
            "}  // namespace specdec::attention",
        ]
    )


def table_file(rows: list[Instance]) -> str:
    entries = [
        f'    {{"{r.name}", Family::k{r.family.capitalize()}, DType::{ENUMS[r.dtype]}, '
        f"DType::{ENUMS[r.kv]}, DType::{ENUMS[r.math or r.dtype]}, {r.head_dim}, {r.row_tile}, "
        f"{r.threads}, {r.smem_bytes}, {r.blocks_per_sm}, {r.granule}}},"
        for r in rows
    ]
    return "\n".join(
        [
            HEADER + "#pragma once\n",
            "#include <array>\n",
            '#include "backend/attention/instance.h"\n',
            "namespace specdec::attention {\n",
            f"inline constexpr std::array<AttentionInstance, {len(rows)}> kInstances{{{{",
            *entries,
            "}};\n",
            "}  // namespace specdec::attention",
        ]
    )


def generate() -> dict[str, str]:
    """Returns the text of every generated file by its path, formatted."""
    rows = table()
    files = {
        TABLE: table_file(rows),
        f"{FOLDER}/launchers.h": launchers_header(rows),
        f"{FOLDER}/launchers.cc": launchers_source(rows),
    }
    for name in dict.fromkeys(row.file for row in rows):
        files[f"{FOLDER}/{name}.cu"] = instance_file([row for row in rows if row.file == name])
    for dtype, kv in FINISH:
        files[f"{FOLDER}/finish_{dtype}_{kv}.cu"] = finish_file(dtype, kv)
    files |= linear_files()
    return {path: formatted(path, text + "\n") for path, text in files.items()}


def formatted(path: str, text: str) -> str:
    tool = Path(sys.executable).with_name("clang-format")
    command = [str(tool if tool.exists() else "clang-format"), f"--assume-filename={ROOT / path}"]
    return subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    files = generate()
    present = {
        str(p.relative_to(ROOT)) for folder in (FOLDER, LINEAR_FOLDER)
        for p in (ROOT / folder).glob("*")
    }  # fmt: skip
    extra = sorted(present - files.keys())
    if parser.parse_args().check:
        stale = [p for p, text in files.items() if not (ROOT / p).exists() or
                 (ROOT / p).read_text() != text]  # fmt: skip
        for path in stale + extra:
            print(f"stale: {path} (run scripts/gen_instances.py)")
        return 1 if stale or extra else 0
    for path in extra:
        (ROOT / path).unlink()
    for path, text in files.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        if not (ROOT / path).exists() or (ROOT / path).read_text() != text:
            (ROOT / path).write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
