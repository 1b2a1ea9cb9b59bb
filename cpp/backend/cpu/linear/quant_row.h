// A row of x as the kernels of quantised weights take it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specdec::cpu {

// 32 elements: x = scale * q, to the nearest whole q in -127..127. scale is the largest magnitude
// over 127; a NaN where an element is not finite, with q = 0, so that whatever is computed from the
// block is a NaN too. A block of magnitudes
// up to 1e-30 is all zeros.
struct QuantBlock {
  std::int8_t q[32];
  float scale;
  float scaled_sum;            // scale * (sum of q), for weights with a minimum
  std::int32_t minus_sum;      // -(sum of q), for weights whose zero is not 0
  std::int32_t minus_low_sum;  // of the first 16
};
static_assert(sizeof(QuantBlock) == 48);

}  // namespace specdec::cpu
