#include "algo/top_scores.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

namespace specdec {
namespace {

constexpr std::int32_t kScanBlock = 32;
// Scores collected above the threshold before it is raised again.
constexpr std::int32_t kCollected = 4 * kMaxTopScores;
constexpr float kNoScore = -std::numeric_limits<float>::infinity();
// Lanes that do not depend on each other become vector code.
constexpr std::int32_t kLanes = 8;

bool has_nan(const float* scores, std::int32_t n) {
  std::uint32_t lane[kLanes] = {};
  std::int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int32_t j = 0; j < kLanes; ++j) lane[j] |= scores[i + j] != scores[i + j];
  }
  for (; i < n; ++i) lane[0] |= scores[i] != scores[i];
  std::uint32_t any = 0;
  for (const std::uint32_t bit : lane) any |= bit;
  return any != 0;
}

constexpr std::int32_t kVecLanes = 4;
typedef float ScoreVec __attribute__((vector_size(kVecLanes * sizeof(float))));

ScoreVec load(const float* scores) {
  ScoreVec v;
  std::memcpy(&v, scores, sizeof(v));
  return v;
}

// The largest score of each block, in `maxima`; false for a row with NaN or +infinity.
bool block_maxima(const float* scores, std::int32_t n, float* maxima) {
  if (has_nan(scores, n)) return false;
  bool is_finite = true;
  for (std::int32_t begin = 0, b = 0; begin < n; begin += kScanBlock, ++b) {
    const float* block = scores + begin;
    float best = kNoScore;
    if (begin + kScanBlock <= n) {
      ScoreVec even = load(block), odd = load(block + kVecLanes);
      for (std::int32_t i = 2 * kVecLanes; i < kScanBlock; i += 2 * kVecLanes) {
        const ScoreVec x = load(block + i), y = load(block + i + kVecLanes);
        even = x > even ? x : even;
        odd = y > odd ? y : odd;
      }
      even = odd > even ? odd : even;
      for (std::int32_t j = 0; j < kVecLanes; ++j) best = even[j] > best ? even[j] : best;
    } else {
      for (std::int32_t i = 0; i < n - begin; ++i) best = block[i] > best ? block[i] : best;
    }
    maxima[b] = best;
    is_finite = is_finite && best != -kNoScore;
  }
  return is_finite;
}

}  // namespace

std::int32_t top_scores(const float* scores, std::int32_t n, std::int32_t keep,
                        std::vector<float>* scratch, ScoredIndex* out) {
  const std::int32_t blocks = (n + kScanBlock - 1) / kScanBlock;
  scratch->resize(static_cast<std::size_t>(blocks) * 2);
  float* const maxima = scratch->data();
  if (!block_maxima(scores, n, maxima)) return 0;
  // `keep` blocks reach the threshold, so `keep` scores do: what is below is not among them.
  float threshold = kNoScore;
  if (blocks > keep) {
    float* const ordered = maxima + blocks;
    std::copy_n(maxima, blocks, ordered);
    std::nth_element(ordered, ordered + keep - 1, ordered + blocks, std::greater<>());
    threshold = ordered[keep - 1];
  }
  ScoredIndex collected[kCollected + kScanBlock + 1];
  std::int32_t count = 0;
  bool is_full = false;  // `keep` scores at the threshold or above: later ones lose ties
  const auto keep_best = [&] {
    ScoredIndex ordered[kCollected + kScanBlock];
    std::copy_n(collected, count, ordered);
    std::nth_element(ordered, ordered + keep - 1, ordered + count, likelier);
    const ScoredIndex last = ordered[keep - 1];
    count = static_cast<std::int32_t>(
        std::remove_if(collected, collected + count,
                       [&](const ScoredIndex& x) { return likelier(last, x); }) -
        collected);
    threshold = last.score;
    is_full = true;
  };
  for (std::int32_t b = 0; b < blocks; ++b) {
    if (maxima[b] < threshold || (is_full && maxima[b] == threshold)) continue;
    const std::int32_t end = std::min(n, (b + 1) * kScanBlock);
    for (std::int32_t i = b * kScanBlock; i < end; ++i) {
      const float x = scores[i];
      const bool wanted = x > threshold || (x == threshold && !is_full && x > kNoScore);
      collected[count] = {x, i};  // without a jump: which scores are wanted is hard to foresee
      count += wanted ? 1 : 0;
    }
    if (count > kCollected) keep_best();
  }
  if (count > keep) keep_best();
  std::copy_n(collected, count, out);
  return count;
}

}  // namespace specdec
