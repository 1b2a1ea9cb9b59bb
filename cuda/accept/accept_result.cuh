// What accept_step and synthetic_step share: the check of rates, and what they write.
#pragma once

#include <cstdint>

#include "algo/accept.h"
#include "algo/synthetic_acceptance.h"
#include "base/types.h"
#include "gpu/gpu.cuh"

namespace specdec::cuda {

// False if one of the rates that this rank looks at is none; all ranks together look at all.
template <class TeamT>
__device__ __forceinline__ bool are_rates(const TeamT& team, const SyntheticRates& rates) {
  if (rates.count > kMaxDraftLen) return false;
  bool good = true;
  for (std::int32_t i = team.rank(); i < rates.count; i += team.size()) good &= rates.valid(i);
  return good;
}

// By all ranks. result null: the request accepts and emits nothing.
template <class TeamT, class Params>
__device__ __forceinline__ void write_result(const TeamT& team, const Params& p, int b,
                                             const AcceptResult* result) {
  const std::int32_t path_len = result == nullptr ? 0 : result->path_len;
  const std::int32_t emitted = result == nullptr ? 0 : result->num_emitted;
  const std::int64_t at = std::int64_t{b} * kMaxStepTokens;
  for (std::int32_t i = team.rank(); i < path_len; i += team.size()) {
    p.path[at + i] = result->path[i];
  }
  for (std::int32_t i = team.rank(); i < emitted; i += team.size()) {
    p.emitted[at + i] = result->emitted[i];
  }
  if (team.rank() != 0) return;
  p.path_len[b] = path_len;
  p.num_emitted[b] = emitted;
}

}  // namespace specdec::cuda
