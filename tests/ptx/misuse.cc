// The interpreter on PTX written by hand: what it does not know it names, what a kernel does wrong
// it reports as what it is, and lanes that part meet again.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ptx/machine.h"

namespace {

int failures = 0, checks = 0;

// A kernel of one parameter, an array of words.
std::string kernel(const std::string& body) {
  return ".version 9.0\n.target sm_90a\n.address_size 64\n"
         ".extern .shared .align 1024 .b8 bytes[];\n"
         ".visible .entry k(\n.param .u64 k_param_0\n)\n{\n"
         ".reg .pred %p<8>;\n.reg .b16 %h<8>;\n.reg .b32 %r<32>;\n.reg .b64 %rd<16>;\n"
         "ld.param.u64 %rd1, [k_param_0];\ncvta.to.global.u64 %rd2, %rd1;\n"
         "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd3, %r1, 4;\nadd.s64 %rd4, %rd2, %rd3;\n" +
         body + "\nret;\n}\n";
}

struct Result {
  std::string error;
  std::vector<unsigned> words;
};
Result run(const std::string& body, unsigned threads = 32) {
  Result result;
  result.words.assign(256, 0);
  ptx::conceal();
  ptx::expose(result.words.data(), 256 * sizeof(unsigned), "words", true);
  void* words = result.words.data();
  void* arguments[] = {&words};
  ptx::Launch launch;
  launch.block = {threads, 1, 1}, launch.dynamic_bytes = 4096, launch.arguments = arguments;
  try {
    const auto module = ptx::parse(kernel(body));
    const auto program = ptx::link(*module, "k", ptx::kSharedBase);
    ptx::run(*program, launch);
  } catch (const ptx::Error& error) {
    result.error = error.what();
  }
  return result;
}

void reports(const char* what, const std::string& body, const char* text, unsigned threads = 32) {
  ++checks;
  const Result result = run(body, threads);
  if (!result.error.empty() && result.error.find(text) != std::string::npos) return;
  ++failures;
  std::printf("FAIL %s: wanted '%s', got '%s'\n", what, text, result.error.c_str());
}
template <class F>
void gives(const char* what, const std::string& body, F wanted, unsigned threads = 32) {
  ++checks;
  const Result result = run(body, threads);
  for (unsigned i = 0; i < threads && result.error.empty(); i++) {
    if (result.words[i] == wanted(i)) continue;
    ++failures;
    std::printf("FAIL %s: word %u is %u, not %u\n", what, i, result.words[i], wanted(i));
    return;
  }
  if (result.error.empty()) return;
  ++failures;
  std::printf("FAIL %s: %s\n", what, result.error.c_str());
}

void what_is_unknown() {
  reports("an instruction", "dp4a.u32.u32 %r2, %r1, %r1, %r1;",
          "unknown instruction dp4a.u32.u32: dp4a.u32.u32 %r2");
  reports("a modifier", "add.sat.s32 %r2, %r1, %r1;", "unknown instruction add.sat.s32");
  reports("a rounding", "add.rp.f32 %r2, %r1, %r1;", "unknown instruction add.rp.f32");
  reports("a size of wgmma", "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {%r1}, %rd1, 1;",
          "unknown instruction wgmma.mma_async.sync.aligned.m64n64k8");
  reports("a directive", ".loc 1 2 3;", "unknown directive .loc");
  reports("a name", "mov.u32 %r2, nobody;", "unknown name nobody");
  reports("a label", "bra $nowhere;", "no label $nowhere");
  reports("a special register", "mov.u32 %r2, %smid;", "unknown register %smid");
  reports("too few operands", "add.s32 %r2, %r1;", "takes 3 operands, not 2");
  reports("a register of another size", "add.s32 %r2, %r1, %rd1;", "%rd1 is of another size");
  reports("half a register", "add.s32 %h1, %r1, %r1;", "%h1 is of another size");
  reports("a guard that is no predicate", "@%r1 add.s32 %r2, %r1, %r1;", "guard is no predicate");
  reports("an address without brackets", "ld.global.u32 %r2, %rd2;", "wants an address");
}

void what_is_wrong() {
  reports("beyond the array", "st.global.u32 [%rd4+1024], %r1;", "out of bounds: 4 bytes");
  reports("before the array", "ld.global.u32 %r2, [%rd2+-4];", "out of bounds");
  reports("a prefetch of nothing", "prefetch.global.L2 [%rd4+1024];", "out of bounds: 1 bytes");
  reports("misaligned", "st.global.u32 [%rd2+2], %r1;", "misaligned access of 4 bytes");
  reports("beyond shared memory", "mov.u32 %r2, bytes;\nst.shared.u32 [%r2+4096], %r1;",
          "of shared memory");
  reports("a copy that is misaligned",
          "mov.u32 %r2, bytes;\ncp.async.cg.shared.global [%r2+8], [%rd2], 16, 16;",
          "cp.async: misaligned");
  reports("a shuffle of other lanes",
          "mov.u32 %r2, 1;\nshfl.sync.idx.b32 %r3|%p1, %r1, 0, 31, %r2;", "not in its own mask");
  reports("a barrier that half a warp reaches",
          "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra $a;\nbar.sync 0;\n$a:", "deadlock; warp 0");
  reports("a guard before a barrier", "setp.lt.u32 %p1, %r1, 16;\n@%p1 bar.sync 0;",
          "lanes under a guard at an .aligned instruction");
  reports("a barrier that a warp does not reach",
          "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $a;\nbar.sync 0;\n$a:", "waits for a barrier", 64);
  reports("an mbarrier that nobody made",
          "mov.u32 %r2, bytes;\nmbarrier.arrive.shared::cta.b64 _, [%r2];", "no mbarrier at");
  reports("an mbarrier that nobody comes to",
          "mov.u32 %r2, bytes;\nsetp.eq.u32 %p1, %r1, 0;\n"
          "@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;\nbar.sync 0;\n"
          "$a:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;\n@!%p2 bra $a;",
          "waits for an mbarrier");
  reports("bra.uni that is not", "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra.uni $a;\n$a:", "bra.uni");
  reports("a trap", "trap;", "the kernel stopped itself");
}

void what_is_right() {
  gives("lanes that part and meet",
        "and.b32 %r2, %r1, 1;\nsetp.eq.s32 %p1, %r2, 0;\n@%p1 bra $even;\n"
        "mov.u32 %r3, 100;\nbra.uni $join;\n$even:\nmov.u32 %r3, 7;\n$join:\n"
        "vote.sync.ballot.b32 %r4, %p1, -1;\nadd.s32 %r3, %r3, %r4;\nst.global.u32 [%rd4], %r3;",
        [](unsigned i) { return 0x55555555u + (i % 2 ? 100 : 7); });
  gives("loops of different lengths",
        "mov.u32 %r2, 0;\nmov.u32 %r3, 0;\n$a:\nadd.s32 %r2, %r2, %r3;\nadd.s32 %r3, %r3, 1;\n"
        "setp.le.u32 %p1, %r3, %r1;\n@%p1 bra $a;\nshfl.sync.idx.b32 %r4|%p2, %r2, 31, 31, -1;\n"
        "add.s32 %r2, %r2, %r4;\nst.global.u32 [%rd4], %r2;",
        [](unsigned i) { return i * (i + 1) / 2 + 496; });
  gives(
      "warps that end early, and a later barrier without them",
      "setp.ge.u32 %p1, %r1, 64;\n@%p1 ret;\nbar.sync 1, 64;\nst.global.u32 [%rd4], %r1;",
      [](unsigned i) { return i < 64 ? i : 0; }, 96);
  gives("a register that nobody wrote is no zero", "st.global.u32 [%rd4], %r9;",
        [](unsigned) { return ~0u; });
  gives("a copy counts from its wait on",
        "mov.u32 %r2, bytes;\nshl.b32 %r3, %r1, 4;\nadd.s32 %r2, %r2, %r3;\n"
        "cp.async.cg.shared.global [%r2], [%rd2], 16, 0;\ncp.async.commit_group;\n"
        "ld.shared.u32 %r4, [%r2];\ncp.async.wait_group 0;\nld.shared.u32 %r5, [%r2];\n"
        "sub.s32 %r5, %r5, %r4;\nst.global.u32 [%rd4], %r5;",
        [](unsigned) { return 1u; });
  gives("numbers of 8 bits and back",
        "cvt.rn.f32.u32 %r2, %r1;\ncvt.rn.satfinite.e4m3x2.f32 %h1, %r2, %r2;\n"
        "cvt.rn.f16x2.e4m3x2 %r3, %h1;\nmov.b32 {%h2, %h3}, %r3;\ncvt.f32.f16 %r4, %h2;\n"
        "cvt.rzi.u32.f32 %r5, %r4;\nst.global.u32 [%rd4], %r5;",
        [](unsigned i) { return i <= 16                    ? i
                                : (i + 1) / 4 * 4 == i + 1 ? i + 1
                                                           : i / 2 * 2; });
}

}  // namespace

int main() {
  what_is_unknown();
  what_is_wrong();
  what_is_right();
  std::printf("misuse: %d checks, %d failures\n", checks, failures);
  return failures != 0;
}
