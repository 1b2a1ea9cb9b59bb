// Pools in the host's memory whose pages go by one number, with their copies in the host's pool: K
// and V of a model, those of a draft model. Where the host runs the steps it makes their
// PageCopies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kv/host_pages.h"

namespace specdec {

struct PagePool {
  std::byte* pages = nullptr;   // [layers, num_pages, bytes]
  std::byte* copies = nullptr;  // [pages of the host's pool, layers, bytes]
  std::int64_t layers = 0, num_pages = 0, bytes = 0;
};

class PagePools {
 public:
  PagePools() = default;
  explicit PagePools(std::vector<PagePool> pools) : pools_(std::move(pools)) {}

  bool empty() const { return pools_.empty(); }

  // A pool may have fewer pages than the numbers that there are; what it lacks is not copied.
  void copy(const PageOrder& order) const {
    for (const PagePool& pool : pools_) {
      if (order.page >= pool.num_pages) continue;
      for (std::int64_t layer = 0; layer < pool.layers; ++layer) {
        std::byte* page = pool.pages + (layer * pool.num_pages + order.page) * pool.bytes;
        std::byte* copy = pool.copies + (order.host_page * pool.layers + layer) * pool.bytes;
        std::memcpy(order.to_host ? copy : page, order.to_host ? page : copy,
                    static_cast<std::size_t>(pool.bytes));
      }
    }
  }

 private:
  std::vector<PagePool> pools_;
};

}  // namespace specdec
