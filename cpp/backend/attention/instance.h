// One row of the table of attention kernels: what the kernel was compiled for and what a block of
// it takes. The rows stand in instances.h, which scripts/gen_instances.py writes together with the
// kernels' explicit instantiations; choosing a row is pick()'s affair (pick.h).
#pragma once

#include <cstdint>

#include "base/types.h"

namespace specdec::attention {

enum class Family : std::uint8_t {
  kGeneric,  // no matrix instructions; every shape (cuda/attention/generic)
  kAmpere,   // mma.sync + cp.async; compute capability 8.0 and later
  kHopper    // wgmma + bulk tensor copies; compute capability 9.0 only
};

struct AttentionInstance {
  const char* name;  // also of the launching function, e.g. "ampere_bf16_bf16_k128_r64"
  Family family;
  DType dtype;       // of q and out
  DType kv_dtype;    // of K and V in the pages
  DType math_dtype;  // operands of the matrix instructions
  std::int32_t head_dim;
  std::int32_t row_tile;  // (token, head of the group) rows of one job
  std::int32_t threads;
  std::int32_t smem_bytes;     // dynamic shared memory of a block
  std::int32_t blocks_per_sm;  // that registers allow; shared memory may allow fewer
  std::int32_t granule;        // of tail_begin()
};

}  // namespace specdec::attention
