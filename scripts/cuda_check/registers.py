"""The table of registers in the tree, and how it is held against what the compiler says."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.cuda_check.build import ROOT
from scripts.cuda_check.ptxas import KernelUse

PAGE = ROOT / "docs" / "kernels" / "registers.md"
# Another patch release of the compiler moves a kernel by a few registers; a change of its
# occupancy comes with more.
TOLERANCE = 8

Table = dict[tuple[str, str], tuple[int, int, int, int]]

HEAD = """# Registers of the CUDA kernels

Written by `scripts/cuda_check.sh --update` from `ptxas -v` of nvcc {nvcc}. `make cuda-check` fails
when a kernel appears, goes, uses local memory that is not listed with a reason in
`scripts/cuda_check/allowed_spills.txt`, or moves by more than {tolerance} registers. All shared
memory is dynamic ([spec_attention.md](spec_attention.md) has the sizes); spills and stack are in
bytes per thread, static shared memory in bytes per block. Registers are those at entry: kernels
whose warpgroups hand some over (`setmaxnreg`) have others afterwards.

| kernel | architecture | registers | spills | stack | static shared |
|---|---|---|---|---|---|
"""


def table_of(kernels: dict[tuple[str, str], KernelUse]) -> Table:
    """Returns what the page holds, by (kernel name, arch)."""
    return {
        key: (use.registers, use.spill, use.stack, use.static_smem)
        for key, use in sorted(kernels.items())
    }


def write(table: Table, nvcc: str, page: Path = PAGE) -> None:
    rows = [
        f"| `{name}` | {arch} | {' | '.join(map(str, values))} |"
        for (name, arch), values in table.items()
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(HEAD.format(nvcc=nvcc, tolerance=TOLERANCE) + "\n".join(rows) + "\n")


def read(page: Path = PAGE) -> tuple[str, Table]:
    """Returns the compiler release that the page was made with, and its table."""
    text = page.read_text() if page.exists() else ""
    release = re.search(r"of nvcc (\d+\.\d+)", text)
    table: Table = {}
    for match in re.finditer(
        r"^\| `(.+)` \| (sm_\w+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE
    ):
        table[match[1], match[2]] = (int(match[3]), int(match[4]), int(match[5]), int(match[6]))
    return (release[1] if release else ""), table


def differences(recorded: Table, measured: Table) -> list[str]:
    """Returns one line per kernel that is not as recorded."""
    found = [f"{n} ({a}) is not in the table" for n, a in measured if (n, a) not in recorded]
    found += [f"{n} ({a}) is in the table alone" for n, a in recorded if (n, a) not in measured]
    for key in recorded.keys() & measured.keys():
        old, new = recorded[key], measured[key]
        if abs(old[0] - new[0]) > TOLERANCE or old[1:] != new[1:]:
            found.append(
                f"{key[0]} ({key[1]}): registers, spills, stack, static shared memory were "
                f"{old}, are {new}"
            )
    return sorted(found)


def allowed(text: str) -> dict[str, str]:
    """Returns {pattern: reason} of allowed_spills.txt.

    Raises   ValueError for a line without a reason.
    """
    entries = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        pattern, _, reason = line.partition(" : ")
        if not reason.strip():
            raise ValueError(f"allowed_spills.txt: {line!r} gives no reason")
        entries[pattern.strip()] = reason.strip()
    return entries
