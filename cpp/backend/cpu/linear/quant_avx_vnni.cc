#include "backend/cpu/linear/quant_ops_avx2.h"
#include "backend/cpu/linear/quant_tile.h"

namespace specdec::cpu {
namespace {

struct AvxVnni : Avx2Ops {
  static constexpr int kVecs = 2;
  static constexpr int kBlockRows = 4;  // 8 of 16 registers hold sums
  static constexpr int kRegisterRows = 1;
  // See quant_avx512_vnni.cc.
  static void add_dot(Ints& sum, Ints codes, Ints x) {
    asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(x));
  }
};

}  // namespace

const QuantKernels& quant_kernels_avx_vnni() {
  static constexpr QuantKernels kernels = make_quant_kernels<AvxVnni>();
  return kernels;
}

}  // namespace specdec::cpu
