"""Mutants of asm text: a wrapper of cuda/gpu, what stands in its asm, what stands there instead.

The emulator compiles none of it. `program` is the conformance program of tests/simt that has to
notice.
"""

from __future__ import annotations

import dataclasses

GPU, HOPPER, WGMMA = "cuda/gpu/gpu.cuh", "cuda/gpu/hopper.cuh", "cuda/gpu/wgmma.cuh"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`after`: the text is looked for behind this one (the wrapper's name)."""

    what: str
    file: str
    after: str
    old: str
    new: str
    program: str = "conformance"


def _sync(what: str, after: str, old: str, new: str) -> Mutant:
    return Mutant(what, GPU, after, old, new)


def _hopper(what: str, after: str, old: str, new: str) -> Mutant:
    return Mutant(what, HOPPER, after, old, new, "hopper")


def _wgmma(what: str, after: str, old: str, new: str) -> Mutant:
    return Mutant(what, WGMMA, after, old, new, "hopper")


MUTANTS = [
    _sync("cp.async: copies what is not valid", "void cp_async_16(", "16, %2;", "16, 16;"),
    _sync("cp.async: the size of the source is 0", "void cp_async_16(", "16, %2;", "16, 0;"),
    _sync("and_or: exclusive or", "and_or(", "0xea", "0x6a"),
    _sync("and_or: the mask is not applied", "and_or(", "%1, %2, %3", "%1, %1, %3"),
    _sync("cp.async: no commit", "cp_async_commit()", "cp.async.commit_group;", ""),
    _sync("cp.async: waits for one group less", "cp_async_wait()", "wait_group %0", "wait_group 1"),
    _sync("ldmatrix x4: register order", "ldmatrix_x4(", "{%0,%1,%2,%3}", "{%0,%2,%1,%3}"),
    _sync("ldmatrix x4: transposes", "ldmatrix_x4(", "x4.shared", "x4.trans.shared"),
    _sync("ldmatrix x4.trans: does not", "ldmatrix_x4_trans(", "x4.trans.shared", "x4.shared"),
    _sync("ldmatrix x4.trans: register order", "ldmatrix_x4_trans(", "{%0,%1,", "{%1,%0,"),
    _sync("ldmatrix x2: register order", "ldmatrix_x2(", "{%0,%1}", "{%1,%0}"),
    _sync("mma bf16: registers of B", "void mma_m16n8k16(", "{%8,%9}", "{%9,%8}"),
    _sync("mma bf16: registers of A", "void mma_m16n8k16(", "{%4,%5,%6,%7}", "{%4,%6,%5,%7}"),
    _sync(
        "mma bf16: order of C",
        "void mma_m16n8k16(",
        "{%8,%9}, {%0,%1,%2,%3}",
        "{%8,%9}, {%2,%1,%0,%3}",
    ),
    _sync("mma bf16: order of D", "void mma_m16n8k16(", '"{%0,%1,%2,%3}', '"{%1,%0,%2,%3}'),
    _sync("mma f16: takes bf16", "} else {\n    asm volatile(", "f16.f16.f32", "bf16.bf16.f32"),
    _sync("ex2 is lg2", "exp2_approx(", "ex2.approx", "lg2.approx"),
    _sync("ld.relaxed: the next word", "load_relaxed(", "[%1]", "[%1+4]"),
    _sync("ld.acquire: the next word", "load_acquire(", "[%1]", "[%1+4]"),
    _sync("st.release: the next word", "store_release(", "[%0], %1", "[%0+4], %1"),
    _sync("atom.add is max", "atomic_add_acq_rel(", "global.add.u32", "global.max.u32"),
    _sync(
        "atom.add: returns what was added",
        "atomic_add_acq_rel(",
        "add.u32 %0, [%1], %2;",
        "add.u32 %0, [%1], %2; mov.u32 %0, %2;",
    ),
    _hopper("mbarrier: expects one arrival", "void mbarrier_init(", "[%0], %1;", "[%0], 1;"),
    _hopper(
        "mbarrier: no fence behind its init",
        "void mbarrier_init_fence(",
        "fence.mbarrier_init.release.cluster;",
        "",
    ),
    _hopper(
        "mbarrier: announces no bytes",
        "arrive_expect_tx(",
        "arrive.expect_tx.shared::cta.b64 _, [%0], %1;",
        "arrive.shared::cta.b64 _, [%0];",
    ),
    _hopper("mbarrier: announces 16 bytes", "arrive_expect_tx(", "_, [%0], %1;", "_, [%0], 16;"),
    _hopper("mbarrier: waits for parity 0", "void mbarrier_wait(", "p, [%1], %2;", "p, [%1], 0;"),
    _hopper("mbarrier: waits for parity 1", "void mbarrier_wait(", "p, [%1], %2;", "p, [%1], 1;"),
    _hopper(
        "mbarrier: does not wait", "void mbarrier_wait(", "selp.u32 %0, 1, 0, p;", "mov.u32 %0, 1;"
    ),
    _hopper(
        "bar.sync: the whole block", "void named_barrier_sync(", "bar.sync %0, %1;", "bar.sync %0;"
    ),
    _hopper(
        "elect: all but one", "bool elect_one(", "selp.u32 %0, 1, 0, p;", "selp.u32 %0, 0, 1, p;"
    ),
    _hopper("tile of rank 2: coordinates", "void tma_load_2d(", "{%2, %3}", "{%3, %2}"),
    _hopper(
        "tile of rank 4: coordinates", "void tma_load_4d(", "{%2, %3, %4, %5}", "{%2, %3, %5, %4}"
    ),
    _wgmma("wgmma: two registers of D change places", "REGS_0_3 ", '"%0,%1,', '"%1,%0,'),
    _wgmma("wgmma: registers of a wide D", "REGS_64_127", '"%64,%65,', '"%65,%64,'),
    _wgmma(
        "wgmma: the accumulate bit turned round",
        "SPECDEC_WGMMA(",
        "setp.ne.b32 p, ",
        "setp.eq.b32 p, ",
    ),
    _wgmma("wgmma: A and B change places", "SPECDEC_SS_16(", 'p0 ", " p1 ', 'p1 ", " p0 '),
    _wgmma("wgmma: -A", "SPECDEC_SS_16(", "p, 1, 1, 0, ", "p, -1, 1, 0, "),
    _wgmma("wgmma: never transposes B", "SPECDEC_SS_16(", 'p, 1, 1, 0, " p3', 'p, 1, 1, 0, 0"'),
    _wgmma("wgmma, A in registers: -B", "SPECDEC_RS_16(", "p, 1, 1, ", "p, 1, -1, "),
    _wgmma(
        "wgmma, A in registers: their order",
        "SPECDEC_RS_16(",
        'p0 "," p1 "," p2',
        'p0 "," p2 "," p1',
    ),
    _wgmma(
        "wgmma, A in registers: never transposes B",
        "SPECDEC_RS_16(",
        'p, 1, 1, " p6',
        'p, 1, 1, 0"',
    ),
    _wgmma("wgmma e4m3: -A", "SPECDEC_RS_8(", "p, 1, 1", "p, -1, 1"),
    _wgmma(
        "wgmma e4m3, A in registers: their order",
        "SPECDEC_RS_8(",
        'p0 "," p1 "," p2 "," p3',
        'p1 "," p0 "," p2 "," p3',
    ),
    _wgmma("wgmma: bf16 is f16", "void wgmma_m64k16(", "k16.f32.bf16.bf16", "k16.f32.f16.f16"),
    _wgmma(
        "wgmma, A in registers: f16 is bf16",
        "void wgmma_rs_m64k16(",
        "k16.f32.f16.f16",
        "k16.f32.bf16.bf16",
    ),
    _wgmma("wgmma: no fence", "void wgmma_fence(", "wgmma.fence.sync.aligned;", ""),
    _wgmma("wgmma: no commit", "void wgmma_commit(", "wgmma.commit_group.sync.aligned;", ""),
    _wgmma(
        "wgmma: waits for one group less",
        "void wgmma_wait(",
        "wait_group.sync.aligned %0",
        "wait_group.sync.aligned 1",
    ),
]
