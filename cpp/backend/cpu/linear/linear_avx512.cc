#include "backend/cpu/linear/linear_ops_avx512.h"
#include "backend/cpu/linear/linear_tile.h"

namespace specdec::cpu {
namespace {

// e4m3 to bf16. A normal number keeps its bits, with the exponent's bias 7 made 127; of the eight
// subnormal magnitudes, each a normal bf16, there is a table.
void widen(const std::byte* codes, std::uint16_t* out, const std::byte* prefetch) {
  const __m512i subnormal = _mm512_castsi128_si512(
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __m512i magnitude_bits = _mm512_set1_epi16(0x7f), sign_bit = _mm512_set1_epi16(-0x8000),
                bias = _mm512_set1_epi16(120 << 7), smallest_normal = _mm512_set1_epi16(8);
  const auto wide = [&](__m512i code) {
    const __m512i magnitude = _mm512_and_si512(code, magnitude_bits);
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), bias);
    const __m512i value = _mm512_mask_permutexvar_epi16(
        normal, _mm512_cmplt_epu16_mask(magnitude, smallest_normal), magnitude, subnormal);
    // value | (code << 8 & sign_bit)
    return _mm512_ternarylogic_epi32(value, _mm512_slli_epi16(code, 8), sign_bit, 0xf8);
  };
  for (int i = 0; i < kScaledCodes; i += 64) {
    Avx512::prefetch(prefetch + i);
    const __m512i step = _mm512_load_si512(codes + i), zero = _mm512_setzero_si512();
    _mm512_store_si512(out + i, wide(_mm512_unpacklo_epi8(step, zero)));
    _mm512_store_si512(out + i + 32, wide(_mm512_unpackhi_epi8(step, zero)));
  }
}

}  // namespace

const LinearKernels& linear_kernels_avx512() {
  static constexpr LinearKernels kernels =
      make_linear_kernels<Avx512F32, Avx512F16, Avx512Bf16Split, 12>(&widen);
  return kernels;
}

}  // namespace specdec::cpu
