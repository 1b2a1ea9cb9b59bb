#include "algo/beam_search.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "algo/trie_merge.h"
#include "base/check.h"
#include "base/thread_pool.h"

namespace specdec {
namespace {

constexpr std::int32_t kScanBlock = 32;
// Scores collected above the threshold before it is raised again.
constexpr std::int32_t kCollected = 4 * BeamSearch::kKept;
constexpr float kNoScore = -std::numeric_limits<float>::infinity();
// Fewer scores than this are searched by the calling thread: waking the others takes as long.
constexpr std::int64_t kInlineScores = 1 << 15;

struct ScoredIndex {
  float score;
  std::int32_t index;
};

bool likelier(const ScoredIndex& a, const ScoredIndex& b) {
  return a.score > b.score || (a.score == b.score && a.index < b.index);
}

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

// The best `keep` of n scores, by index; 0 of a row with NaN or +infinity.
std::int32_t best_scores(const float* scores, std::int32_t n, std::int32_t keep,
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

}  // namespace

std::int32_t merge_beams(const TokenId* beams, std::int32_t num_beams, std::int32_t length,
                         TokenId* tokens, std::int32_t* parents, std::int32_t* node_of) {
  DraftTree tree;
  std::int32_t first_child[kMaxStepTokens], next_sibling[kMaxStepTokens], origin[kMaxStepTokens];
  TrieBuilder trie{&tree, first_child, next_sibling, origin};
  trie.reset(0);
  for (std::int32_t b = 0; b < num_beams; ++b) {
    std::int32_t node = 0;
    for (std::int32_t d = 0; d < length; ++d) {
      node = trie.descend(node, beams[b * length + d], 0);
      if (node_of != nullptr) node_of[b * length + d] = node - 1;
    }
  }
  for (std::int32_t i = 1; i < tree.size; ++i) {
    tokens[i - 1] = tree.tokens[i];
    parents[i - 1] = tree.parents[i] - 1;
  }
  return tree.size - 1;
}

void BeamSearch::start(const std::vector<BeamShape>& shapes) {
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const BeamShape& s = shapes[i];
    SPECDEC_REQUIRE(s.num_beams >= 1 && s.length >= 1 && s.num_beams <= kMaxDraftLen &&
                        s.length <= kMaxDraftLen && s.num_beams * s.length <= kMaxDraftLen,
                    "request ", i, ": ", s.num_beams, " beams of ", s.length,
                    " drafts: give at least one of each, at most ", kMaxDraftLen, " in all");
    SPECDEC_REQUIRE(s.temperature > 0.0 && std::isfinite(s.temperature), "request ", i,
                    ": temperature = ", s.temperature, ": a finite number above 0 is needed");
  }
  requests_.resize(shapes.size());
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    Request& request = requests_[i];
    request.shape = shapes[i];
    request.depth = 0;
    request.growing = true;
    request.nodes.assign(1, Node{-1, -1, 0.0});
    request.begins.assign({0, 1});
  }
  row_parents_.resize(shapes.size());
  std::iota(row_parents_.begin(), row_parents_.end(), 0);
  row_tokens_.assign(shapes.size(), -1);
  row_log_probs_.assign(shapes.size(), 0.0);
}

void BeamSearch::advance(const float* scores, std::int64_t stride, std::int32_t vocab_size,
                         const TokenId* token_ids) {
  const std::int32_t rows = num_rows();
  if (rows == 0) return;
  candidates_.resize(static_cast<std::size_t>(rows) * kKept);
  num_candidates_.resize(rows);
  row_laws_.clear();
  for (const Request& request : requests_) {
    if (!request.growing) continue;
    const std::int32_t beams = request.begins[request.depth + 1] - request.begins[request.depth];
    row_laws_.insert(row_laws_.end(), beams,
                     RowLaw{request.shape.num_beams, request.shape.temperature});
  }
  const auto score_rows = [&](std::int64_t first, std::int64_t last) {
    thread_local std::vector<float> scratch;
    for (std::int64_t row = first; row < last; ++row) {
      ScoredIndex best[kKept];
      const std::int32_t kept =
          best_scores(scores + row * stride, vocab_size, kKept, &scratch, best);
      if (kept == 0) {
        num_candidates_[row] = 0;
        continue;
      }
      // More than num_beams of a row's candidates never go on.
      const RowLaw& law = row_laws_[row];
      const std::int32_t wanted = std::min(kept, law.num_beams);
      double total = 0.0;
      const float highest =
          std::max_element(best, best + kept, [](const ScoredIndex& a, const ScoredIndex& b) {
            return a.score < b.score;
          })->score;
      for (std::int32_t i = 0; i < kept; ++i) {
        total += std::exp((static_cast<double>(best[i].score) - highest) / law.temperature);
      }
      std::partial_sort(best, best + wanted, best + kept, likelier);
      const double log_total = std::log(total);
      Candidate* out = candidates_.data() + row * kKept;
      for (std::int32_t i = 0; i < wanted; ++i) {
        const double below = static_cast<double>(best[i].score) - highest;
        out[i] = {best[i].index, below / law.temperature - log_total};
      }
      num_candidates_[row] = wanted;
    }
  };
  if (std::int64_t{rows} * vocab_size < kInlineScores) {
    score_rows(0, rows);
  } else {
    ThreadPool& pool = ThreadPool::global();
    pool.run([&](int rank) {
      const auto mine = pool.part(rows, rank);
      score_rows(mine.begin, mine.end);
    });
  }
  row_parents_.clear();
  row_tokens_.clear();
  row_log_probs_.clear();
  std::int32_t first_row = 0;
  for (Request& request : requests_) {
    if (!request.growing) continue;
    const std::int32_t count = request.begins[request.depth + 1] - request.begins[request.depth];
    grow(&request, first_row, count, token_ids);
    first_row += count;
  }
}

// The next depth of one request, whose beams are the rows from `first_row` on.
void BeamSearch::grow(Request* request, std::int32_t first_row, std::int32_t count,
                      const TokenId* token_ids) {
  std::int32_t next[kMaxStepTokens] = {};  // first candidate of each row not taken yet
  const std::int32_t old = request->begins[request->depth];
  const std::int32_t begin = request->begins.back();
  std::int32_t made = 0;
  for (; made < request->shape.num_beams; ++made) {
    std::int32_t best_beam = -1;
    double best = 0.0;
    // Each row's candidates come in falling order, so its best one left is its first one left.
    for (std::int32_t beam = 0; beam < count; ++beam) {
      const std::int32_t row = first_row + beam;
      if (next[beam] == num_candidates_[row]) continue;
      const double sum = request->nodes[old + beam].log_prob +
                         candidates_[static_cast<std::size_t>(row) * kKept + next[beam]].log_prob;
      if (best_beam < 0 || sum > best) {
        best = sum;
        best_beam = beam;
      }
    }
    if (best_beam < 0) break;
    const std::size_t row = static_cast<std::size_t>(first_row + best_beam);
    const std::int32_t index = candidates_[row * kKept + next[best_beam]++].index;
    const TokenId token = token_ids != nullptr ? token_ids[index] : index;
    request->nodes.push_back({best_beam, token, best});
  }
  if (made == 0) {
    request->growing = false;
    return;
  }
  ++request->depth;
  request->begins.push_back(begin + made);
  request->growing = request->depth < request->shape.length;
  if (!request->growing) return;
  for (std::int32_t i = begin; i < begin + made; ++i) {
    row_parents_.push_back(first_row + request->nodes[i].parent);
    row_tokens_.push_back(request->nodes[i].token);
    row_log_probs_.push_back(request->nodes[i].log_prob);
  }
}

std::int32_t BeamSearch::num_beams(std::int32_t r) const {
  const Request& request = requests_[r];
  if (request.depth == 0) return 0;
  return request.begins[request.depth + 1] - request.begins[request.depth];
}

void BeamSearch::beams(std::int32_t r, TokenId* out, double* log_probs) const {
  const Request& request = requests_[r];
  const std::int32_t count = num_beams(r), length = request.depth;
  for (std::int32_t b = 0; b < count; ++b) {
    std::int32_t beam = b;
    for (std::int32_t d = length; d >= 1; --d) {
      const Node& node = request.nodes[request.begins[d] + beam];
      out[b * length + d - 1] = node.token;
      if (log_probs != nullptr) log_probs[b * length + d - 1] = node.log_prob;
      beam = node.parent;
    }
  }
}

std::int32_t BeamSearch::tree(std::int32_t r, std::int32_t max_drafts, TokenId* tokens,
                              std::int32_t* parents, double* log_probs) const {
  TokenId paths[kMaxDraftLen];
  double path_log_probs[kMaxDraftLen];
  std::int32_t node_of[kMaxDraftLen];
  const std::int32_t count = num_beams(r), length = requests_[r].depth;
  if (length == 0) return 0;
  beams(r, paths, path_log_probs);
  const std::int32_t nodes = merge_beams(paths, count, length, tokens, parents, node_of);
  for (std::int32_t i = 0; i < count * length; ++i) log_probs[node_of[i]] = path_log_probs[i];
  if (nodes <= max_drafts) return nodes;
  // A parent is never less likely than its child and stands before it, so it is kept with it.
  std::int32_t order[kMaxDraftLen], index_of[kMaxDraftLen];
  std::iota(order, order + nodes, 0);
  std::stable_sort(order, order + nodes,
                   [&](std::int32_t a, std::int32_t b) { return log_probs[a] > log_probs[b]; });
  std::sort(order, order + max_drafts);
  for (std::int32_t i = 0; i < max_drafts; ++i) {
    const std::int32_t node = order[i];
    index_of[node] = i;
    tokens[i] = tokens[node];
    parents[i] = parents[node] < 0 ? -1 : index_of[parents[node]];
    log_probs[i] = log_probs[node];
  }
  return max_drafts;
}

}  // namespace specdec
