// Pages of K/V: their sizes, and how many a text takes.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace specdec {

inline constexpr int kMaxPageSize = 128;  // tokens

constexpr bool is_page_size(std::int64_t tokens) {
  return tokens >= 1 && tokens <= kMaxPageSize && (tokens & (tokens - 1)) == 0;
}

constexpr std::int64_t pages_for(std::int64_t tokens, std::int64_t page_size) {
  return tokens / page_size + (tokens % page_size != 0);  // no sum that could overflow
}

// Places of a request's page table: the longest text, and one step whose rows are all drafts.
constexpr int pages_per_request(int max_seq_len, int page_size) {
  return static_cast<int>(pages_for(std::int64_t{max_seq_len} + kMaxStepTokens, page_size));
}

}  // namespace specdec
