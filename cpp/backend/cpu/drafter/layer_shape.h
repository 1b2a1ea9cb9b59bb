// The check of a drafter's layer.
#pragma once

#include <cstdint>

#include "backend/cpu/linear/packed_linear.h"
#include "base/check.h"

namespace specdec::cpu {

// A layer that is missing has the shape [0, 0].
inline void require_shape(const PackedLinear* layer, const char* name, std::int64_t n,
                          std::int64_t k) {
  const std::int64_t layer_n = layer == nullptr ? 0 : layer->n();
  const std::int64_t layer_k = layer == nullptr ? 0 : layer->k();
  SPECDEC_REQUIRE(layer_n == n && layer_k == k, name, " has shape [", layer_n, ", ", layer_k,
                  "], expected [", n, ", ", k, "]");
}

}  // namespace specdec::cpu
