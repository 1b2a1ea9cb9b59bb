#include "backend/cpu/linear/quant_ops_avx2.h"
#include "backend/cpu/linear/quant_tile.h"

namespace specdec::cpu {
namespace {

struct Avx2 : Avx2Ops {
  static constexpr bool kPairSums = true;
  // Two products must fit 16 bits: 2 * 63 * 127 do, 2 * 255 * 127 do not. Codes of all 8 bits are
  // u = q + 128, and |q| * (x with the sign of q) fit again: 2 * 128 * 127.
  template <bool kAllBits>
  static Ints pair_products(Ints codes, Ints x) {
    if constexpr (kAllBits) {
      const Ints q = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
      x = _mm256_sign_epi8(x, q);
      codes = _mm256_abs_epi8(q);
    }
    return _mm256_maddubs_epi16(codes, x);
  }
  static Ints add_pairs(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
  static Ints add_pairs_to(Ints sum, Ints pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};

}  // namespace

const QuantKernels& quant_kernels_avx2() {
  static constexpr QuantKernels kernels = make_quant_kernels<Avx2>();
  return kernels;
}

}  // namespace specdec::cpu
