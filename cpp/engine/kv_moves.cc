#include "engine/kv_moves.h"

#include <algorithm>

#include "base/types.h"

namespace specdec {

void KvMoves::add(std::int32_t kv_length, std::int32_t rows, const std::int32_t* pages,
                  std::int32_t num_pages, const std::int32_t* way, std::int32_t way_len) {
  if (empty()) {
    cu_rows.assign(1, 0);
    cu_pages_.assign(1, 0);
  }
  kv_len.push_back(kv_length);
  cu_rows.push_back(cu_rows.back() + rows);
  pages_.insert(pages_.end(), pages, pages + num_pages);
  cu_pages_.push_back(static_cast<std::int32_t>(pages_.size()));
  max_pages_ = std::max(max_pages_, num_pages);
  path.resize(path.size() + kMaxStepTokens, 0);
  std::copy(way, way + way_len, path.end() - kMaxStepTokens);
  path_len.push_back(way_len);
}

void KvMoves::clear() {
  kv_len.clear();
  cu_rows.clear();
  path.clear();
  path_len.clear();
  pages_.clear();
  cu_pages_.clear();
  max_pages_ = 0;
}

std::vector<std::int32_t> KvMoves::page_table() const {
  std::vector<std::int32_t> table(static_cast<std::size_t>(num_requests()) * max_pages_, 0);
  for (std::int32_t b = 0; b < num_requests(); ++b) {
    std::copy(pages_.begin() + cu_pages_[b], pages_.begin() + cu_pages_[b + 1],
              table.begin() + static_cast<std::size_t>(b) * max_pages_);
  }
  return table;
}

}  // namespace specdec
