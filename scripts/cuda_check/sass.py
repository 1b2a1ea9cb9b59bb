"""Machine code: which instructions each kernel holds, and which it must or must not hold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_TARGET = re.compile(r"^\s*code for (sm_\w+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")


@dataclass(frozen=True)
class Tools:
    cuobjdump: str
    path: str  # for cuobjdump, which runs nvdisasm


@dataclass(frozen=True)
class Rule:
    """Kernels whose name matches `kernel`, compiled for `arch`, hold each of `require`."""

    kernel: str
    arch: str
    require: tuple[str, ...]
    why: str


RULES = (
    Rule(
        r"^hopper_\w+", "sm_90a", ("HGMMA|QGMMA", "UTMALDG|UBLKCP", "SYNCS"),
        "warpgroup matrix products fed by bulk copies that complete on mbarriers",
    ),
    Rule(
        r"^ampere_\w+", "sm_80", ("HMMA", "LDSM", "LDGSTS"),
        "tensor cores fed by ldmatrix from asynchronous copies",
    ),
    *(
        Rule(
            r"^linear_kernel", arch, ("HMMA", "LDSM", "LDGSTS"),
            "tensor cores fed by ldmatrix from asynchronous copies",
        )
        for arch in ("sm_80", "sm_90a")
    ),
)  # fmt: skip
# Local memory in the inner loop costs more than it looks like in the register report.
LOCAL_MEMORY = ("LDL", "STL")


def find_tools() -> Tools | None:
    """Returns cuobjdump and nvdisasm of the toolkit or of their Python packages, or None."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    nvcc = shutil.which("nvcc")
    if nvcc:
        folders.append(str(Path(nvcc).resolve().parent))
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders += [str(folder) for folder in sorted(site.glob("cu*/bin"))]
    path = os.pathsep.join(folders)
    cuobjdump = shutil.which("cuobjdump", path=path)
    return Tools(cuobjdump, path) if cuobjdump and shutil.which("nvdisasm", path=path) else None


def kernel_lines(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yields (symbol, arch, line) of the code in `cuobjdump --dump-sass`."""
    arch = symbol = ""
    for line in lines:
        if match := _TARGET.match(line):
            arch = match[1]
        elif match := _FUNCTION.match(line):
            symbol = match[1]
        else:
            yield symbol, arch, line


def parse(lines: Iterable[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Returns {arch: {symbol: {opcode: count}}} of `cuobjdump --dump-sass`."""
    found: dict[str, dict[str, Counter[str]]] = {}
    arch, counter = "", Counter[str]()
    for line in lines:
        if match := _INSTRUCTION.match(line):
            counter[match[1]] += 1
        elif match := _TARGET.match(line):
            arch = match[1]
        elif match := _FUNCTION.match(line):
            counter = found.setdefault(arch, {}).setdefault(match[1], Counter())
    return {a: {name: dict(c) for name, c in kernels.items()} for a, kernels in found.items()}


def dump(tools: Tools, obj: Path, what: str) -> list[str]:
    """Returns the lines of `cuobjdump --dump-<what>` (sass or elf) of one object file."""
    command = [tools.cuobjdump, f"--dump-{what}", str(obj)]
    environment = {**os.environ, "PATH": tools.path}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"cuobjdump failed on {obj.name} ({done.returncode})")
    return done.stdout.splitlines()


def faults(kernels: Mapping[tuple[str, str], Mapping[str, int]]) -> list[str]:
    """Returns what is wrong with {(kernel name, arch): {opcode: count}}.

    A rule that no kernel matches is a fault too: the kernels were renamed, or are not built.
    """
    found = []
    for rule in RULES:
        matching = [
            key for key in kernels if key[1] == rule.arch and re.search(rule.kernel, key[0])
        ]
        if not matching:
            found.append(f"no {rule.arch} kernel is named {rule.kernel} ({rule.why})")
        for key in matching:
            held = kernels[key]
            for wanted in rule.require:
                if not any(re.fullmatch(wanted, opcode) for opcode in held):
                    found.append(f"{key[0]} ({key[1]}) holds no {wanted}: {rule.why}")
    return found


def local_memory(held: Mapping[str, int]) -> int:
    """Returns the number of loads from and stores to local memory."""
    return sum(held.get(opcode, 0) for opcode in LOCAL_MEMORY)
