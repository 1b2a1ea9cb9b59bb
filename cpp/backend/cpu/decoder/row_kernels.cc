#include "backend/cpu/decoder/row_kernels.h"

#include <cmath>
#include <vector>

#include "backend/cpu/half.h"

namespace specdec::cpu {
namespace {

struct F32 {
  using Stored = float;
  static float widen(float x) { return x; }
  static float narrow(float x) { return x; }
};

struct BF16 {
  using Stored = std::uint16_t;
  static float widen(std::uint16_t x) { return bf16_to_float(x); }
  static std::uint16_t narrow(float x) { return float_to_bf16(x); }
};

struct F16 {
  using Stored = std::uint16_t;
  static float widen(std::uint16_t x) { return f16_to_float(x); }
  static std::uint16_t narrow(float x) { return float_to_f16(x); }
};

template <class Function>
void by_type(DType dtype, const Function& function) {
  if (dtype == DType::kBF16) return function.template operator()<BF16>();
  if (dtype == DType::kF16) return function.template operator()<F16>();
  return function.template operator()<F32>();
}

template <class E>
float rounded(float x) {
  return E::widen(E::narrow(x));
}

// x [columns] becomes its norm, rounded to E.
template <class E>
void normalise(const RmsNormParams& p, const void* weight, float* x) {
  const auto* w = static_cast<const typename E::Stored*>(weight);
  double sum = 0.0;
  for (std::int32_t i = 0; i < p.columns; ++i) sum += static_cast<double>(x[i]) * x[i];
  const float inverse = 1.0f / std::sqrt(static_cast<float>(sum / p.columns) + p.eps);
  for (std::int32_t i = 0; i < p.columns; ++i) {
    const float factor = E::widen(w[i]);
    x[i] = p.plus_one ? rounded<E>(x[i] * inverse * (1.0f + factor))
                      : rounded<E>(factor * rounded<E>(x[i] * inverse));
  }
}

float activate(GateActivation activation, float x) {
  if (activation == GateActivation::kSilu) return x / (1.0f + std::exp(-x));
  const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + std::tanh(inner));
}

}  // namespace

void rms_norm(const RmsNormParams& p) {
  by_type(p.dtype, [&]<class E>() {
    using Stored = typename E::Stored;
    std::vector<float> x(p.columns), added(p.columns);
    for (std::int64_t row = 0; row < p.rows; ++row) {
      auto* from = static_cast<Stored*>(p.x) + row * p.x_row_stride;
      for (std::int32_t i = 0; i < p.columns; ++i) x[i] = E::widen(from[i]);
      if (p.added != nullptr) {
        const auto* a = static_cast<const Stored*>(p.added) + row * p.added_row_stride;
        for (std::int32_t i = 0; i < p.columns; ++i) added[i] = E::widen(a[i]);
        if (p.added_weight != nullptr) normalise<E>(p, p.added_weight, added.data());
        for (std::int32_t i = 0; i < p.columns; ++i) {
          x[i] = rounded<E>(x[i] + added[i]);
          from[i] = E::narrow(x[i]);
        }
      }
      normalise<E>(p, p.weight, x.data());
      auto* out = static_cast<Stored*>(p.out) + row * p.out_row_stride;
      for (std::int32_t i = 0; i < p.columns; ++i) out[i] = E::narrow(x[i]);
    }
  });
}

void gated_activation(const GatedActivationParams& p) {
  by_type(p.dtype, [&]<class E>() {
    using Stored = typename E::Stored;
    for (std::int64_t row = 0; row < p.rows; ++row) {
      const auto* gate = static_cast<const Stored*>(p.x) + row * p.x_row_stride;
      auto* out = static_cast<Stored*>(p.out) + row * p.out_row_stride;
      for (std::int32_t i = 0; i < p.columns; ++i) {
        const float active = rounded<E>(activate(p.activation, E::widen(gate[i])));
        out[i] = E::narrow(active * E::widen(gate[p.columns + i]));
      }
    }
  });
}

}  // namespace specdec::cpu
