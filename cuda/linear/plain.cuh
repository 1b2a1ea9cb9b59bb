// The linear layer without tensor cores: float32, and 16-bit matrices that no 16-byte copies reach.
//
// Grid      (column tiles x row tiles): a block makes 32 columns of 16 rows, 4 rows a thread.
// Shared    64 k of the tile's weights and rows as float32, one stage.
// Bytes     columns * depth * size for every 16 rows.
// Limit     latency, with one stage; not for speed.
// Arithmetic: one chain of fused multiply-adds per 64 k, the chains added in ascending order.
#pragma once

#include <cstdint>

#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "linear/linear.h"

namespace specdec::cuda {

inline constexpr int kPlainThreads = 128;
inline constexpr int kPlainColumns = 32;
inline constexpr int kPlainRows = 16;
inline constexpr int kPlainDepth = 64;
inline constexpr int kPlainPitch = kPlainDepth + 1;  // a warp's 32 columns lie in 32 banks

struct PlainShared {
  float weight[kPlainColumns * kPlainPitch];
  float x[kPlainRows * kPlainPitch];
};

template <class T>
__global__ void __launch_bounds__(kPlainThreads)
    plain_linear_kernel(const LinearParams p, const std::int32_t row_tiles) {
  constexpr int kEach = kPlainRows / (kPlainThreads / kPlainColumns);  // rows a thread
  auto& shared = *gpu::dynamic_shared<PlainShared>();
  const int thread = static_cast<int>(threadIdx.x);
  const auto index = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t column_tile = index / row_tiles;
  const std::int32_t first_row = (index - column_tile * row_tiles) * kPlainRows;
  const std::int32_t first_column = column_tile * kPlainColumns;
  const T* x = static_cast<const T*>(p.x);
  const T* weight = static_cast<const T*>(p.weight);
  gpu::grid_dependency_wait();
  gpu::launch_dependents();

  // A line of kPlainDepth floats of a matrix; zeros outside of it.
  const auto load = [&](float* to, const T* from, std::int64_t stride, std::int32_t first,
                        std::int32_t end, int lines, std::int32_t k) {
    for (int i = thread; i < lines * kPlainDepth; i += kPlainThreads) {
      const int line = i / kPlainDepth, at = i % kPlainDepth;
      const bool valid = first + line < end && k + at < p.depth;
      to[line * kPlainPitch + at] = valid ? widen(from[(first + line) * stride + k + at]) : 0.0f;
    }
  };
  const int column = thread % kPlainColumns, row = thread / kPlainColumns * kEach;
  float total[kEach];
#pragma unroll
  for (int r = 0; r < kEach; ++r) total[r] = 0.0f;
  for (std::int32_t k = 0; k < p.depth; k += kPlainDepth) {
    load(shared.weight, weight, p.weight_row_stride, first_column, p.columns, kPlainColumns, k);
    load(shared.x, x, p.x_row_stride, first_row, p.rows, kPlainRows, k);
    __syncthreads();
    float chain[kEach];
#pragma unroll
    for (int r = 0; r < kEach; ++r) chain[r] = 0.0f;
#pragma unroll 16
    for (int at = 0; at < kPlainDepth; ++at) {
      const float w = shared.weight[column * kPlainPitch + at];
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        chain[r] = fmaf(w, shared.x[(row + r) * kPlainPitch + at], chain[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kEach; ++r) total[r] += chain[r];
    __syncthreads();
  }

  const std::int32_t n = first_column + column;
  if (n >= p.columns) return;
  const float bias = p.bias == nullptr ? 0.0f : widen(static_cast<const T*>(p.bias)[n]);
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const std::int32_t m = first_row + row + r;
    if (m >= p.rows) continue;
    const float sum = p.bias == nullptr ? total[r] : total[r] + bias;
    narrow(sum, static_cast<T*>(p.out)[m * p.out_row_stride + n]);
  }
}

template <class T>
void launch_plain_linear(const LinearParams& p) {
  const int row_tiles = (p.rows - 1) / kPlainRows + 1;
  const int column_tiles = (p.columns - 1) / kPlainColumns + 1;
  const gpu::LaunchOptions options{.dependent = true};
  gpu::launch(plain_linear_kernel<T>, dim3(static_cast<unsigned>(row_tiles) * column_tiles),
              dim3(kPlainThreads), sizeof(PlainShared), p.exec.stream, options, p, row_tiles);
}

}  // namespace specdec::cuda
