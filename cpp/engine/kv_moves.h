// Compaction that waits: where the pages lie on a device, whoever owns the device's stream moves
// the K/V of accepted rows, after the engine has decided and before the next forward pass.
#pragma once

#include <cstdint>
#include <vector>

namespace specdec {

// Moves of any number of requests as one call of the backends' compact_kv takes them. Each request
// brings its own lengths and pages, so nothing of the step's plan has to be kept.
class KvMoves {
 public:
  // K/V at kv_len + path[i] goes to kv_len + 1 + i, for i < path_len (1..kMaxStepTokens); the step
  // had `rows` rows of this request. `pages`: enough for kv_len + rows tokens; copied.
  void add(std::int32_t kv_len, std::int32_t rows, const std::int32_t* pages,
           std::int32_t num_pages, const std::int32_t* path, std::int32_t path_len);
  void clear();

  bool empty() const { return kv_len.empty(); }
  std::int32_t num_requests() const { return static_cast<std::int32_t>(kv_len.size()); }
  // [num_requests, widest] page ids, rows filled up with 0.
  std::vector<std::int32_t> page_table() const;
  std::int32_t max_pages() const { return max_pages_; }

  std::vector<std::int32_t> kv_len;    // [B]
  std::vector<std::int32_t> cu_rows;   // [B + 1]; empty without requests
  std::vector<std::int32_t> path;      // [B, kMaxStepTokens]
  std::vector<std::int32_t> path_len;  // [B]

 private:
  std::vector<std::int32_t> pages_, cu_pages_;  // [sum of pages], [B + 1]
  std::int32_t max_pages_ = 0;
};

}  // namespace specdec
