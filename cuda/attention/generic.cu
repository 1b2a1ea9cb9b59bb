#include "attention/generic.cuh"

namespace specdec::cuda {
namespace {

template <class T>
void launch_generic(const GenericCall& call) {
  const SpecAttentionParams& p = call.p;
  const std::int64_t blocks =
      std::int64_t{p.step.num_rows} * p.cache.num_kv_heads * call.head_blocks;
  auto* kernel = p.cache.head_dim <= 128 ? generic_kernel<T, 4> : generic_kernel<T, 8>;
  gpu::launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kGenericThreads),
              GenericShared::bytes(p.cache.head_dim), p.exec.stream,
              gpu::LaunchOptions{.dependent = true}, call);
}

}  // namespace

void generic_attention(const SpecAttentionParams& p) {
  if (p.step.num_rows == 0) return;
  GenericCall call;
  call.p = p;
  call.group = p.num_heads / p.cache.num_kv_heads;
  call.head_blocks = (call.group + kGenericHeads - 1) / kGenericHeads;
  call.aligned_q = aligned_for_lanes(p.q, p.dtype, p.q_row_stride);
  call.aligned_kv = aligned_pages(p.cache);
  switch (p.cache.dtype) {
    case DType::kBF16:
      return launch_generic<__nv_bfloat16>(call);
    case DType::kF16:
      return launch_generic<__half>(call);
    case DType::kF8E4M3:
      return launch_generic<E4M3>(call);
    default:
      return launch_generic<float>(call);
  }
}

}  // namespace specdec::cuda
