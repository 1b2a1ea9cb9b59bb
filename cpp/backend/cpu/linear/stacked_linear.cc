#include "backend/cpu/linear/stacked_linear.h"

#include <utility>

#include "base/check.h"

namespace specdec::cpu {

StackedLinear::StackedLinear(const std::vector<WeightView>& weights,
                             const std::vector<TensorView>& biases) {
  for (std::size_t first = 0, last; first < weights.size(); first = last) {
    last = first + 1;
    while (last < weights.size() && weights[last].type == weights[first].type) ++last;
    const auto from = static_cast<std::ptrdiff_t>(first), to = static_cast<std::ptrdiff_t>(last);
    add(PackedLinear(std::vector<WeightView>(weights.begin() + from, weights.begin() + to),
                     std::vector<TensorView>(biases.begin() + from, biases.begin() + to)));
  }
}

StackedLinear::StackedLinear(const std::vector<PackedView>& packs) {
  SPECDEC_REQUIRE(!packs.empty(), "stacked weights: none given");
  for (const PackedView& pack : packs) add(PackedLinear(pack));
}

void StackedLinear::add(PackedLinear part) {
  SPECDEC_REQUIRE(parts_.empty() || part.input_form() == input_form(), "weights of type ",
                  weight_type_name(part.type()), " and ",
                  weight_type_name(parts_.empty() ? part.type() : parts_.front().type()),
                  " read the same input: convert the checkpoint to one dtype");
  n_ += part.n();
  parts_.push_back(std::move(part));
}

std::size_t StackedLinear::bytes() const {
  std::size_t bytes = 0;
  for (const PackedLinear& part : parts_) bytes += part.bytes();
  return bytes;
}

void StackedLinear::run(const InputRows& x, float* y, std::int64_t y_stride) const {
  for (const PackedLinear& part : parts_) {
    part.run(x, y, y_stride);
    y += part.n();
  }
}

}  // namespace specdec::cpu
