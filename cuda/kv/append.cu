// K/V of the step's rows into the pages, row i of request b at slot kv_len[b] + i.
//
// Grid      (rows, lanes of a row / block). A thread owns 8 elements of one KV head of one row, of
// K
//           and of V: two loads in flight, two stores. Nothing is shared between threads.
// Bytes     R * G * K * 2 * (size in + size stored), each once.
// Limit     below about 1000 rows the latency of launch, cu_rows, page table and one load, in turn;
//           above, the bytes.
#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "kv/kv.h"
#include "kv/storage.cuh"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kAppendThreads = 128;

// kCopy: pages of the input's type, whose bits are moved as they are.
template <class In, bool kCopy>
__global__ void __launch_bounds__(kAppendThreads)
    append_kernel(const AppendKvParams p, const bool aligned) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int row = static_cast<int>(blockIdx.x);
  const RowPlace place = find_row(p.step, p.cache, row);
  if (place.page < 0) {
    if (threadIdx.x == 0) report(p.exec.status, place.request, place.flags);
    return;
  }
  const int per_head = p.cache.head_dim / kLaneElements;
  const int item = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  if (item >= p.cache.num_kv_heads * per_head) return;
  const int head = item / per_head, at = item % per_head * kLaneElements;
  const In* k = static_cast<const In*>(p.k) + row * p.k_row_stride + item * kLaneElements;
  const In* v = static_cast<const In*>(p.v) + row * p.v_row_stride + item * kLaneElements;
  const std::int64_t to =
      slot_elements(p.cache, p.layer, place.page, place.slot) + head * p.cache.stride_head + at;
  if constexpr (kCopy) {
    Pack<In, kLaneElements> from_k, from_v;
    from_k.load(k, aligned);
    from_v.load(v, aligned);
    from_k.store(static_cast<In*>(p.cache.k) + to, aligned);
    from_v.store(static_cast<In*>(p.cache.v) + to, aligned);
  } else {
    float from_k[kLaneElements], from_v[kLaneElements];
    load_floats(k, aligned, from_k);
    load_floats(v, aligned, from_v);
    store_scaled(from_k, storage_scale(p.cache, p.k_scale, p.scale_stride, head), p.cache.k,
                 p.cache.dtype, to, aligned);
    store_scaled(from_v, storage_scale(p.cache, p.v_scale, p.scale_stride, head), p.cache.v,
                 p.cache.dtype, to, aligned);
  }
}

template <class In>
void launch_append(const AppendKvParams& p) {
  const bool aligned = aligned_for_lanes(p.k, p.dtype, p.k_row_stride) &&
                       aligned_for_lanes(p.v, p.dtype, p.v_row_stride) && aligned_pages(p.cache);
  const int items = p.cache.num_kv_heads * p.cache.head_dim / kLaneElements;
  const int threads = items < kAppendThreads ? (items + 31) / 32 * 32 : kAppendThreads;
  const dim3 grid(static_cast<unsigned>(p.step.num_rows),
                  static_cast<unsigned>((items + threads - 1) / threads));
  auto* kernel = p.cache.dtype == p.dtype ? append_kernel<In, true> : append_kernel<In, false>;
  gpu::launch(kernel, grid, dim3(static_cast<unsigned>(threads)), 0, p.exec.stream,
              gpu::LaunchOptions{.dependent = true}, p, aligned);
}

}  // namespace

void append_kv(const AppendKvParams& p) {
  if (p.step.num_rows == 0 || p.step.num_requests == 0) return;
  switch (p.dtype) {
    case DType::kBF16:
      return launch_append<__nv_bfloat16>(p);
    case DType::kF16:
      return launch_append<__half>(p);
    default:
      return launch_append<float>(p);
  }
}

}  // namespace specdec::cuda
