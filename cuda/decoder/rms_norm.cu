// RMSNorm of rows, with the addition before it.
//
// Grid      (rows): a block owns a row. As many threads as the row has vectors of 8, up to 1024; a
//           thread keeps its first two vectors, or of a product in pieces its first one, in
//           registers between the sum and the product, and reads what goes beyond (rows of more
//           than 16384 columns, or 8192) again.
// Bytes     rows * columns * size * (x once or twice, added, out) + weights, each once per block. A
//           product in pieces (`sums`) is read in place of `added`: units * rows * columns * 4.
// Limit     few rows: launch, one load, two barriers, in turn. Many rows: the bytes.
// The sum's order follows from the number of columns alone.
#include "decoder/decoder.h"
#include "decoder/row_elements.cuh"
#include "gpu/gpu.cuh"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / 32;

// The sum over the block's threads, in all of them. `shared` has a float for each warp and is not
// used again.
__device__ __forceinline__ float block_sum(float sum, float* shared) {
  sum = gpu::warp_sum(sum);
  const int warps = static_cast<int>(blockDim.x) / 32;
  if (lane_id() == 0) shared[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < warps; ++w) total += shared[w];
  return total;
}

__device__ __forceinline__ float squares(const RowVector& x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) sum += x[i] * x[i];
  return sum;
}

__device__ __forceinline__ float inverse_root(float sum, const RmsNormParams& p) {
  return 1.0f / sqrtf(sum / static_cast<float>(p.columns) + p.eps);
}

// x becomes what a store of its norm would leave.
template <class T>
__device__ __forceinline__ void scale(const RmsNormParams& p, const T* weight, int at, bool aligned,
                                      float inverse, RowVector& x) {
  RowVector w;
  load_vector(weight, at, p.columns, aligned, w);
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    x[i] = p.plus_one ? rounded<T>(x[i] * inverse * (1.0f + w[i]))
                      : rounded<T>(w[i] * rounded<T>(x[i] * inverse));
  }
}

// kInFlight: `sums` in place of `added`, of which so many units are asked for at once; 0: `added`.
// A multiprocessor need hold one block alone: the compiler would spill to have room for another.
template <class T, int kThreads, int kInFlight>
__global__ void __launch_bounds__(kThreads, 1)
    rms_norm_kernel(const RmsNormParams p, const bool aligned) {
  constexpr bool kInPieces = kInFlight > 0;
  constexpr int kKept = kInPieces ? 1 : 2;
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  float* sums = gpu::dynamic_shared<float>();  // [2, kMaxWarps]
  const std::int64_t row = blockIdx.x;
  T* x = static_cast<T*>(p.x) + row * p.x_row_stride;
  T* out = static_cast<T*>(p.out) + row * p.out_row_stride;
  const T* added =
      p.added == nullptr ? nullptr : static_cast<const T*>(p.added) + row * p.added_row_stride;
  const T* added_weight = static_cast<const T*>(p.added_weight);
  const T* weight = static_cast<const T*>(p.weight);
  const int step = static_cast<int>(blockDim.x) * kLaneElements;
  const int first = static_cast<int>(threadIdx.x) * kLaneElements;

  float added_inverse = 0.0f;
  if (!kInPieces && added_weight != nullptr) {
    float sum = 0.0f;
    for (int at = first; at < p.columns; at += step) {
      RowVector a;
      load_vector(added, at, p.columns, aligned, a);
      sum += squares(a);
    }
    added_inverse = inverse_root(block_sum(sum, sums + kMaxWarps), p);
  }

  // A vector of the row that is normalised; stored, if it is new.
  const auto take = [&](int at, RowVector& v) {
    load_vector(x, at, p.columns, aligned, v);
    if (!kInPieces && added == nullptr) return;
    RowVector a;
    if constexpr (kInPieces) {
      load_sums<T, kInFlight>(p.sums, row, at, a);
    } else {
      load_vector(added, at, p.columns, aligned, a);
      if (added_weight != nullptr) scale(p, added_weight, at, aligned, added_inverse, a);
    }
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) v[i] = rounded<T>(v[i] + a[i]);
    store_vector(v, x, at, p.columns, aligned);
  };
  RowVector kept[kKept];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int at = first + i * step;
    if (at >= p.columns) continue;
    take(at, kept[i]);
    sum += squares(kept[i]);
  }
  for (int at = first + kKept * step; at < p.columns; at += step) {
    RowVector v;
    take(at, v);
    sum += squares(v);
  }
  const float inverse = inverse_root(block_sum(sum, sums), p);

#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int at = first + i * step;
    if (at >= p.columns) continue;
    scale(p, weight, at, aligned, inverse, kept[i]);
    store_vector(kept[i], out, at, p.columns, aligned);
  }
  for (int at = first + kKept * step; at < p.columns; at += step) {
    RowVector v;
    load_vector(x, at, p.columns, aligned, v);
    scale(p, weight, at, aligned, inverse, v);
    store_vector(v, out, at, p.columns, aligned);
  }
}

int threads_for(std::int32_t columns) {
  const int vectors = (columns + kLaneElements - 1) / kLaneElements;
  const int threads = (vectors + 31) / 32 * 32;
  return threads < kMaxThreads ? threads : kMaxThreads;
}

bool is_aligned(const RmsNormParams& p) {
  const auto fits = [&](const void* pointer, std::int64_t stride) {
    return aligned_for_lanes(pointer, p.dtype, stride);
  };
  return p.columns % kLaneElements == 0 && fits(p.x, p.x_row_stride) &&
         fits(p.out, p.out_row_stride) && fits(p.weight, 0) && fits(p.added, p.added_row_stride) &&
         fits(p.added_weight, 0);
}

}  // namespace

void rms_norm(const RmsNormParams& p) {
  if (p.rows == 0) return;
  by_type(p.dtype, [&]<class T>() {
    const gpu::LaunchOptions options{.dependent = true};
    const int threads = threads_for(p.columns);
    // Half as many threads have registers for all that is in flight.
    const auto kernel = p.sums.units == nullptr      ? rms_norm_kernel<T, kMaxThreads, 0>
                        : threads <= kMaxThreads / 2 ? rms_norm_kernel<T, kMaxThreads / 2, 4>
                                                     : rms_norm_kernel<T, kMaxThreads, 1>;
    gpu::launch(kernel, dim3(static_cast<unsigned>(p.rows)), dim3(static_cast<unsigned>(threads)),
                2 * kMaxWarps * sizeof(float), p.exec.stream, options, p, is_aligned(p));
  });
}

}  // namespace specdec::cuda
