// 16-byte vectors of the compiler, any machine. Multiply and add round separately here.
#include "backend/cpu/attention/attention_impl.h"
#include "backend/cpu/e4m3.h"

namespace specdec::cpu {
namespace {

struct Plain {
  static constexpr int W = 4;
  typedef float F __attribute__((vector_size(16)));
  typedef std::int32_t I __attribute__((vector_size(16)));
  static constexpr int kScoreRows = 4, kValueRows = 4, kValueVectors = 2;

  static F fma(F a, F b, F c) { return a * b + c; }
  static F widen_f16(const std::uint16_t* x) {
    return F{f16_to_f32(x[0]), f16_to_f32(x[1]), f16_to_f32(x[2]), f16_to_f32(x[3])};
  }
  static F widen_bf16(const std::uint16_t* x) {
    const I bits = {x[0] << 16, x[1] << 16, x[2] << 16, x[3] << 16};
    return reinterpret_cast<F>(bits);
  }
  static F widen_e4m3(const std::uint8_t* x) {
    const F value = {e4m3_to_float(x[0]), e4m3_to_float(x[1]), e4m3_to_float(x[2]),
                     e4m3_to_float(x[3])};
    return value / kE4m3Factor;
  }
  static F widen_int8(const std::int8_t* x) {
    return F{static_cast<float>(x[0]), static_cast<float>(x[1]), static_cast<float>(x[2]),
             static_cast<float>(x[3])};
  }
  // out[i] = head dim d + i of the W rows.
  static void load_transposed(const float* const* rows, int d, F* out) {
    for (int i = 0; i < 4; ++i) {
      out[i] = F{rows[0][d + i], rows[1][d + i], rows[2][d + i], rows[3][d + i]};
    }
  }
  template <typename T>
  static F load_half(const T*) {
    return F{};  // head dims are multiples of 8: a half vector never occurs
  }
};

}  // namespace

const AttentionKernels& attention_kernels_plain() {
  static constexpr AttentionKernels kernels = make_kernels<Plain>();
  return kernels;
}

}  // namespace specdec::cpu
