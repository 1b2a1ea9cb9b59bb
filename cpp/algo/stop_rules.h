// When a request ends: applied to every delivered token, in order. One text for the host's
// executor and for slots in a device's memory.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace specdec {

enum class FinishReason : std::uint8_t { kNone, kStop, kLength, kError };

// An end token of the model ends silently (kNoStopToken), a stop id of the request is reported.
inline constexpr TokenId kNoStopToken = -1;

struct StopRules {
  const TokenId* eos = nullptr;
  std::int32_t num_eos = 0;  // 0 also where end tokens are to be ignored
  const TokenId* stop_ids = nullptr;
  std::int32_t num_stop_ids = 0;
  std::int32_t max_len = 0;  // tokens of prompt and output
};

SPECDEC_HD inline bool contains_id(const TokenId* ids, std::int32_t count, TokenId id) {
  for (std::int32_t i = 0; i < count; ++i) {
    if (ids[i] == id) return true;
  }
  return false;
}

// `len` counts the token. *stop_token becomes the stop id that ended the request, else
// kNoStopToken.
SPECDEC_HD inline FinishReason finish_after(const StopRules& rules, TokenId token, std::int32_t len,
                                            TokenId* stop_token) {
  *stop_token = kNoStopToken;
  if (contains_id(rules.eos, rules.num_eos, token)) return FinishReason::kStop;
  if (contains_id(rules.stop_ids, rules.num_stop_ids, token)) {
    *stop_token = token;
    return FinishReason::kStop;
  }
  return len >= rules.max_len ? FinishReason::kLength : FinishReason::kNone;
}

}  // namespace specdec
