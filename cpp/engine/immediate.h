// The memory of steps that the host runs: slots, rings and the arrays of the step at hand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "algo/slot.h"
#include "backend/backend.h"
#include "backend/slot_ops.h"
#include "engine/request_record.h"
#include "engine/step_plan.h"

namespace specdec {

struct HostSteps {
  enum class Stage : std::uint8_t { kIdle, kPlanned, kDrafted, kBuilt };

  HostSteps(const KvCacheView& kv_cache, const Backend& kv_backend, const SlotLayout& layout,
            int max_requests, int max_rows, int pages_per_request, int ring_size,
            std::int64_t staging_words)
      : cache(kv_cache),
        backend(kv_backend),
        memory(make_host_slots(max_requests, layout.bytes)),
        slots{memory.get(), layout.bytes, max_requests},
        plan(max_requests, max_rows, pages_per_request),
        staging(static_cast<std::size_t>(ring_size * staging_words)),
        results(static_cast<std::size_t>(ring_size) * max_requests),
        sampled(max_rows),
        path(static_cast<std::size_t>(max_requests) * kMaxStepTokens),
        path_len(max_requests) {}

  std::int64_t memory_bytes() const {
    return static_cast<std::int64_t>(plan.memory_bytes() + staging.size() * sizeof(staging[0]) +
                                     results.size() * sizeof(results[0]) +
                                     path.size() * sizeof(path[0]));
  }

  KvCacheView cache;
  const Backend& backend;
  HostSlots memory;
  SlotPoolView slots;
  StepPlan plan;
  Stage stage = Stage::kIdle;          // of the step that was planned last
  std::vector<std::int32_t> staging;   // [ring, words]
  std::vector<SlotResult> results;     // [ring, B]
  std::vector<TokenId> sampled;        // [max_rows]
  std::vector<std::int32_t> path;      // [B, kMaxStepTokens]
  std::vector<std::int32_t> path_len;  // [B]
};

}  // namespace specdec
