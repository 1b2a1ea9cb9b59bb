// Warpgroup matrix instructions of sm_90a: D (64 x N, fp32, registers) += A (64 x K) B (K x N).
// Read through hopper.cuh. Kernels see the functions at the end; the macros exist because an
// instruction names every register in its text.
#pragma once

// D registers by range; a wider D appends the next range.
#define SPECDEC_REGS_0_3 "%0,%1,%2,%3"
#define SPECDEC_REGS_4_7 "%4,%5,%6,%7"
#define SPECDEC_REGS_8_15 "%8,%9,%10,%11,%12,%13,%14,%15"
#define SPECDEC_REGS_16_31 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SPECDEC_REGS_32_39 "%32,%33,%34,%35,%36,%37,%38,%39"
#define SPECDEC_REGS_40_47 "%40,%41,%42,%43,%44,%45,%46,%47"
#define SPECDEC_REGS_48_63 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SPECDEC_REGS_64_127                                                        \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,"   \
  "%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101," \
  "%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,"    \
  "%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SPECDEC_LIST_8 SPECDEC_REGS_0_3
#define SPECDEC_LIST_16 SPECDEC_LIST_8 "," SPECDEC_REGS_4_7
#define SPECDEC_LIST_32 SPECDEC_LIST_16 "," SPECDEC_REGS_8_15
#define SPECDEC_LIST_64 SPECDEC_LIST_32 "," SPECDEC_REGS_16_31
#define SPECDEC_LIST_80 SPECDEC_LIST_64 "," SPECDEC_REGS_32_39
#define SPECDEC_LIST_96 SPECDEC_LIST_80 "," SPECDEC_REGS_40_47
#define SPECDEC_LIST_128 SPECDEC_LIST_96 "," SPECDEC_REGS_48_63
#define SPECDEC_LIST_256 SPECDEC_LIST_128 "," SPECDEC_REGS_64_127

#define SPECDEC_D4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define SPECDEC_D8(i) SPECDEC_D4(i), SPECDEC_D4((i) + 4)
#define SPECDEC_D16(i) SPECDEC_D8(i), SPECDEC_D8((i) + 8)
#define SPECDEC_D32(i) SPECDEC_D16(i), SPECDEC_D16((i) + 16)
#define SPECDEC_D_8 SPECDEC_D4(0)
#define SPECDEC_D_16 SPECDEC_D8(0)
#define SPECDEC_D_32 SPECDEC_D16(0)
#define SPECDEC_D_64 SPECDEC_D32(0)
#define SPECDEC_D_80 SPECDEC_D_64, SPECDEC_D8(32)
#define SPECDEC_D_96 SPECDEC_D_80, SPECDEC_D8(40)
#define SPECDEC_D_128 SPECDEC_D_96, SPECDEC_D16(48)
#define SPECDEC_D_256 SPECDEC_D_128, SPECDEC_D32(64), SPECDEC_D32(96)

// The operands behind D: A and B descriptors or four registers of A, whether D counts, and for
// 16-bit types whether B is stored with N contiguous. p0.. are their numbers.
#define SPECDEC_WGMMA(N, SHAPE, OPERANDS, SCALE_AT, ...)                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " SCALE_AT                             \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" SPECDEC_LIST_##N \
               "}, " OPERANDS ";\n}"                                                    \
               : SPECDEC_D_##N                                                          \
               : __VA_ARGS__)
#define SPECDEC_SS_16(N, SHAPE, p0, p1, p2, p3)                               \
  SPECDEC_WGMMA(N, SHAPE, p0 ", " p1 ", p, 1, 1, 0, " p3, p2, "l"(a), "l"(b), \
                "r"(int(accumulate)), "n"(kTransB ? 1 : 0))
#define SPECDEC_RS_16(N, SHAPE, p0, p1, p2, p3, p4, p5, p6)                                     \
  SPECDEC_WGMMA(N, SHAPE, "{" p0 "," p1 "," p2 "," p3 "}, " p4 ", p, 1, 1, " p6, p5, "r"(a[0]), \
                "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)),                  \
                "n"(kTransB ? 1 : 0))
#define SPECDEC_RS_8(N, SHAPE, p0, p1, p2, p3, p4, p5)                                     \
  SPECDEC_WGMMA(N, SHAPE, "{" p0 "," p1 "," p2 "," p3 "}, " p4 ", p, 1, 1", p5, "r"(a[0]), \
                "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)))

// One branch for each N; FORM(N, SHAPE, numbers...) is one of the three above.
#define SPECDEC_FOR_N_4(FORM, SHAPE)                                    \
  if constexpr (N == 8) FORM(8, SHAPE, "%4", "%5", "%6", "%7");         \
  if constexpr (N == 16) FORM(16, SHAPE, "%8", "%9", "%10", "%11");     \
  if constexpr (N == 32) FORM(32, SHAPE, "%16", "%17", "%18", "%19");   \
  if constexpr (N == 64) FORM(64, SHAPE, "%32", "%33", "%34", "%35");   \
  if constexpr (N == 80) FORM(80, SHAPE, "%40", "%41", "%42", "%43");   \
  if constexpr (N == 96) FORM(96, SHAPE, "%48", "%49", "%50", "%51");   \
  if constexpr (N == 128) FORM(128, SHAPE, "%64", "%65", "%66", "%67"); \
  if constexpr (N == 256) FORM(256, SHAPE, "%128", "%129", "%130", "%131")
#define SPECDEC_FOR_N_7(FORM, SHAPE)                                                         \
  if constexpr (N == 8) FORM(8, SHAPE, "%4", "%5", "%6", "%7", "%8", "%9", "%10");           \
  if constexpr (N == 16) FORM(16, SHAPE, "%8", "%9", "%10", "%11", "%12", "%13", "%14");     \
  if constexpr (N == 32) FORM(32, SHAPE, "%16", "%17", "%18", "%19", "%20", "%21", "%22");   \
  if constexpr (N == 64) FORM(64, SHAPE, "%32", "%33", "%34", "%35", "%36", "%37", "%38");   \
  if constexpr (N == 80) FORM(80, SHAPE, "%40", "%41", "%42", "%43", "%44", "%45", "%46");   \
  if constexpr (N == 96) FORM(96, SHAPE, "%48", "%49", "%50", "%51", "%52", "%53", "%54");   \
  if constexpr (N == 128) FORM(128, SHAPE, "%64", "%65", "%66", "%67", "%68", "%69", "%70"); \
  if constexpr (N == 256) FORM(256, SHAPE, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#define SPECDEC_RS_8_OF_7(N, SHAPE, p0, p1, p2, p3, p4, p5, p6) \
  SPECDEC_RS_8(N, SHAPE, p0, p1, p2, p3, p4, p5)

namespace specdec::gpu {

template <int N>
inline constexpr bool kWgmmaWidth =
    N == 8 || N == 16 || N == 32 || N == 64 || N == 80 || N == 96 || N == 128 || N == 256;

// Before each group of wgmma: registers that this thread wrote (D, A fragments) are ready for it.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending of the latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to these registers across this point: the instructions
// write D after the statement that names it. Call it on D before the fence and after the wait.
template <class T, int kCount>
__device__ __forceinline__ void wgmma_hold(T (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(r[i])::"memory");
    } else {
      asm volatile("" : "+r"(r[i])::"memory");
    }
  }
}

// D = A B (+ D if accumulate), 16-bit T, K = 16. a, b: wgmma_descriptor(). kTransB: B lies in
// memory as [k, n] with n contiguous; else as [n, k] with k contiguous.
template <class T, int N, bool kTransB = false>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[N / 2], std::uint64_t a, std::uint64_t b,
                                             bool accumulate) {
  static_assert(kWgmmaWidth<N>);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    SPECDEC_FOR_N_4(SPECDEC_SS_16, "k16.f32.bf16.bf16");
  } else {
    static_assert(std::is_same_v<T, __half>);
    SPECDEC_FOR_N_4(SPECDEC_SS_16, "k16.f32.f16.f16");
  }
}

// The same with A in registers: the fragment of mma_m16n8k16 for the 16 rows of the warp.
template <class T, int N, bool kTransB = false>
__device__ __forceinline__ void wgmma_rs_m64k16(float (&d)[N / 2], const std::uint32_t (&a)[4],
                                                std::uint64_t b, bool accumulate) {
  static_assert(kWgmmaWidth<N>);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    SPECDEC_FOR_N_7(SPECDEC_RS_16, "k16.f32.bf16.bf16");
  } else {
    static_assert(std::is_same_v<T, __half>);
    SPECDEC_FOR_N_7(SPECDEC_RS_16, "k16.f32.f16.f16");
  }
}

// The same of e4m3, K = 32; B has k contiguous in memory.
template <int N>
__device__ __forceinline__ void wgmma_rs_m64k32_e4m3(float (&d)[N / 2], const std::uint32_t (&a)[4],
                                                     std::uint64_t b, bool accumulate) {
  static_assert(kWgmmaWidth<N>);
  SPECDEC_FOR_N_7(SPECDEC_RS_8_OF_7, "k32.f32.e4m3.e4m3");
}

}  // namespace specdec::gpu
