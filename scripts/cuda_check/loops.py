"""What the loops of a kernel's machine code do on a trip, by the units of a multiprocessor.

The performance model (benchmarks/gpu/model.py) multiplies these counts by trips. Loops inside a
loop count for themselves. Of what is left, `always` is what every trip passes: the blocks that
dominate all back edges, without masking, rare rescaling, waiting. `body` is everything: the right
figure where branches depend on data and lanes of a warp go both ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "sass_loops.json"
TOLERANCE = 0.1  # of a count: another patch release of the compiler moves a few instructions
SHORTEST = 48  # instructions: shorter loops wait, or copy a handful of words

Loop = dict[str, dict[str, int]]  # "always" and "body"
Loops = Mapping[str, list[Loop]]

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_TARGET = re.compile(r"^\s*code for (sm_\w+)")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)([^;]*);")
_ADDRESS = re.compile(r"\b0x([0-9a-f]+)\b")
_SHAPE = re.compile(r"^(\d+)x(\d+)x(\d+)$")

# Instructions by the unit that bounds them where it is not the scheduler alone.
UNITS = {
    "fp32": "FADD FMUL FFMA FMNMX FSEL FSETP FSET FSWZADD FCHK",
    "int": "IADD3 IADD VIADD LOP3 SHF ISETP IMNMX VIMNMX LEA PRMT SEL IABS ISCADD I2I IMAD PLOP3 "
    "BMSK SGXT R2P P2R MOV LOP ICMP",
    "special": "MUFU POPC FLO BREV REDUX",
    "convert": "F2F F2FP F2I I2F I2FP F2IP FRND",
    "shuffle": "SHFL MATCH VOTE",
}
UNIT_OF = {name: unit for unit, names in UNITS.items() for name in names.split()}
COUNTS = ("issue", *UNITS, "shared_bytes", "load_bytes", "store_bytes", "tensor_ops")


@dataclass(frozen=True)
class Instruction:
    address: int
    conditional: bool
    name: str  # with its modifiers
    operands: str

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]


@dataclass
class Block:
    """A stretch of instructions without a jump into or out of its middle."""

    code: list[Instruction]
    follow: list[int] = field(default_factory=list)


def access_bytes(name: str) -> int:
    """Returns the bytes per thread of a memory instruction, from its modifiers."""
    parts = name.split(".")
    for part, size in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
        if part in parts:
            return size
    return 4


def tensor_ops(name: str) -> int:
    """Returns multiplications and additions of a matrix instruction: of 4 warps or of one."""
    for part in name.split("."):
        if shape := _SHAPE.match(part):
            return 2 * int(shape[1]) * int(shape[2]) * int(shape[3])
        if part == "16816":
            return 2 * 16 * 8 * 16
        if part == "16832":
            return 2 * 16 * 8 * 32
    raise ValueError(f"{name}: no shape of a matrix product that is known")


def count(code: Iterable[Instruction]) -> dict[str, int]:
    """Returns the counts of a stretch of code per warp; bytes per thread; zero counts left out."""
    found = dict.fromkeys(COUNTS, 0)
    for one in code:
        found["issue"] += 1
        if unit := UNIT_OF.get(one.base):
            found[unit] += 1
        elif one.base in ("HGMMA", "QGMMA", "HMMA", "QMMA"):
            found["tensor_ops"] += tensor_ops(one.name)
        elif one.base in ("LDS", "STS", "LDSM", "STSM", "ATOMS"):
            wide = int(one.name[-1]) * 4 if one.name[-2:] in (".2", ".4") else 0
            found["shared_bytes"] += wide or access_bytes(one.name)
        elif one.base in ("LDG", "LD", "LDGSTS"):
            found["load_bytes"] += access_bytes(one.name)
        elif one.base in ("STG", "ST"):
            found["store_bytes"] += access_bytes(one.name)
    return {name: number for name, number in found.items() if number}


def blocks_of(code: list[Instruction]) -> list[Block]:
    """Returns the basic blocks of a kernel with the indices of their successors."""
    at = {one.address: i for i, one in enumerate(code)}
    joins: dict[str, int] = {}  # barrier register -> where its warps meet
    jumps: dict[int, list[int]] = {}  # index of an instruction that ends a block -> next ones
    for i, one in enumerate(code):
        targets = [at[x] for x in (int(a, 16) for a in _ADDRESS.findall(one.operands)) if x in at]
        falls = [i + 1] if i + 1 < len(code) else []
        if one.base == "BSSY":
            joins[one.operands.split(",")[0].strip()] = targets[0]
        elif one.base == "BSYNC":
            jumps[i] = [joins.get(one.operands.strip(), i + 1)]
        elif one.base == "BRA":
            maybe = one.conditional or "P" in one.operands or ".DIV" in one.name
            jumps[i] = targets[-1:] + (falls if maybe else [])
        elif one.base in ("EXIT", "RET", "BRX", "BRXU", "JMP"):
            jumps[i] = falls if one.conditional else []
    starts = {0, *(i + 1 for i in jumps), *(t for to in jumps.values() for t in to)}
    order = sorted(start for start in starts if start < len(code))
    number = {start: k for k, start in enumerate(order)}
    found = []
    for k, start in enumerate(order):
        end = order[k + 1] if k + 1 < len(order) else len(code)
        to = jumps.get(end - 1, [end] if end < len(code) else [])
        found.append(Block(code[start:end], [number[t] for t in to]))
    return found


def entries(blocks: list[Block]) -> set[int]:
    """Returns the blocks at which a kernel is entered: the first, and those that none leads to,
    which begin functions that are called. With a table of branches (BRX), whose targets the code
    does not name, the first, by address, of those that nothing else leads to: loops may lead back
    to a target."""
    found: set[int] = set()
    reached: set[int] = set()
    led_to = {to for block in blocks for to in block.follow}
    plain = [k for k in range(len(blocks)) if k == 0 or k not in led_to]
    jumps = any(one.base in ("BRX", "BRXU") for block in blocks for one in block.code)
    for k in [*plain, *(range(len(blocks)) if jumps else ())]:
        if k in reached:
            continue
        found.add(k)
        open_ = [k]
        while open_:
            one = open_.pop()
            if one not in reached:
                reached.add(one)
                open_ += blocks[one].follow
    return found


def dominators(blocks: list[Block]) -> list[int]:
    """Returns for each block the set (bits) of blocks on every way to it, from an entry on; all
    ones: unreachable."""
    before: list[list[int]] = [[] for _ in blocks]
    for k, block in enumerate(blocks):
        for to in block.follow:
            before[to].append(k)
    entered = entries(blocks)
    everything = (1 << len(blocks)) - 1
    found = [everything] * len(blocks)
    changed = True
    while changed:
        changed = False
        for k in range(len(blocks)):
            meet = 0 if k in entered else everything
            for p in before[k]:
                meet &= found[p]
            new = meet | 1 << k
            changed |= new != found[k]
            found[k] = new
    return found


def loops_of(code: list[Instruction]) -> list[Loop]:
    """Returns what each loop of a kernel does on a trip, in the order of the code."""
    blocks = blocks_of(code)
    above = dominators(blocks)
    before: list[list[int]] = [[] for _ in blocks]
    back: dict[int, list[int]] = {}
    for k, block in enumerate(blocks):
        for to in block.follow:
            before[to].append(k)
            if above[k] >> to & 1 and above[k] != (1 << len(blocks)) - 1:
                back.setdefault(to, []).append(k)
    bodies: dict[int, set[int]] = {}
    for head, tails in back.items():
        body, open_ = {head}, [t for t in tails if t != head]
        while open_:
            k = open_.pop()
            if k not in body:
                body.add(k)
                open_ += before[k]
        bodies[head] = body
    found = []
    for head in sorted(bodies):
        inner = {h for h in bodies if h != head and h in bodies[head]}
        nested = set().union(*(bodies[h] for h in inner))
        own = sorted(bodies[head] - nested)
        always = [k for k in own if all(above[t] >> k & 1 for t in back[head])]
        found.append(
            {
                "always": count(one for k in always for one in blocks[k].code),
                "body": count(one for k in own for one in blocks[k].code),
            }
        )
    return found


def parse(lines: Iterable[str]) -> dict[tuple[str, str], list[Instruction]]:
    """Returns {(symbol, arch): code} of `cuobjdump --dump-sass`."""
    found: dict[tuple[str, str], list[Instruction]] = {}
    arch = ""
    code: list[Instruction] = []
    for line in lines:
        if match := _LINE.match(line):
            name = match[3]
            code.append(Instruction(int(match[1], 16), bool(match[2]), name, match[4]))
        elif match := _TARGET.match(line):
            arch = match[1]
        elif match := _FUNCTION.match(line):
            code = found.setdefault((match[1], arch), [])
    return found


def _kept(kernels: Loops) -> dict[str, list[Loop]]:
    """Kernels and loops that the model may ask for: one of the two 16-bit types stands for both."""
    found = {
        name: [
            loop
            for loop in loops
            if loop["body"]["issue"] >= SHORTEST or "tensor_ops" in loop["body"]
        ]
        for name, loops in sorted(kernels.items())
        if "fp16" not in name and not name.startswith("ampere_")
    }
    return {name: loops for name, loops in found.items() if loops}


def write(kernels: Loops, page: Path = PAGE) -> None:
    """Records what the model reads; one line per loop."""
    rows = [
        f' "{name}": [\n  ' + ",\n  ".join(json.dumps(loop) for loop in loops) + "\n ]"
        for name, loops in _kept(kernels).items()
    ]
    page.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def read(page: Path = PAGE) -> dict[str, list[Loop]]:
    """Returns {kernel: what each of its longer loops does on a trip} as recorded."""
    found: dict[str, list[Loop]] = json.loads(page.read_text()) if page.exists() else {}
    return found


def differences(recorded: Loops, counted: Loops) -> list[str]:
    """Returns one line per kernel whose loops are not as recorded."""
    found, now = [], _kept(counted)
    for name in sorted({*recorded, *now}):
        old, new = recorded.get(name, []), now.get(name, [])
        same = len(old) == len(new) and all(
            abs(a[part].get(key, 0) - b[part].get(key, 0))
            <= max(4, TOLERANCE * a[part].get(key, 0))
            for a, b in zip(old, new, strict=True)
            for part in ("always", "body")
            for key in COUNTS
        )
        if not same:
            found.append(f"{name}: its loops are not those of {PAGE.name}: were {old}, are {new}")
    return found
