#include "backend/cpu/linear/linear_op.h"

#include <vector>

#include "backend/cpu/half.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

constexpr std::int32_t kChain = 64;  // products of one running sum

float element(const void* base, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::kBF16:
      return bf16_to_float(static_cast<const std::uint16_t*>(base)[at]);
    case DType::kF16:
      return f16_to_float(static_cast<const std::uint16_t*>(base)[at]);
    default:
      return static_cast<const float*>(base)[at];
  }
}

void store(float value, void* base, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::kBF16:
      static_cast<std::uint16_t*>(base)[at] = float_to_bf16(value);
      return;
    case DType::kF16:
      static_cast<std::uint16_t*>(base)[at] = float_to_f16(value);
      return;
    default:
      static_cast<float*>(base)[at] = value;
  }
}

void widen_row(const void* base, DType dtype, std::int64_t first, std::int32_t count, float* to) {
  for (std::int32_t k = 0; k < count; ++k) to[k] = element(base, dtype, first + k);
}

float dot(const float* a, const float* b, std::int32_t depth) {
  float total = 0.0f;
  for (std::int32_t k = 0; k < depth; k += kChain) {
    float chain = 0.0f;
    const std::int32_t end = k + kChain < depth ? k + kChain : depth;
    for (std::int32_t i = k; i < end; ++i) chain += a[i] * b[i];
    total += chain;
  }
  return total;
}

}  // namespace

void linear(const LinearParams& p) {
  std::vector<float> x(static_cast<std::size_t>(p.rows) * static_cast<std::size_t>(p.depth));
  for (std::int64_t r = 0; r < p.rows; ++r) {
    widen_row(p.x, p.dtype, r * p.x_row_stride, p.depth, x.data() + r * p.depth);
  }
  ThreadPool& pool = ThreadPool::global();
  pool.run([&](int rank) {
    std::vector<float> weight(static_cast<std::size_t>(p.depth));
    const std::int64_t begin = std::int64_t{p.columns} * rank / pool.size();
    const std::int64_t end = std::int64_t{p.columns} * (rank + 1) / pool.size();
    for (std::int64_t n = begin; n < end; ++n) {
      widen_row(p.weight, p.dtype, n * p.weight_row_stride, p.depth, weight.data());
      for (std::int64_t r = 0; r < p.rows; ++r) {
        float sum = dot(x.data() + r * p.depth, weight.data(), p.depth);
        if (p.bias != nullptr) sum += element(p.bias, p.dtype, n);
        store(sum, p.out, p.dtype, r * p.out_row_stride + n);
      }
    }
  });
}

}  // namespace specdec::cpu
