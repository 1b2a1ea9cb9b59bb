// A row of x as the kernels of quantised weights take it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specdec::cpu {

// 32 elements: x = scale * q, to the nearest whole q in -127..127. scale is the largest magnitude
// over 127; a NaN where an element is not finite, with q = 0, so that whatever is computed from the
// block is a NaN too. A block of magnitudes
// up to 1e-30 is all zeros.
//
// One large element makes the steps of its block coarse. So a block of which one element holds more
// than three quarters of the sum of squares has a second block for what rounding left,
// x - scale * q, rounded the same way. A row is [n / 32][2] blocks; a second one is set where the
// first says has_rest.
struct QuantBlock {
  std::int8_t q[32];
  float scale;
  float scaled_sum;            // scale * (sum of q), for weights with a minimum
  std::int32_t minus_sum;      // -(sum of q), for weights whose zero is not 0
  std::int16_t minus_low_sum;  // of the first 16
  std::int16_t has_rest;       // 0 or 1
};
static_assert(sizeof(QuantBlock) == 48);

// About one block in twelve. Of what 8 bits do to the scores of SmolLM2 (their divergence from
// those of inputs that are not rounded) a quarter is left.
constexpr bool needs_rest(std::int32_t sum_of_q_squares) {
  return 3 * sum_of_q_squares < 4 * 127 * 127;
}

}  // namespace specdec::cpu
