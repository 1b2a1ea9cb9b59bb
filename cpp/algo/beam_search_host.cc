#include "algo/beam_search_host.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "base/thread_pool.h"

namespace specdec {
namespace {

// Scores that a search passes in a nanosecond.
constexpr std::int64_t kScoresPerNs = 8;
static_assert(BeamSearch::kKept <= kMaxBeamScores && BeamSearch::kKept <= kMaxTopScores);

}  // namespace

void BeamSearch::start(const std::vector<BeamShape>& shapes) {
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const BeamShape& s = shapes[i];
    SPECDEC_REQUIRE(s.num_beams >= 1 && s.length >= 1 && s.num_beams <= kMaxDraftLen &&
                        s.length <= kMaxDraftLen && s.num_beams * s.length <= kMaxDraftLen,
                    "request ", i, ": ", s.num_beams, " beams of ", s.length,
                    " drafts: give at least one of each, at most ", kMaxDraftLen, " in all");
    SPECDEC_REQUIRE(s.temperature > 0.0f && std::isfinite(s.temperature), "request ", i,
                    ": temperature = ", s.temperature, ": a finite number above 0 is needed");
  }
  requests_.resize(shapes.size());
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    Request& request = requests_[i];
    request.shape = shapes[i];
    request.reached = 0;
    request.rows = 1;
    const auto nodes = static_cast<std::size_t>(shapes[i].num_beams * shapes[i].length);
    request.tokens.resize(nodes);
    request.parents.resize(nodes);
    request.log_probs.resize(nodes);
    const std::size_t laws = shapes[i].keeps_laws ? nodes * kKept : 0;
    request.scores.resize(laws);
    request.columns.resize(laws);
  }
  row_parents_.resize(shapes.size());
  std::iota(row_parents_.begin(), row_parents_.end(), 0);
  row_tokens_.assign(shapes.size(), -1);
  row_log_probs_.assign(shapes.size(), 0.0f);
}

void BeamSearch::advance(const float* scores, std::int64_t stride, std::int32_t vocab_size,
                         const TokenId* token_ids) {
  const std::int32_t rows = num_rows();
  make_rows();
  const auto score_rows = [&](std::int64_t first, std::int64_t last) {
    thread_local std::vector<std::int32_t> scratch;
    for (std::int64_t row = first; row < last; ++row) {
      ScoredIndex best[kKept];
      set_best(row, best, top_scores(scores + row * stride, vocab_size, kKept, &scratch, best));
    }
  };
  ThreadPool::global().run_items(rows, vocab_size / kScoresPerNs,
                                 [&](Range some, int) { score_rows(some.begin, some.end); });
  grow_all(vocab_size, token_ids);
}

void BeamSearch::make_rows() {
  const auto places = static_cast<std::size_t>(num_rows()) * kKept;
  best_scores_.assign(places, -std::numeric_limits<float>::infinity());
  best_columns_.assign(places, 0);
}

void BeamSearch::set_best(std::int64_t row, ScoredIndex* best, std::int32_t count) {
  std::sort(best, best + count, likelier);
  for (std::int32_t i = 0; i < count; ++i) {
    best_scores_[row * kKept + i] = best[i].score;
    best_columns_[row * kKept + i] = best[i].index;
  }
}

void BeamSearch::grow_all(std::int32_t num_scores, const TokenId* token_ids) {
  row_parents_.clear();
  row_tokens_.clear();
  row_log_probs_.clear();
  std::int64_t first_row = 0;
  for (Request& request : requests_) {
    if (request.rows == 0) continue;
    const BeamNodes nodes = request.nodes();
    const std::int32_t depth = request.reached, width = nodes.width;
    const float* scores = best_scores_.data() + first_row * kKept;
    const std::int64_t* columns = best_columns_.data() + first_row * kKept;
    if (request.shape.keeps_laws) {
      const std::int64_t place = std::int64_t{depth} * width * kKept;
      std::copy_n(scores, request.rows * kKept, request.scores.begin() + place);
      std::copy_n(columns, request.rows * kKept, request.columns.begin() + place);
    }
    std::int32_t parents[kMaxDraftLen];
    TokenId tokens[kMaxDraftLen];
    grow_beams(SerialTeam{}, {scores, columns, token_ids, kKept, num_scores},
               {width, nodes.length, request.shape.temperature}, depth, nodes, &request.reached,
               {parents, tokens, static_cast<std::int32_t>(first_row)}, &scratch_);
    first_row += request.rows;
    request.rows = 0;
    if (request.reached == depth || request.reached == nodes.length) continue;
    // Rows without a beam stand behind those that have one.
    for (; request.rows < width; ++request.rows) {
      const std::int32_t node = depth * width + request.rows;
      if (nodes.tokens[node] < 0) break;
      row_parents_.push_back(parents[request.rows]);
      row_tokens_.push_back(tokens[request.rows]);
      row_log_probs_.push_back(nodes.log_probs[node]);
    }
  }
}

BeamTree BeamSearch::tree(std::int32_t r, std::int32_t max_drafts) {
  const BeamNodes nodes = requests_[r].nodes();
  BeamTree tree;
  BeamMergeScratch scratch;
  tree.size = std::min(max_drafts, merge_beams(SerialTeam{}, nodes, requests_[r].reached,
                                               tree.tokens, tree.parents, tree.sources, &scratch));
  for (std::int32_t i = 0; i < tree.size; ++i) {
    tree.depths[i] = tree.sources[i] / nodes.width + 1;
    tree.log_probs[i] = nodes.log_probs[tree.sources[i]];
  }
  return tree;
}

void BeamSearch::tree_laws(std::int32_t r, const BeamTree& tree, const TokenId* token_ids,
                           float* probs, TokenId* ids) const {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Request& request = requests_[r];
  SPECDEC_REQUIRE(request.shape.keeps_laws, "request ", r,
                  " keeps no laws: say so when the search is started");
  for (std::int32_t i = 0; i < tree.size; ++i, probs += kKept, ids += kKept) {
    const std::int32_t depth = tree.depths[i] - 1;
    const std::int32_t row = depth == 0 ? 0 : request.parents[tree.sources[i]];
    const std::int64_t first = (std::int64_t{depth} * request.shape.num_beams + row) * kKept;
    const float* scores = request.scores.data() + first;
    const auto weight = [&](std::int32_t j) {
      return std::exp((static_cast<double>(scores[j]) - scores[0]) / request.shape.temperature);
    };
    double total = 0.0;
    for (std::int32_t j = 0; j < kKept; ++j) total += weight(j);
    for (std::int32_t j = 0; j < kKept; ++j) {
      const bool there = scores[j] > -kInfinity;
      const std::int64_t column = request.columns[first + j];
      probs[j] = there ? static_cast<float>(weight(j) / total) : 0.0f;
      ids[j] = !there                 ? -1
               : token_ids == nullptr ? static_cast<TokenId>(column)
                                      : token_ids[column];
    }
  }
}

void BeamSearch::tree_laws(std::int32_t r, std::int32_t max_drafts, std::int32_t num_scores,
                           float* out) {
  const BeamTree tree = this->tree(r, max_drafts);
  std::vector<float> probs(static_cast<std::size_t>(tree.size) * kKept);
  std::vector<TokenId> columns(probs.size());
  tree_laws(r, tree, nullptr, probs.data(), columns.data());
  std::fill_n(out, static_cast<std::int64_t>(tree.size) * num_scores, 0.0f);
  for (std::size_t i = 0; i < probs.size(); ++i) {
    if (columns[i] < 0) continue;
    SPECDEC_REQUIRE(columns[i] < num_scores, "num_scores = ", num_scores,
                    ": less than what was scored");
    out[static_cast<std::int64_t>(i / kKept) * num_scores + columns[i]] = probs[i];
  }
}

}  // namespace specdec
