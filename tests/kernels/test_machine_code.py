"""What the compiler made of the kernels for the CPU, read from the extension itself.

GCC takes a function that only prefetches for one without effect, and drops its calls unless it is
inlined at once. No result shows it, but passes of several rows then wait for memory.
"""

from __future__ import annotations

import functools
import platform
import re
import shutil
import subprocess

import pytest

from specdec_ext import _core

pytestmark = pytest.mark.skipif(
    shutil.which("objdump") is None or platform.machine() not in ("x86_64", "AMD64"),
    reason="needs binutils, on x86-64",
)

_LINE = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
_FARTHEST = 4096  # bytes that a kernel's innermost loop has at most


@functools.cache
def disassembly() -> list[tuple[int, str, str]]:
    """Address, name and operands of every instruction."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _core.__file__],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    matches = (_LINE.match(line) for line in text.splitlines())
    return [(int(m[1], 16), m[2], m[3]) for m in matches if m]


def loops_with(instruction: str) -> list[list[str]]:
    """The names of the instructions of every innermost loop that has this one."""
    code = disassembly()
    loops = []
    for end, (address, name, operands) in enumerate(code):
        target = operands.split()[0] if name.startswith("j") and operands else ""
        if not re.fullmatch("[0-9a-f]+", target):
            continue
        if not address - _FARTHEST < int(target, 16) < address:
            continue
        begin = end
        while begin > 0 and code[begin][0] > int(target, 16):
            begin -= 1
        body = [name for _, name, _ in code[begin : end + 1]]
        if instruction in body and not any(name.startswith("j") for name in body[:-1]):
            loops.append(body)
    return loops


def test_weights_are_prefetched() -> None:
    """All prefetches together; loops that can be told apart are looked at below."""
    assert sum(name == "prefetcht1" for _, name, _ in disassembly()) >= 30


def test_threads_that_wait_fetch() -> None:
    """ThreadPool::wait_while: the caller's wait and the workers'."""
    code = [name for _, name, _ in disassembly()]
    pauses = [at for at, name in enumerate(code) if name == "pause"]
    fetching = [at for at in pauses if "prefetcht1" in code[max(0, at - 60) : at + 60]]
    assert len(fetching) >= 2, f"of {len(pauses)} loops with a pause"


# Products of bfloat16 for 1 to 12 rows, of bf16 and of e4m3; codes of e4m3 looked up in tables, for
# as many rows (beside tiles also for one row, and to be stored for more). Attention multiplies
# bfloat16, too, and finds it in the cache.
@pytest.mark.parametrize(
    ("instructions", "least", "others"),
    [(("vdpbf16ps",), 24, True), (("vpermi2b", "vpermt2b"), 12, False)],
)
def test_loops_over_weights_fetch_them(
    instructions: tuple[str, ...], least: int, others: bool
) -> None:
    if not any(name in instructions for _, name, _ in disassembly()):
        pytest.skip("the compiler has no such instruction")
    loops = [body for instruction in instructions for body in loops_with(instruction)]
    fetching = [body for body in loops if "prefetcht1" in body]
    assert len(fetching) >= least, f"of {len(loops)}"
    assert others or len(fetching) == len(loops)


def test_products_of_whole_numbers_fetch_between_quads() -> None:
    """A burst of prefetches occupies all slots for lines in flight: 11 rows of 8 bits took half as
    long again. And the compiler likes to move them to the front of a step."""
    names = [(at, name) for at, name, _ in disassembly() if name in ("prefetcht1", "vpdpbusd")]
    # Products between a prefetch and the next one of the same step.
    gaps, products, last = [], 0, -_FARTHEST
    for at, name in names:
        if name == "vpdpbusd":
            products += 1
            continue
        if at - last < _FARTHEST:
            gaps.append(products)
        products, last = 0, at
    # With AVX-512, 4 to 12 rows of seven formats: 8 to 24 products of one quad, seven times.
    assert sum(8 <= gap <= 24 for gap in gaps) >= 9 * 7 * 7, sorted(gaps)


def test_loops_that_widen_groups_fetch_them() -> None:
    if not any(name == "tdpbf16ps" for _, name, _ in disassembly()):
        pytest.skip("the compiler has no tile instructions")
    loops = [body for body in loops_with("vcvtne2ps2bf16") if "vpermb" in body]
    assert len(loops) >= 8  # one for each format
    # 8 KiB ahead are the lines of a group: 576 bytes at least.
    assert {body.count("prefetcht1") for body in loops} == {9, 10, 12, 17, 18, 20}


def test_loops_over_tiles_fetch_the_panel() -> None:
    if not any(name == "tdpbf16ps" for _, name, _ in disassembly()):
        pytest.skip("the compiler has no tile instructions")
    loops = [(b.count("prefetcht0"), b.count("tdpbf16ps")) for b in loops_with("tdpbf16ps")]
    # Two or four products of a linear layer take 16 steps of 128 bytes. Those of attention find
    # what they multiply in the cache.
    fetching = [lines for lines, products in loops if lines >= 8 * products]
    assert len(fetching) >= 32, f"lines, products: {loops}"  # one for each height


def test_attention_fetches_into_the_second_level() -> None:
    """Loops that transpose keys, and those that widen values of 16 bits as they are read."""
    transposing = loops_with("vunpcklps")
    assert len(transposing) >= 8
    assert all("prefetcht1" in body for body in transposing)
    widening = [body for body in loops_with("vpmovzxwd") if "prefetcht1" in body]
    assert len(widening) >= 8
    assert not any("prefetcht0" in body for body in transposing + loops_with("vpmovzxwd"))


def test_rows_of_y_are_fetched_to_be_written() -> None:
    """Two lines of each row, before the products: 1 to 12 rows of seven formats with AVX-512, and
    as many of float32, float16 and bfloat16."""
    found = [at for at, name, _ in disassembly() if name == "prefetchw"]
    products = {"vpdpbusd", "vdpbf16ps"}
    code = {at: index for index, (at, _, _) in enumerate(disassembly())}
    behind = {
        name
        for at in found
        for _, name, _ in disassembly()[code[at] : code[at] + 60]
        if name in products
    }
    assert behind == products & {name for _, name, _ in disassembly()}
    rows = sum(range(1, 13))
    assert len(found) >= 2 * rows * (7 + 3)
