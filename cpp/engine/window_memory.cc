#include "engine/window_memory.h"

#include <algorithm>
#include <cstddef>

#include "base/check.h"
#include "base/zeroed_memory.h"
#include "engine/config.h"

namespace specdec {

WindowMemory::WindowMemory(const KvCacheView& cache, const std::vector<int>& windows)
    : cache_(cache) {
  SPECDEC_REQUIRE(static_cast<std::int64_t>(windows.size()) == cache.num_layers,
                  "narrow_windows has ", windows.size(),
                  " entries, needs one per layer: ", cache.num_layers);
  for (const int window : narrow_groups(windows)) {
    layers_.emplace_back();
    for (int layer = 0; layer < cache.num_layers; ++layer) {
      if (windows[static_cast<std::size_t>(layer)] == window) layers_.back().push_back(layer);
    }
  }
  bytes_ = cache.stride_page * static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  const auto unit = static_cast<std::int64_t>(ZeroedMemory::unit());
  const auto is_bound = [unit](const void* at) {
    return reinterpret_cast<std::uintptr_t>(at) % static_cast<std::uintptr_t>(unit) == 0;
  };
  SPECDEC_REQUIRE(bytes_ % unit == 0 && is_bound(cache.k) && is_bound(cache.v),
                  "narrow_windows: a layer's part of a page has ", bytes_,
                  " bytes, which are no whole pages of ", unit,
                  " bytes of the operating system; give none");
}

void WindowMemory::leave(int group, std::int32_t page) const {
  const auto size = static_cast<std::int64_t>(dtype_bytes(cache_.dtype));
  for (const int layer : layers_[static_cast<std::size_t>(group)]) {
    const std::int64_t at = (layer * cache_.stride_layer + page * cache_.stride_page) * size;
    for (void* memory : {cache_.k, cache_.v}) {
      ZeroedMemory::release(static_cast<std::byte*>(memory) + at, static_cast<std::size_t>(bytes_));
    }
  }
}

}  // namespace specdec
