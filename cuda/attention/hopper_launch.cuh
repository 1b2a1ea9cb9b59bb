// Host side of the Hopper family: describes the pool to the copy engine and launches the kernel.
#pragma once

#include <cstdint>

#include "attention/hopper.cuh"

namespace specdec::attention {

// K or V of one layer as [pages, KV heads, page size, head dim], whatever their strides; a box is
// `columns` numbers of up to 64 keys of a page.
inline gpu::TensorMap hopper_tensor_map(const KvCacheView& cache, const void* layer,
                                        std::uint32_t columns, gpu::Swizzle swizzle) {
  const int bytes = static_cast<int>(dtype_bytes(cache.dtype));
  const auto extent = [](std::int32_t n) { return static_cast<std::uint64_t>(n); };
  const auto stride = [&](std::int64_t n) { return static_cast<std::uint64_t>(n) * bytes; };
  const std::uint64_t dims[] = {extent(cache.head_dim), extent(cache.page_size),
                                extent(cache.num_kv_heads), extent(cache.num_pages)};
  const std::uint64_t strides[] = {stride(cache.stride_token), stride(cache.stride_head),
                                   stride(cache.stride_page)};
  const std::uint32_t keys =
      static_cast<std::uint32_t>(cache.page_size < kBlockKeys ? cache.page_size : kBlockKeys);
  const std::uint32_t box[] = {columns, keys, 1, 1};
  return gpu::encode_tensor_map(bytes, layer, 4, dims, strides, box, swizzle);
}

template <class T, class Tile>
void launch_hopper(const AttentionLaunch& launch) {
  using Shared = HopperShared<Tile>;
  // Raw tiles are read by ordinary loads, row by row; the others by the matrix instructions.
  const auto map = [&](const void* layer, bool raw) {
    return hopper_tensor_map(launch.call.cache, layer, Tile::kLoadColumns,
                             raw ? gpu::Swizzle::none : gpu::Swizzle::b128);
  };
  gpu::launch(hopper::hopper_main<T, Tile>, dim3(launch.work.num_blocks), dim3(Tile::kThreads),
              hopper_shared_bytes<Tile>(), launch.call.exec.stream, {.dependent = true}, launch,
              map(launch.k, Shared::kRawKeys), map(launch.v, Shared::kRawValues));
}

}  // namespace specdec::attention
