#include "bind/plan_check.h"

#include "base/check.h"

namespace specdec {

void check_layer(int layer, const KvCacheView& cache) {
  SPECDEC_REQUIRE(layer >= 0 && layer < cache.num_layers, "layer = ", layer, ": layers are 0..",
                  cache.num_layers - 1);
}

void check_plan(const StepPlan& plan, const KvCacheView& cache) {
  for (int b = 0; b < plan.num_requests; ++b) {
    const int tokens = plan.kv_len[b] + plan.cu_rows[b + 1] - plan.cu_rows[b];
    const int used = (tokens + cache.page_size - 1) / cache.page_size;
    SPECDEC_REQUIRE(used <= plan.page_table_stride, "plan.page_table has ", plan.page_table_stride,
                    " pages for request ", b, ": ", tokens, " tokens need ", used, " pages of ",
                    cache.page_size);
    for (int i = 0; i < used; ++i) {
      const std::int32_t id =
          plan.page_table[static_cast<std::size_t>(b) * plan.page_table_stride + i];
      SPECDEC_REQUIRE(id >= 0 && id < cache.num_pages, "plan.page_table[", b, ", ", i, "] = ", id,
                      ": page ids are 0..", cache.num_pages - 1);
    }
  }
}

}  // namespace specdec
