#include "backend/step_check.h"

#include "base/check.h"
#include "base/pages.h"

namespace specdec {

void check_layer(int layer, const KvCacheView& cache) {
  SPECDEC_REQUIRE(layer >= 0 && layer < cache.num_layers, "layer = ", layer, ": layers are 0..",
                  cache.num_layers - 1);
}

void check_pages(const StepView& step, const KvCacheView& cache, const char* owner) {
  SPECDEC_REQUIRE(step.cu_rows[0] == 0, owner, "cu_rows[0] = ", step.cu_rows[0],
                  ": it starts at 0");
  for (std::int32_t b = 0; b < step.num_requests; ++b) {
    const std::int32_t first = step.cu_rows[b], end = step.cu_rows[b + 1];
    SPECDEC_REQUIRE(end >= first, owner, "cu_rows[", b + 1, "] = ", end, ": it must not be below ",
                    owner, "cu_rows[", b, "] = ", first);
    SPECDEC_REQUIRE(step.kv_len[b] >= 0, owner, "kv_len[", b, "] = ", step.kv_len[b],
                    ": lengths are not negative");
    const std::int32_t rows = end - first;
    if (rows == 0) continue;  // nothing of it is read or written
    const std::int64_t tokens = std::int64_t{step.kv_len[b]} + rows;
    const std::int64_t used = pages_for(tokens, cache.page_size);
    SPECDEC_REQUIRE(used <= step.page_table_stride && tokens <= INT32_MAX, owner, "page_table has ",
                    step.page_table_stride, " pages for request ", b, ": kv_len + rows = ", tokens,
                    " tokens need ", used, " pages of ", cache.page_size);
    const std::int32_t* pages = step.page_table + std::int64_t{b} * step.page_table_stride;
    for (std::int64_t i = 0; i < used; ++i) {
      SPECDEC_REQUIRE(pages[i] >= 0 && pages[i] < cache.num_pages, owner, "page_table[", b, ", ", i,
                      "] = ", pages[i], ": page ids are 0..", cache.num_pages - 1);
    }
    SPECDEC_REQUIRE(step.is_tree == nullptr || step.is_tree[b] == 0 || rows <= kMaxStepTokens,
                    owner, "is_tree[", b, "] = ", int{step.is_tree[b]}, ": a tree has at most ",
                    kMaxStepTokens, " rows, request ", b, " has ", rows,
                    " (longer ones are causal)");
  }
}

}  // namespace specdec
