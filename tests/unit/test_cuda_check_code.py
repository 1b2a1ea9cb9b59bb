"""What `make cuda-check` reads out of machine code: registers handed over, and what loops do."""

from __future__ import annotations

import pathlib

import pytest
from scripts.cuda_check import handover, loops, refused

# -- registers ------------------------------------------------------------------------------------

SASS = """\
arch = sm_90a
\tcode for sm_90a
\t\tFunction : _Z4ringv
        /*0310*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, {take} ;     /* 0x0000a000 */
        /*0320*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, {take} ;     /* 0x0000a000 */
        /*e990*/              @!P0 USETMAXREG.DEALLOC.CTAPOOL {give} ;            /* 0x00002000 */
\t\tFunction : _Z5plainv
        /*0000*/                   IADD3 R0, R1, R2, RZ ;                         /* 0x00000a00 */
"""
ELF = """\
arch = sm_90a
.nv.info
\tAttribute:\tEIATTR_REGCOUNT
\tFormat:\tEIFMT_SVAL
\tValue:\tfunction: _Z5plainv(0xf)\tregister count: 32
\tAttribute:\tEIATTR_REGCOUNT
\tFormat:\tEIFMT_SVAL
\tValue:\tfunction: _Z4ringv(0x10)\tregister count: {entry}
.nv.info._Z4ringv
\t<0x1>
\tAttribute:\tEIATTR_EXIT_INSTR_OFFSETS
\tFormat:\tEIFMT_SVAL
\tValue:\t0x3b0 0xe970 0xe9f0
\tAttribute:\tEIATTR_MAX_THREADS
\tFormat:\tEIFMT_SVAL
\tValue:\t{threads} 0x1 0x1
.nv.info._Z5plainv
\tAttribute:\tEIATTR_MAX_THREADS
\tFormat:\tEIFMT_SVAL
\tValue:\t0x400 0x1 0x1
"""


def faults_of(take: int, give: int, entry: int, threads: int) -> list[str]:
    kernels = handover.parse_code(SASS.format(take=hex(take), give=hex(give)).splitlines())
    handover.add_launch(kernels, ELF.format(entry=entry, threads=hex(threads)).splitlines())
    assert [kernel.symbol for kernel in kernels] == ["_Z4ringv"]
    return handover.faults(vars(kernel) for kernel in kernels)


def test_a_block_hands_out_what_it_owns() -> None:
    assert faults_of(take=240, give=24, entry=168, threads=384) == []
    assert faults_of(take=160, give=32, entry=128, threads=512) == []
    # Two consumers and a producer once asked for all 65,536 registers of a multiprocessor, but a
    # block is launched with 168 a thread: the last warps waited for ever.
    for take, give in ((240, 32), (224, 64), (232, 48)):
        (fault,) = faults_of(take, give, entry=168, threads=384)
        assert "_Z4ringv (sm_90a) hangs" in fault
        assert f"[{give}, {take}, {take}]" in fault
        assert "owns 64512" in fault
    (fault,) = faults_of(take=168, give=32, entry=128, threads=512)
    assert "ask for 68608 registers" in fault


def test_what_cannot_be_judged_is_a_fault() -> None:
    assert "no launch bounds" in faults_of(240, 24, entry=168, threads=0)[0]
    assert "no launch bounds" in faults_of(240, 24, entry=0, threads=384)[0]
    assert "cannot be warpgroups" in faults_of(240, 24, entry=168, threads=320)[0]
    assert "cannot be warpgroups" in faults_of(240, 24, entry=168, threads=128)[0]
    with pytest.raises(ValueError, match="no value in USETMAXREG"):
        handover.parse_code(
            ["\t\tFunction : k", "  /*0310*/ USETMAXREG.TRY_ALLOC.CTAPOOL UP0, UR4 ;"]
        )


# -- loops ----------------------------------------------------------------------------------------

# A loop (0x10 to 0xb0) with a rare branch (0x40), a waiting loop of one instruction (0x60), and a
# subroutine that meets again (BSSY/BSYNC); behind it a loop that sums. Last a function that is
# called.
CODE = """\
\tcode for sm_90a
\t\tFunction : _Z4loopv
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], !UPT ;
        /*0020*/                   FMUL R0, R1, R2 ;
        /*0030*/              @!P0 BRA 0x50 ;
        /*0040*/                   MUFU.EX2 R3, R3 ;
        /*0050*/                   LDS.128 R4, [R5] ;
        /*0060*/               @P1 BRA 0x60 ;
        /*0070*/                   BSSY B0, 0xa0 ;
        /*0080*/               @P2 BRA 0x90 ;
        /*0090*/                   BSYNC B0 ;
        /*00a0*/                   LDSM.16.M88.4 R8, [R9] ;
        /*00b0*/               @P3 BRA 0x10 ;
        /*00c0*/                   LDG.E.64 R10, desc[UR4][R12.64] ;
        /*00d0*/                   F2FP.BF16.F32.PACK_AB R14, R15, R16 ;
        /*00e0*/                   STG.E.U16 desc[UR4][R18.64], R14 ;
        /*00f0*/             @!UP0 BRA 0xc0 ;
        /*0100*/                   HMMA.16816.F32 R0, R4, R8, R0 ;
        /*0110*/                   EXIT ;
        /*0120*/                   BRA 0x120 ;
        /*0130*/                   MOV R22, R4 ;
        /*0140*/                   LDG.E.128 R20, desc[UR4][R22.64] ;
        /*0150*/               @P0 BRA 0x140 ;
        /*0160*/                   RET.REL.NODEC R20 0x0 ;
"""


def test_loops_count_what_every_trip_does() -> None:
    ((key, code),) = loops.parse(CODE.splitlines()).items()
    assert key == ("_Z4loopv", "sm_90a")
    assert [one.address for one in code] == list(range(0, 0x170, 0x10))
    first, waiting, second, called = loops.loops_of(code)
    # 0x10, 0x20, 0x30; 0x50; 0x70, 0x80; 0x90; 0xa0, 0xb0: not the rare branch, not the wait.
    assert first["always"] == {
        "issue": 9,
        "fp32": 1,
        "shared_bytes": 16 + 16,
        "tensor_ops": 2 * 64 * 64 * 16,
    }
    assert first["body"] == first["always"] | {"issue": 10, "special": 1}
    assert waiting["body"] == {"issue": 1}
    assert second["always"] == second["body"]
    assert second["body"] == {"issue": 4, "convert": 1, "load_bytes": 8, "store_bytes": 2}
    assert called["body"] == {"issue": 2, "load_bytes": 16}, "of a function that no jump leads to"


TABLE = """\
\tcode for sm_90a
\t\tFunction : _Z5tablev
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   BRXU UR4 -0x20 ;
        /*0020*/                   EXIT ;
        /*0030*/                   LDG.E.64 R10, desc[UR4][R12.64] ;
        /*0040*/                   FMUL R0, R1, R2 ;
        /*0050*/               @P0 BRA 0x40 ;
        /*0060*/               @P1 BRA 0x30 ;
        /*0070*/                   EXIT ;
"""


def test_a_table_of_branches_may_lead_into_a_loop() -> None:
    (code,) = loops.parse(TABLE.splitlines()).values()
    outer, inner = loops.loops_of(code)
    assert outer["body"] == {"issue": 2, "load_bytes": 8}
    assert inner["body"] == {"issue": 2, "fp32": 1}


def test_an_unknown_matrix_product_is_an_error() -> None:
    for name, expected in (
        ("HGMMA.64x128x16.F32", 2 * 64 * 128 * 16),
        ("QGMMA.64x64x32.F32.E4M3.E4M3", 2 * 64 * 64 * 32),
        ("HMMA.16816.F32.BF16", 4096),
    ):
        assert loops.tensor_ops(name) == expected
    with pytest.raises(ValueError, match="no shape"):
        loops.tensor_ops("HMMA.FUTURE")


def test_recorded_loops_come_back_and_differences_are_named(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "loops.json"
    counts = {"issue": 100, "fp32": 60}
    every = {
        "kernel<bf16>": [{"always": counts, "body": counts}],
        "kernel<fp16>": [{"always": counts, "body": counts}],  # stands for the same
        "short": [{"always": {"issue": 3}, "body": {"issue": 4}}],
    }
    loops.write(every, page)
    recorded = loops.read(page)
    assert recorded == {"kernel<bf16>": every["kernel<bf16>"]}
    assert loops.differences(recorded, every) == []
    near = {"kernel<bf16>": [{"always": {**counts, "issue": 110}, "body": counts}]}
    assert loops.differences(recorded, near) == []
    for worse in (
        {"kernel<bf16>": [{"always": {**counts, "issue": 111}, "body": counts}]},
        {"kernel<bf16>": [{"always": counts, "body": {**counts, "special": 5}}]},
        {"kernel<bf16>": [*every["kernel<bf16>"]] * 2},
        {},
    ):
        (line,) = loops.differences(recorded, worse)
        assert line.startswith("kernel<bf16>: its loops")


# -- what a GPU does not run as asked -------------------------------------------------------------

MISCOMPILED = """
	code for sm_90a
		Function : bounded
        /*63f80*/                   VIMNMX.RELU R31, P0, P0, R25, 0x8, PT ;    /* 0x0 */
        /*63f90*/               @P0 BRA 0x64140 ;                              /* 0x0 */
		Function : hinted
        /*0990*/                   LDGSTS.E.BYPASS.128 [R119+UR0], desc[UR1][R10.64], !P2 ;
        /*09a0*/                   LDGSTS.E.BYPASS.128 [R119+UR0+0x200], desc[UR1][R10.64], !P2 ;
		Function : good
        /*0010*/                   VIMNMX.RELU R31, PT, PT, R25, 0x8, PT ;     /* 0x0 */
        /*0020*/                   VIMNMX R50, P1, PT, R24, R81, PT ;          /* 0x0 */
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R17+0x2200], desc[UR10][R20.64] ;
"""


def test_code_that_a_gpu_runs_otherwise_is_found() -> None:
    found = refused.found_in(MISCOMPILED.splitlines())
    assert [(symbol, arch) for symbol, arch, _ in found] == [
        ("bounded", "sm_90a"),
        ("hinted", "sm_90a"),
    ]
