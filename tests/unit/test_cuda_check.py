"""How `make cuda-check` reads the compiler and the disassembler, and what it calls a fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.cuda_check import __main__ as check
from scripts.cuda_check import build, ptxas, registers, sass

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4kernPf' for 'sm_80'
ptxas info    : Function properties for helper
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 368 bytes cmem[0]
ptxas info    : Compile time = 1.098 ms
ptxas info    : Compiling entry function '_Z4kernPf' for 'sm_90a'
ptxas info    : Function properties for _Z4kernPf
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 1024 bytes smem, 400 bytes cmem[0]
"""


def test_the_compiler_report_is_read() -> None:
    old, new = ptxas.parse(LOG)
    assert old == ptxas.KernelUse("_Z4kernPf", "sm_80", 12, 8, 0, 0)
    assert new == ptxas.KernelUse("_Z4kernPf", "sm_90a", 168, 16, 64, 1024)


@pytest.mark.parametrize("line", ["Used", "stack frame"])
def test_an_incomplete_report_is_an_error(line: str) -> None:
    cut = "\n".join(text for text in LOG.splitlines() if line not in text)
    with pytest.raises(ValueError, match="ptxas reported no"):
        ptxas.parse(cut)


def test_warnings_of_every_kind_are_found() -> None:
    log = """\
ptxas warning : Registers are spilled to local memory in function '_Z4kernPf', 24 bytes
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Used 12 registers
x.cu(3): warning #177-D: variable "a" was declared but never referenced
"""
    assert len(ptxas.warnings(log)) == 3
    assert ptxas.warnings(LOG) == []


@pytest.mark.parametrize(
    ("long", "short"),
    [
        (
            "void specdec::attention::(anonymous namespace)::main_kernel<specdec::attention::Tile"
            "<__nv_bfloat16, (int)128, (bool)1> >(specdec::attention::AttentionLaunch)",
            "main_kernel<Tile<bf16, 128, 1> >",
        ),
        ("specdec::kernel(int (*)(float), char)", "kernel"),
        ("plain_name", "plain_name"),
    ],
)
def test_kernel_names_are_readable(long: str, short: str) -> None:
    assert ptxas.shorten(long) == short


DUMP = """\
\tcode for sm_90a
\t\tFunction : hopper_kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;       /* 0x00000a00ff017b82 */
                                                                /* 0x000fe20000000800 */
        /*0010*/              @!P0 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], !UPT ;  /* 0x0 */
        /*0020*/             @UP1 UTMALDG.4D [UR8], [UR4] ;     /* 0x0 */
        /*0030*/                   SYNCS.ARRIVE.TRANS64 RZ, [R2] ;   /* 0x0 */
\tcode for sm_80
\t\tFunction : ampere_kernel
        /*0000*/                   HMMA.16816.F32 R0, R4, R8, R0 ;   /* 0x0 */
        /*0010*/                   HMMA.16816.F32 R0, R4, R8, R0 ;   /* 0x0 */
        /*0020*/                   STL.64 [R1], R4 ;            /* 0x0 */
"""


def test_machine_code_is_counted() -> None:
    found = sass.parse(DUMP.splitlines())
    assert found["sm_90a"]["hopper_kernel"] == {"LDC": 1, "HGMMA": 1, "UTMALDG": 1, "SYNCS": 1}
    assert found["sm_80"]["ampere_kernel"] == {"HMMA": 2, "STL": 1}
    assert sass.local_memory(found["sm_80"]["ampere_kernel"]) == 1


def test_a_missing_instruction_and_a_missing_kernel_are_faults() -> None:
    good = {
        ("hopper_a", "sm_90a"): {"HGMMA": 1, "UTMALDG": 1, "SYNCS": 1},
        ("ampere_a", "sm_80"): {"HMMA": 1, "LDSM": 1, "LDGSTS": 1},
        ("linear_kernel<a>", "sm_80"): {"HMMA": 1, "LDSM": 1, "LDGSTS": 1},
        ("linear_kernel<a>", "sm_90a"): {"HMMA": 1, "LDSM": 1, "LDGSTS": 1},
    }
    assert sass.faults(good) == []
    for key, counts in good.items():
        for opcode in counts:
            less = {name: n for name, n in counts.items() if name != opcode}
            assert len(sass.faults({**good, key: less})) == 1
        assert len(sass.faults({k: v for k, v in good.items() if k != key})) == 1


def use(registers_: int = 32, spill: int = 0, stack: int = 0) -> ptxas.KernelUse:
    return ptxas.KernelUse("s", "sm_80", registers_, stack, spill, 0)


def test_local_memory_needs_a_reason_and_a_reason_needs_local_memory() -> None:
    key = ("generic<f32>", "sm_80")
    quiet: dict[tuple[str, str], dict[str, int]] = {}
    assert check.local_memory_faults({key: use()}, quiet, {}) == []
    for bad in (use(spill=4), use(stack=8)):
        assert len(check.local_memory_faults({key: bad}, quiet, {})) == 1
        assert check.local_memory_faults({key: bad}, quiet, {"^generic": "why"}) == []
    assert len(check.local_memory_faults({key: use()}, {key: {"LDL": 2}}, {})) == 1
    (stale,) = check.local_memory_faults({key: use()}, quiet, {"^generic": "why"})
    assert "any more" in stale


def test_reasons_are_read() -> None:
    assert registers.allowed("# comment\n\n^a<.*> : because\n") == {"^a<.*>": "because"}
    with pytest.raises(ValueError, match="gives no reason"):
        registers.allowed("^a\n")


def test_the_table_comes_back_and_differences_are_named(tmp_path: Path) -> None:
    page = tmp_path / "registers.md"
    table = {("a<1>", "sm_80"): (40, 0, 0, 0), ("b", "sm_90a"): (168, 0, 16, 0)}
    registers.write(table, "13.0", page)
    release, read = registers.read(page)
    assert (release, read) == ("13.0", table)
    assert registers.differences(table, read) == []
    within = {**table, ("a<1>", "sm_80"): (40 + registers.TOLERANCE, 0, 0, 0)}
    assert registers.differences(table, within) == []
    beyond = {**table, ("a<1>", "sm_80"): (41 + registers.TOLERANCE, 0, 0, 0)}
    assert len(registers.differences(table, beyond)) == 1
    stack = {**table, ("a<1>", "sm_80"): (40, 0, 8, 0)}
    assert len(registers.differences(table, stack)) == 1
    renamed = {("c", "sm_80"): (40, 0, 0, 0), ("b", "sm_90a"): (168, 0, 16, 0)}
    assert len(registers.differences(table, renamed)) == 2
    assert registers.read(tmp_path / "none.md") == ("", {})


def test_every_cuda_source_is_compiled() -> None:
    names = build.sources()
    assert "cuda/backend.cu" in names
    assert build.targets("cuda/backend.cu") == [*build.AMPERE, *build.HOPPER]
