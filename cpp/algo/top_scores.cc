#include "algo/top_scores.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace specdec {
namespace {

constexpr std::int32_t kScanBlock = 32;
// Scores collected above the threshold before it is raised again.
constexpr std::int32_t kCollected = 200;
static_assert(kCollected >= 2 * kMaxTopScores);
// A threshold that so many more than asked for reach is good enough to collect by.
constexpr std::int32_t kSlack = 8;
constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// Four lanes: what every machine of 64 bits has.
constexpr std::int32_t kLanes = 4;
typedef float FloatVec __attribute__((vector_size(kLanes * sizeof(float))));
typedef std::int32_t IntVec __attribute__((vector_size(kLanes * sizeof(float))));

template <typename Vec, typename T>
Vec load(const T* from) {
  Vec v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

// Integers in the order of the scores, which may not be NaN; equal scores have equal keys.
std::int32_t key_of(float score) {
  const auto bits = std::bit_cast<std::int32_t>(score + 0.0f);  // -0 becomes 0
  return bits ^ ((bits >> 31) & std::numeric_limits<std::int32_t>::max());
}

float score_of(std::int32_t key) {
  return std::bit_cast<float>(key ^ ((key >> 31) & std::numeric_limits<std::int32_t>::max()));
}

// The key of each block's largest score, in `keys`; false for a row with NaN or +infinity.
bool block_maxima(const float* scores, std::int32_t n, std::int32_t* keys) {
  IntVec unordered = {};
  float highest = kNoScore;
  std::int32_t begin = 0, b = 0;
  for (; begin + kScanBlock <= n; begin += kScanBlock, ++b) {
    const float* const block = scores + begin;
    FloatVec even = load<FloatVec>(block), odd = load<FloatVec>(block + kLanes);
    unordered |= (even != even) | (odd != odd);
    for (std::int32_t i = 2 * kLanes; i < kScanBlock; i += 2 * kLanes) {
      const FloatVec x = load<FloatVec>(block + i), y = load<FloatVec>(block + i + kLanes);
      unordered |= (x != x) | (y != y);
      even = x > even ? x : even;
      odd = y > odd ? y : odd;
    }
    even = odd > even ? odd : even;
    const float left = even[0] > even[1] ? even[0] : even[1];
    const float right = even[2] > even[3] ? even[2] : even[3];
    const float best = left > right ? left : right;
    keys[b] = key_of(best);
    highest = best > highest ? best : highest;
  }
  bool has_nan = (unordered[0] | unordered[1] | unordered[2] | unordered[3]) != 0;
  if (begin < n) {
    float best = kNoScore;
    for (std::int32_t i = begin; i < n; ++i) {
      has_nan |= scores[i] != scores[i];
      best = scores[i] > best ? scores[i] : best;
    }
    keys[b] = key_of(best);
    highest = best > highest ? best : highest;
  }
  return !has_nan && highest != -kNoScore;
}

// How many of n keys are `least` or more.
std::int32_t count_from(const std::int32_t* keys, std::int32_t n, std::int32_t least) {
  IntVec counts = {};
  const IntVec bound = {least, least, least, least};
  std::int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) counts -= load<IntVec>(keys + i) >= bound;
  std::int32_t count = counts[0] + counts[1] + counts[2] + counts[3];
  for (; i < n; ++i) count += keys[i] >= least ? 1 : 0;
  return count;
}

// A key that `keep` <= n of n keys reach, and at most `slack` more where the keys allow it: halving
// the interval instead of sorting, because jumps that depend on the data cost more than counting.
std::int32_t threshold_key(const std::int32_t* keys, std::int32_t n, std::int32_t keep,
                           std::int32_t slack) {
  const auto [least, greatest] = std::minmax_element(keys, keys + n);
  // `low` is reached by enough, nobody is above `high`.
  std::int64_t low = *least, high = *greatest;
  while (low < high) {
    const std::int64_t middle = low + (high - low + 1) / 2;
    const std::int32_t count = count_from(keys, n, static_cast<std::int32_t>(middle));
    if (count < keep) {
      high = middle - 1;
    } else {
      low = middle;
      if (count <= keep + slack) break;
    }
  }
  return static_cast<std::int32_t>(low);
}

// Bit i: score i of a whole block is `least` or more.
std::uint32_t reached(const float* block, float least) {
  const FloatVec bound = {least, least, least, least};
  const IntVec bits = {1, 1 << 1, 1 << 2, 1 << 3};
  IntVec found = {};
  for (std::int32_t i = 0; i < kScanBlock; i += kLanes) {
    found |= (load<FloatVec>(block + i) >= bound) & (bits << i);
  }
  return static_cast<std::uint32_t>(found[0] | found[1] | found[2] | found[3]);
}

// Scores in the order of their indices.
class Collected {
 public:
  explicit Collected(std::int32_t keep) : keep_(keep) {}

  std::int32_t count() const { return count_; }

  void add(float score, std::int32_t index) {
    scores_[count_] = {score, index};
    keys_[count_++] = key_of(score);
  }

  // Leaves the best `keep` of more; returns the key of the last of them.
  std::int32_t keep_best() {
    std::int32_t least = threshold_key(keys_, count_, keep_, 0);
    std::int32_t ties = keep_ - count_from(keys_, count_, least + 1);
    std::int32_t kept = 0;
    for (std::int32_t i = 0; i < count_; ++i) {
      const std::int32_t key = keys_[i];
      const bool is_tie = key == least && ties > 0;
      scores_[kept] = scores_[i];
      keys_[kept] = key;
      kept += key > least || is_tie ? 1 : 0;
      ties -= is_tie ? 1 : 0;
    }
    count_ = kept;
    return least;
  }

  void copy_to(ScoredIndex* out) const { std::copy_n(scores_, count_, out); }

 private:
  std::int32_t keep_, count_ = 0;
  ScoredIndex scores_[kCollected + kScanBlock];
  std::int32_t keys_[kCollected + kScanBlock];
};

}  // namespace

std::int32_t top_scores(const float* scores, std::int32_t n, std::int32_t keep,
                        std::vector<std::int32_t>* scratch, ScoredIndex* out) {
  const std::int32_t blocks = (n + kScanBlock - 1) / kScanBlock;
  scratch->resize(static_cast<std::size_t>(blocks));
  std::int32_t* const maxima = scratch->data();
  if (!block_maxima(scores, n, maxima)) return 0;
  // What `keep` blocks reach, `keep` scores do: what is below is not among them. -infinity never
  // is.
  std::int32_t least = key_of(std::numeric_limits<float>::lowest());
  if (blocks > keep) least = std::max(least, threshold_key(maxima, blocks, keep, kSlack));
  Collected best(keep);
  for (std::int32_t b = 0; b < blocks; ++b) {
    if (maxima[b] < least) continue;
    const std::int32_t begin = b * kScanBlock;
    const float threshold = score_of(least);
    if (begin + kScanBlock <= n) {
      std::uint32_t bits = reached(scores + begin, threshold);
      for (; bits != 0; bits &= bits - 1) {
        const std::int32_t i = begin + std::countr_zero(bits);
        best.add(scores[i], i);
      }
    } else {
      for (std::int32_t i = begin; i < n; ++i) {
        if (scores[i] >= threshold) best.add(scores[i], i);
      }
    }
    // Those that come later lose ties.
    if (best.count() > kCollected) least = best.keep_best() + 1;
  }
  if (best.count() > keep) best.keep_best();
  best.copy_to(out);
  return best.count();
}

}  // namespace specdec
