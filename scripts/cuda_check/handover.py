"""Kernels that move registers between their warpgroups (`setmaxnreg`) must own what they hand out.

A block owns the registers that each of its threads has at entry, times its threads. A warpgroup
that asks for more than the others left waits for ever: nothing but a GPU would show it. So the rule
is read from the machine code: what each USETMAXREG sets, the registers at entry, and the threads of
the kernel's launch bounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from scripts.cuda_check import sass

WARPGROUP = 128  # threads that change their registers together

_TARGET = re.compile(r"^\s*(?:code for|arch =) (sm_\w+)")
_SET = re.compile(r"\bUSETMAXREG\b(.*?);")
_VALUE = re.compile(r"\b0x([0-9a-f]+)\s*$")
_SECTION = re.compile(r"^\.nv\.info\.(\S+)")
_REGISTERS = re.compile(r"Value:\s*function: (\S+?)\(0x[0-9a-f]+\)\s+register count: (\d+)")
_THREADS = re.compile(r"Value:\s*0x([0-9a-f]+) 0x([0-9a-f]+) 0x([0-9a-f]+)")


@dataclass
class HandOver:
    """One kernel: registers per thread that its instructions set, and what it is launched with."""

    symbol: str
    arch: str
    sets: list[int]
    entry_registers: int = 0  # 0: the object does not say
    threads: int = 0  # 0: no launch bounds

    @property
    def asked(self) -> int:
        """The most that the warpgroups of a block can ask for together, in registers.

        Every instruction that sets registers stands in a branch of its own, so one warpgroup at
        least sets its number; all others may be on the largest.
        """
        others = self.threads // WARPGROUP - len(self.sets)
        return WARPGROUP * (sum(self.sets) + others * max(self.sets))

    @property
    def owned(self) -> int:
        return self.entry_registers * self.threads

    def fault(self) -> str:
        """Returns what is wrong in one sentence, '' if nothing is."""
        if not self.threads or not self.entry_registers:
            return "sets registers, but the object holds no launch bounds or register count for it"
        if self.threads % WARPGROUP or self.threads // WARPGROUP < len(self.sets):
            return f"{self.threads} threads cannot be warpgroups that set {sorted(self.sets)}"
        if self.asked > self.owned:
            return (
                f"hangs: its warpgroups ask for {self.asked} registers (set: "
                f"{sorted(self.sets)}), a block of {self.threads} threads with "
                f"{self.entry_registers} at entry owns {self.owned}"
            )
        return ""


def parse_code(lines: Iterable[str]) -> list[HandOver]:
    """Returns the kernels of `cuobjdump --dump-sass` that set registers.

    Raises   ValueError for a USETMAXREG whose value is not in the instruction.
    """
    found: dict[tuple[str, str], HandOver] = {}
    for symbol, arch, line in sass.kernel_lines(lines):
        if match := _SET.search(line):
            value = _VALUE.search(match[1])
            if value is None:
                raise ValueError(f"{symbol} ({arch}): no value in USETMAXREG{match[1]}")
            kernel = found.setdefault((symbol, arch), HandOver(symbol, arch, []))
            kernel.sets.append(int(value[1], 16))
    return list(found.values())


def add_launch(kernels: Iterable[HandOver], elf: Iterable[str]) -> None:
    """Completes kernels by `cuobjdump --dump-elf`: registers at entry and launch bounds."""
    wanted = {(kernel.symbol, kernel.arch): kernel for kernel in kernels}
    arch = section = attribute = ""
    for line in elf:
        if match := _TARGET.match(line):
            arch = match[1]
        elif line.startswith("."):
            match = _SECTION.match(line)
            section = match[1] if match else ""
        elif "EIATTR_" in line:
            attribute = line.split("EIATTR_")[1].strip()
        elif attribute == "REGCOUNT" and (match := _REGISTERS.search(line)):
            kernel = wanted.get((match[1], arch))
            if kernel is not None:
                kernel.entry_registers = int(match[2])
        elif attribute == "MAX_THREADS" and (match := _THREADS.search(line)):
            kernel = wanted.get((section, arch))
            if kernel is not None:
                kernel.threads = int(match[1], 16) * int(match[2], 16) * int(match[3], 16)


def faults(records: Iterable[dict[str, Any]]) -> list[str]:
    """Returns one line per kernel that cannot get what it asks for; records are HandOver fields."""
    kernels = [HandOver(**record) for record in records]
    return [f"{k.symbol} ({k.arch}) {text}" for k in kernels if (text := k.fault())]
