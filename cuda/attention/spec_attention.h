// Speculative attention on the GPU: what its kernels receive and the functions that launch them.
//
//   launch_plan    once per step and kind of layer: lengths -> jobs, units (attention/work.h)
//   main           a MainLauncher of the picked instance: main keys -> states
//   launch_finish  states + tail keys + sinks -> out
//
// The arithmetic is fixed by backend/attention/arithmetic.h; a call's three kernels only have to
// agree on the AttentionLaunch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/attention/arithmetic.h"
#include "backend/attention/instance.h"
#include "backend/attention/work.h"
#include "backend/ops.h"

namespace specdec::attention {

// The arrays of a WorkLayout as pointers.
struct WorkView {
  WorkHeader* header = nullptr;
  Job* jobs = nullptr;
  Unit* units = nullptr;
  std::int32_t* job_begin = nullptr;
  std::int32_t* block_begin = nullptr;
  std::uint32_t* request_flags = nullptr;
  float* state_ml = nullptr;
  float* state_o = nullptr;
  std::int32_t max_jobs = 0, max_units = 0, max_slots = 0;
  std::int32_t num_blocks = 0;
};

// What plan, main and finish kernels receive by value.
struct AttentionLaunch {
  SpecAttentionParams call;
  WorkView work;
  const void* k = nullptr;  // first element of the layer's K and V
  const void* v = nullptr;
  std::int32_t group = 0;       // query heads per KV head, H / G
  std::int32_t page_shift = 0;  // log2(page size)
  std::int32_t row_tile = 0;
  std::int32_t granule = 0;
  bool plan_is_old = false;  // its kernel is not the one before the main pass
};

// `call.exec.workspace` holds what `layout` describes.
inline AttentionLaunch make_launch(const SpecAttentionParams& call, const WorkLayout& layout,
                                   const AttentionInstance& instance) {
  AttentionLaunch launch;
  launch.call = call;
  char* base = static_cast<char*>(call.exec.workspace);
  WorkView& work = launch.work;
  work.header = reinterpret_cast<WorkHeader*>(base + layout.header);
  work.jobs = reinterpret_cast<Job*>(base + layout.jobs);
  work.units = reinterpret_cast<Unit*>(base + layout.units);
  work.job_begin = reinterpret_cast<std::int32_t*>(base + layout.job_begin);
  work.block_begin = reinterpret_cast<std::int32_t*>(base + layout.block_begin);
  work.request_flags = reinterpret_cast<std::uint32_t*>(base + layout.request_flags);
  work.state_ml = reinterpret_cast<float*>(base + layout.state_ml);
  work.state_o = reinterpret_cast<float*>(base + layout.state_o);
  work.max_jobs = layout.max_jobs;
  work.max_units = layout.max_units;
  work.max_slots = layout.max_slots;
  work.num_blocks = layout.num_blocks;
  const KvCacheView& cache = call.cache;
  const std::int64_t layer_bytes =
      call.layer * cache.stride_layer * static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  launch.k = static_cast<const char*>(cache.k) + layer_bytes;
  launch.v = static_cast<const char*>(cache.v) + layer_bytes;
  launch.group = call.num_heads / cache.num_kv_heads;
  while ((1 << launch.page_shift) < cache.page_size) ++launch.page_shift;
  launch.row_tile = instance.row_tile;
  launch.granule = instance.granule;
  return launch;
}

// All of them enqueue on call.exec.stream and return.
using MainLauncher = void (*)(const AttentionLaunch&);

void launch_plan(const AttentionLaunch& launch);
void launch_finish(const AttentionLaunch& launch);

// The launching function of row `index` of kInstances (backend/attention/instances.h).
MainLauncher main_launcher(std::size_t index);

}  // namespace specdec::attention
