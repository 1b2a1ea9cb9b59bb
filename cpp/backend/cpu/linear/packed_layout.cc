// PackedLinear: what follows from type and shape, and packs that lie somewhere already.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "backend/cpu/linear/linear_kernels.h"
#include "backend/cpu/linear/packed_linear.h"
#include "backend/cpu/linear/quant_kernels.h"
#include "base/check.h"

namespace specdec::cpu {
namespace {

constexpr std::uintptr_t kAlignment = 64;

std::int64_t steps_of(WeightType type, std::int64_t k) {
  if (is_quantised(type)) return k / kGroup;
  return type == WeightType::kBF16 || is_e4m3(type) ? (k + 1) / 2 : k;
}

std::int64_t step_bytes(WeightType type) {
  if (is_quantised(type)) return quant_format(type).step_bytes();
  // Scales of a group of k stand in front of its codes, shared out among its steps.
  if (is_e4m3(type)) return scaled_group_bytes() / (kScaledGroup / 2);
  return kPanelColumns * (type == WeightType::kF16 ? 2 : 4);
}

}  // namespace

std::int64_t packed_bytes(WeightType type, std::int64_t n, std::int64_t k) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (n < 1 || k < 1 || n > kMost || k > kMost) return -1;
  if (is_block_format(type) && k % block_size(type).elements != 0) return -1;
  const std::int64_t panels = (n + kPanelColumns - 1) / kPanelColumns;
  const std::int64_t panel = steps_of(type, k) * step_bytes(type);
  return panel > std::numeric_limits<std::int64_t>::max() / panels ? -1 : panels * panel;
}

void PackedLinear::take_layout() {
  panels_ = (n_ + kPanelColumns - 1) / kPanelColumns;
  steps_ = steps_of(type_, k_);
  panel_bytes_ = steps_ * step_bytes(type_);
  kernels_ = &linear_kernels(cpu_isa());
  quant_kernels_ = &quant_kernels(cpu_isa());
}

PackedLinear::PackedLinear(const PackedView& packed)
    : n_(packed.n), k_(packed.k), type_(packed.type), owner_(packed.owner), packed_(packed.data) {
  const std::int64_t bytes = packed_bytes(type_, n_, k_);
  SPECDEC_REQUIRE(bytes > 0, "a pack of [", n_, ", ", k_, "] ", weight_type_name(type_),
                  ": no such weight can be");
  SPECDEC_REQUIRE(reinterpret_cast<std::uintptr_t>(packed_) % kAlignment == 0,
                  "a pack must lie at a multiple of ", kAlignment, " bytes");
  take_layout();
  if (packed.bias != nullptr) {
    bias_.assign(static_cast<std::size_t>(panels_ * kPanelColumns), 0.0f);
    std::copy_n(packed.bias, n_, bias_.begin());
  }
  bytes_ = static_cast<std::size_t>(bytes) + bias_.size() * sizeof(float);
}

}  // namespace specdec::cpu
