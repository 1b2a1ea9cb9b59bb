"""What the asm of the wrappers must say besides its instruction: volatile, clobbers, .aligned.

None of it shows when the PTX runs (tests/ptx): it tells nvcc what it may not move or merge.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# rounding.cuh has names of CUDA C++ alone.
FILES = sorted({*(ROOT / "cuda" / "gpu").glob("*.cuh")} - {ROOT / "cuda" / "gpu" / "rounding.cuh"})

# Touch memory, or order what does: nothing may move across them.
ORDERS_MEMORY = re.compile(
    r"\b(ld|st|atom|red)\.(?!global\.nc)|\bcp\.async|\bldmatrix|\bmbarrier|\bfence|\bbar\."
    r"|\bprefetch|\bgriddepcontrol|\bwgmma\.(fence|commit_group|wait_group)"
)
# Depend on more than their operands: may not be merged or dropped.
HAS_EFFECT = re.compile(
    ORDERS_MEMORY.pattern + r"|\belect|\bsetmaxnreg|\bwgmma|\bmma\.|\bex2|\bld\."
)
WHOLE_WARP = re.compile(r"\b(ldmatrix|mma|wgmma\.\w+|setmaxnreg\.\w+)\.sync[\w.]*")


def statements(text: str) -> list[str]:
    """Returns each asm statement from its keyword to the closing parenthesis."""
    text = re.sub(r"//[^\n]*", "", text)
    found = []
    for match in re.finditer(r"\basm\b", text):
        at = text.index("(", match.end())
        depth, quoted = 0, False
        for end in range(at, len(text)):
            if text[end] == '"' and text[end - 1] != "\\":
                quoted = not quoted
            depth += 0 if quoted else (text[end] == "(") - (text[end] == ")")
            if depth == 0 and not quoted:
                break
        found.append(text[match.start() : end + 1])
    return found


def instruction(statement: str) -> str:
    """Returns the text of the instruction: the strings before the first colon outside of them."""
    strings = re.findall(r'"((?:[^"\\]|\\.)*)"|(:)', statement)
    text = []
    for string, colon in strings:
        if colon:
            break
        text.append(string)
    return "".join(text)


def faults(statement: str) -> list[str]:
    text = instruction(statement)
    found = []
    if HAS_EFFECT.search(text) and not re.match(r"asm\s+volatile\b", statement):
        found.append("is not volatile")
    if ORDERS_MEMORY.search(text) and '"memory"' not in statement:
        found.append("does not clobber memory")
    for match in WHOLE_WARP.finditer(text):
        if ".aligned" not in match[0]:
            found.append(f"{match[0]} is not .aligned")
    return [f"{text}: {fault}" for fault in found]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_wrappers_say_what_may_not_move(path: Path) -> None:
    found = statements(path.read_text())
    assert len(found) == len(re.findall(r"\basm\b(?=\s*(?:volatile)?\s*\()", path.read_text()))
    assert [fault for statement in found for fault in faults(statement)] == []


def test_there_is_asm_in_every_file_and_nowhere_else() -> None:
    holders = [
        path
        for path in sorted((ROOT / "cuda").rglob("*.cu*"))
        if re.search(r"\basm\b\s*(volatile)?\s*\(", path.read_text())
    ]
    assert holders == FILES


@pytest.mark.parametrize(
    "statement, fault",
    [
        ('asm("cp.async.commit_group;" ::: "memory")', "is not volatile"),
        ('asm volatile("cp.async.wait_group %0;" ::"n"(1))', "does not clobber memory"),
        ('asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p))', "clobber"),
        ('asm volatile("mma.sync.m16n8k16.row.col %0;" : "+f"(c))', "is not .aligned"),
        ('asm volatile("wgmma.fence.sync;" ::: "memory")', "is not .aligned"),
    ],
)
def test_what_is_left_out_is_noticed(statement: str, fault: str) -> None:
    assert any(fault in found for found in faults(statement))
