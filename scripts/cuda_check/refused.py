"""Machine code that ptxas makes and a GPU does not run as the PTX says: kernels must not hold it.

Each pattern was found on an H200 (ptxas 13.0, sm_90a): the kernels that held it failed there, and
no other did. Nothing short of a GPU shows such a fault, so the machine code is searched for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from scripts.cuda_check import sass


@dataclass(frozen=True)
class Refused:
    """An instruction, and what it does instead of what was asked for."""

    pattern: re.Pattern[str]
    why: str


REFUSED = (
    Refused(
        re.compile(r"\bVIMNMX3?\.RELU\s+R\d+, (?:P[0-6], P\w+|PT, P[0-6]),"),
        "max(0, min(x, n)) whose predicate is taken for `== n`: it is set at 0 as well",
    ),
    Refused(
        re.compile(r"\bLDGSTS\S*\s+\[R\w+\+UR\d+"),
        "cp.async with an L2 policy: it reads the policy from a register that nothing wrote",
    ),
)


def found_in(lines: Iterable[str]) -> list[tuple[str, str, str]]:
    """Returns (symbol, arch, why) of `cuobjdump --dump-sass`, once for a kernel and a reason."""
    found: dict[tuple[str, str, str], None] = {}
    for symbol, arch, line in sass.kernel_lines(lines):
        for refused in REFUSED:
            if refused.pattern.search(line):
                found[symbol, arch, refused.why] = None
    return list(found)
