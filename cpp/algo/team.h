// A team runs one request's algorithm: one host thread (SerialTeam) or the 32 lanes of a warp
// (cuda/common/warp_team.cuh). The text of an algorithm is the same for both; its integer results
// do not depend on the team's size, because ranks only ever divide work whose parts are
// independent.
//
// Contract of a team: every rank calls sync(), any() and scan() the same number of times in the
// same order. Memory written before sync() by one rank is seen after it by all.
#pragma once

#include <concepts>
#include <cstdint>

#include "base/types.h"

namespace specdec {

// What algorithms need that only divide work: a block of a device has no more than that.
template <typename T>
concept Ranks = requires(const T& team) {
  { team.rank() } -> std::convertible_to<std::int32_t>;
  { team.size() } -> std::convertible_to<std::int32_t>;
  team.sync();
};

template <typename T>
concept Team =
    Ranks<T> && requires(const T& team, bool flag, std::int32_t value, std::int32_t* total) {
      { team.any(flag) } -> std::convertible_to<bool>;
      // Exclusive prefix sum over ranks; *total receives the sum over all ranks.
      { team.scan(value, total) } -> std::convertible_to<std::int32_t>;
    };

struct SerialTeam {
  SPECDEC_HD constexpr std::int32_t rank() const { return 0; }
  SPECDEC_HD constexpr std::int32_t size() const { return 1; }
  SPECDEC_HD constexpr void sync() const {}
  SPECDEC_HD constexpr bool any(bool flag) const { return flag; }
  SPECDEC_HD constexpr std::int32_t scan(std::int32_t value, std::int32_t* total) const {
    *total = value;
    return 0;
  }
};

}  // namespace specdec
