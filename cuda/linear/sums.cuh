// Adds up what a product has left in pieces (backend/linear_sums.h): for the kernel that does
// nothing else, and for those that read a product and add up on the way.
#pragma once

#include <cstdint>

#include "backend/linear_sums.h"
#include "gpu/gpu.cuh"
#include "kv/elements.cuh"

namespace specdec::cuda {

// 8 columns of a row: the sums of its units, group by group. Units of a group are a power of two.
// kInFlight units are asked for at once.
template <int kInFlight>
__device__ __forceinline__ void add_units(const LinearSums& sums, std::int64_t row, int column,
                                          float (&total)[kLaneElements]) {
  const float* from = sums.units + row * sums.row_stride + column;
  float group[kLaneElements];
#pragma unroll kInFlight
  for (std::int32_t u = 0; u < sums.num_units; ++u) {
    float part[kLaneElements];
    load_floats(from + u * sums.unit_stride, true, part);
    const bool begins = (u & (sums.units_per_group - 1)) == 0;
    const bool ends = ((u + 1) & (sums.units_per_group - 1)) == 0;
    const bool is_first = u < sums.units_per_group;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      group[i] = begins ? part[i] : group[i] + part[i];
      if (ends) total[i] = is_first ? group[i] : total[i] + group[i];
    }
  }
}

// Sums become a result: times the row's scale, plus the bias of those columns that there are.
template <class T>
__device__ __forceinline__ void complete_sums(const float* row_scales, const void* bias,
                                              std::int64_t row, int column, int columns,
                                              float (&sums)[kLaneElements]) {
  if (row_scales != nullptr) {
    const float scale = row_scales[row];
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) sums[i] *= scale;
  }
  if (bias == nullptr) return;
  const T* from = static_cast<const T*>(bias) + column;
  float b[kLaneElements];
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) b[i] = column + i < columns ? widen(from[i]) : 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) sums[i] += b[i];
}

// As a store to T and a load would leave it.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  T stored;
  narrow(x, stored);
  return widen(stored);
}

// 8 columns of a row as a load from the product's result would give them.
template <class T, int kInFlight = 4>
__device__ __forceinline__ void load_sums(const LinearSums& sums, std::int64_t row, int column,
                                          float (&x)[kLaneElements]) {
  add_units<kInFlight>(sums, row, column, x);
  complete_sums<T>(sums.row_scales, sums.bias, row, column, column + kLaneElements, x);
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) x[i] = rounded<T>(x[i]);
}

}  // namespace specdec::cuda
