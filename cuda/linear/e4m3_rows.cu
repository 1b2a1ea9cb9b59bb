// Rows of x rounded to e4m3 with a scale each.
//
// Grid      (rows): a block owns a row and reads it twice, the second time from L1 or L2.
// Block     256 threads, 16 elements each at a time.
// Bytes     rows * depth * 2 from L2, where x was just put; rows * depth written, or twice that.
// Limit     launch, two rounds of loads and a barrier.
#include "algo/e4m3_row.h"
#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "linear/e4m3_rows.h"
#include "step/row_best.cuh"

namespace specdec::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 16;  // of a thread, two vectors

// The bits of the row's largest magnitude, in all threads: those of a NaN are larger than any.
template <class T>
__device__ __forceinline__ std::uint32_t largest_bits(const T* x, std::int32_t depth,
                                                      std::uint32_t* of_warps) {
  std::uint32_t largest = 0;
  for (std::int32_t k = static_cast<std::int32_t>(threadIdx.x) * kLaneElements; k < depth;
       k += kThreads * kLaneElements) {
    float v[kLaneElements];
    load_floats(x + k, true, v);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      const std::uint32_t bits = __float_as_uint(v[i]) & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
  }
  largest = __reduce_max_sync(kAllLanes, largest);
  if (lane_id() == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) largest = of_warps[w] > largest ? of_warps[w] : largest;
  return largest;
}

__device__ __forceinline__ std::uint32_t e4m3_code(float value) {
  E4M3 code;
  narrow(value, code);
  return code.__x;
}

// 16 successive numbers in the order in which four lanes of a matrix instruction take them: lane t
// has k 2 t and 2 t + 1 of both halves of 8, as its four bytes of a column of packed weights do.
__device__ __forceinline__ uint4 in_order_of_products(const float (&v)[kElements]) {
  std::uint32_t words[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    words[t] = e4m3_code(v[2 * t]) | e4m3_code(v[2 * t + 1]) << 8 | e4m3_code(v[8 + 2 * t]) << 16 |
               e4m3_code(v[8 + 2 * t + 1]) << 24;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ uint4 in_order_of_k(const float (&v)[kElements]) {
  std::uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    words[w] = e4m3_code(v[4 * w]) | e4m3_code(v[4 * w + 1]) << 8 | e4m3_code(v[4 * w + 2]) << 16 |
               e4m3_code(v[4 * w + 3]) << 24;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class T, E4m3Order kOrder>
__global__ void __launch_bounds__(kThreads)
    round_rows_kernel(const LinearParams call, const E4m3Rows to) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  std::uint32_t* of_warps = gpu::dynamic_shared<std::uint32_t>();
  const std::int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(call.x) + row * call.x_row_stride;
  const float scale = e4m3_scale(__uint_as_float(largest_bits(x, call.depth, of_warps)));
  if (threadIdx.x == 0) to.scales[row] = scale;
  char* out = static_cast<char*>(to.numbers) + row * to.row_bytes(call.depth);
  const std::int32_t end = kOrder == E4m3Order::kOfProducts ? e4m3_pitch(call.depth) : call.depth;
  for (std::int32_t k = static_cast<std::int32_t>(threadIdx.x) * kElements; k < end;
       k += kThreads * kElements) {
    float v[kElements] = {};
#pragma unroll
    for (int i = 0; i < kElements; i += kLaneElements) {
      float half[kLaneElements];
      if (k < call.depth) {  // depths are multiples of 16
        load_floats(x + k + i, true, half);
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) v[i + j] = e4m3_nearest(half[j] / scale);
      }
    }
    if constexpr (kOrder == E4m3Order::kOfProducts) {
      *reinterpret_cast<uint4*>(out + k) = in_order_of_products(v);
    } else if constexpr (kOrder == E4m3Order::kPlain) {
      *reinterpret_cast<uint4*>(out + k) = in_order_of_k(v);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; i += kLaneElements) {
        float half[kLaneElements];
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) half[j] = v[i + j];
        store_floats(half, reinterpret_cast<T*>(out) + k + i, true);
      }
    }
  }
}

template <class T>
void launch_round_rows(const LinearParams& call, const E4m3Rows& to) {
  auto kernel = round_rows_kernel<T, E4m3Order::kElements>;
  if (to.order == E4m3Order::kOfProducts) kernel = round_rows_kernel<T, E4m3Order::kOfProducts>;
  if (to.order == E4m3Order::kPlain) kernel = round_rows_kernel<T, E4m3Order::kPlain>;
  gpu::launch(kernel, dim3(static_cast<unsigned>(call.rows)), dim3(kThreads),
              kThreads / 32 * sizeof(std::uint32_t), call.exec.stream,
              gpu::LaunchOptions{.dependent = true}, call, to);
}

}  // namespace

void round_rows(const LinearParams& call, const E4m3Rows& to) {
  call.dtype == DType::kBF16 ? launch_round_rows<__nv_bfloat16>(call, to)
                             : launch_round_rows<__half>(call, to);
}

void e4m3_rows(const E4m3RowsParams& p) {
  if (p.rows == 0) return;
  LinearParams call;
  call.x = p.x;
  call.x_row_stride = p.x_row_stride;
  call.rows = p.rows;
  call.depth = p.depth;
  call.dtype = p.dtype;
  call.exec = p.exec;
  round_rows(call, {p.numbers, p.scales, E4m3Order::kPlain});
}

}  // namespace specdec::cuda
