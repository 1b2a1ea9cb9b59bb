// The best of a row of scores.
#pragma once

#include <cstdint>
#include <vector>

namespace specdec {

struct ScoredIndex {
  float score;
  std::int32_t index;
};

inline bool likelier(const ScoredIndex& a, const ScoredIndex& b) {
  return a.score > b.score || (a.score == b.score && a.index < b.index);
}

inline constexpr std::int32_t kMaxTopScores = 64;

// The best `keep` <= kMaxTopScores of n scores (smaller index first on ties), by index; -infinity
// is not among them. 0 of a row with NaN or +infinity. `scratch` is kept by the caller to allocate
// once.
std::int32_t top_scores(const float* scores, std::int32_t n, std::int32_t keep,
                        std::vector<std::int32_t>* scratch, ScoredIndex* out);

}  // namespace specdec
