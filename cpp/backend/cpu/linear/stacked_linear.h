// Several linear layers of the same input, their outputs side by side: q, k and v. Neighbours of
// one weight type share a pack; a checkpoint may give v more bits than q and k.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/cpu/linear/packed_linear.h"

namespace specdec::cpu {

class StackedLinear {
 public:
  // As PackedLinear's, but types may differ; the form of the input may not. Errors:
  // std::invalid_argument.
  StackedLinear(const std::vector<WeightView>& weights, const std::vector<TensorView>& biases);

  // Packs that lie somewhere already, their outputs side by side. Errors: std::invalid_argument.
  explicit StackedLinear(const std::vector<PackedView>& packs);

  const std::vector<PackedLinear>& parts() const { return parts_; }
  std::int64_t n() const { return n_; }
  InputForm input_form() const { return parts_.front().input_form(); }
  InputForm fast_form(std::int64_t rows) const { return parts_.front().fast_form(rows); }
  std::size_t bytes() const;
  // As PackedLinear::run.
  void run(const InputRows& x, float* y, std::int64_t y_stride) const;

 private:
  void add(PackedLinear part);

  std::vector<PackedLinear> parts_;
  std::int64_t n_ = 0;
};

}  // namespace specdec::cpu
