// A packed weight's format and dtype as arguments of a template.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend/packed_weight.h"
#include "base/types.h"

namespace specdec::cuda {

template <class T, class F>
void by_format_of(WeightFormat format, F f) {
  switch (format) {
    case WeightFormat::kQ8_0:
      return f.template operator()<T, WeightFormat::kQ8_0>();
    case WeightFormat::kQ4_0:
      return f.template operator()<T, WeightFormat::kQ4_0>();
    case WeightFormat::kQ4_1:
      return f.template operator()<T, WeightFormat::kQ4_1>();
    case WeightFormat::kQ4_G:
      return f.template operator()<T, WeightFormat::kQ4_G>();
    case WeightFormat::kQ4_K:
      return f.template operator()<T, WeightFormat::kQ4_K>();
    case WeightFormat::kQ8_G:
      return f.template operator()<T, WeightFormat::kQ8_G>();
    case WeightFormat::kQ5_K:
      return f.template operator()<T, WeightFormat::kQ5_K>();
    case WeightFormat::kQ6_K:
      return f.template operator()<T, WeightFormat::kQ6_K>();
    default:
      return f.template operator()<T, WeightFormat::kF8_G>();
  }
}

// Calls f<T, kFormat>() with the 16-bit type and the format, in which kF8_A8 is kF8_G.
template <class F>
void by_format(DType dtype, WeightFormat format, F f) {
  if (dtype == DType::kBF16) return by_format_of<__nv_bfloat16>(format, f);
  by_format_of<__half>(format, f);
}

}  // namespace specdec::cuda
