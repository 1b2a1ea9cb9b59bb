#include "algo/beam_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "algo/top_scores.h"
#include "algo/trie_merge.h"
#include "base/check.h"
#include "base/thread_pool.h"

namespace specdec {
namespace {

// Fewer scores than this are searched by the calling thread: waking the others takes as long.
constexpr std::int64_t kInlineScores = 1 << 17;

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
    request.laws.clear();
    request.law_sizes.clear();
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
  prepare_rows();
  const auto score_rows = [&](std::int64_t first, std::int64_t last) {
    thread_local std::vector<std::int32_t> scratch;
    for (std::int64_t row = first; row < last; ++row) {
      ScoredIndex best[kKept];
      const std::int32_t kept =
          top_scores(scores + row * stride, vocab_size, kKept, &scratch, best);
      set_candidates(row, best, kept);
    }
  };
  if (rows == 1 || std::int64_t{rows} * vocab_size < kInlineScores) {
    score_rows(0, rows);
  } else {
    ThreadPool& pool = ThreadPool::global();
    pool.run([&](int rank) {
      const auto mine = pool.part(rows, rank);
      score_rows(mine.begin, mine.end);
    });
  }
  grow_all(token_ids);
}

void BeamSearch::advance_best(const float* scores, const std::int32_t* columns, std::int32_t count,
                              std::int32_t num_scores, const TokenId* token_ids) {
  const std::int64_t rows = num_rows();
  SPECDEC_REQUIRE(count >= 0 && count <= kKept, "count = ", count, ": 0..", kKept);
  for (std::int64_t i = 0; i < rows * count; ++i) {
    SPECDEC_REQUIRE(columns[i] >= 0 && columns[i] < num_scores, "columns[", i / count, "][",
                    i % count, "] = ", columns[i], ": there are ", num_scores, " scores");
  }
  if (rows == 0) return;
  prepare_rows();
  for (std::int64_t row = 0; row < rows; ++row) {
    ScoredIndex best[kKept];
    std::int32_t kept = 0;
    bool is_bad = false;
    for (std::int64_t i = row * count; i < (row + 1) * count; ++i) {
      is_bad = is_bad || !(scores[i] < std::numeric_limits<float>::infinity());
      if (scores[i] > -std::numeric_limits<float>::infinity())
        best[kept++] = {scores[i], columns[i]};
    }
    // Sums of a row are taken in the order of its columns.
    std::sort(best, best + kept,
              [](const ScoredIndex& a, const ScoredIndex& b) { return a.index < b.index; });
    set_candidates(row, best, is_bad ? 0 : kept);
  }
  grow_all(token_ids);
}

void BeamSearch::prepare_rows() {
  const auto rows = static_cast<std::size_t>(num_rows());
  candidates_.resize(rows * kKept);
  num_candidates_.resize(rows);
  row_laws_.clear();
  for (Request& request : requests_) {
    if (!request.growing) continue;
    const std::int32_t beams = request.begins[request.depth + 1] - request.begins[request.depth];
    RowLaw law{request.shape.num_beams, request.shape.temperature, nullptr, nullptr};
    if (request.shape.keeps_laws) {
      const std::size_t scored = request.law_sizes.size();
      request.laws.resize((scored + static_cast<std::size_t>(beams)) * kKept);
      request.law_sizes.resize(scored + static_cast<std::size_t>(beams));
      law.kept = request.laws.data() + scored * kKept;
      law.kept_size = request.law_sizes.data() + scored;
    }
    for (std::int32_t i = 0; i < beams; ++i) {
      row_laws_.push_back(law);
      if (law.kept == nullptr) continue;
      law.kept += kKept;
      ++law.kept_size;
    }
  }
}

// `best` in the order of the columns; it is reordered.
void BeamSearch::set_candidates(std::int64_t row, ScoredIndex* best, std::int32_t kept) {
  const RowLaw& law = row_laws_[static_cast<std::size_t>(row)];
  if (law.kept != nullptr) *law.kept_size = kept;
  num_candidates_[static_cast<std::size_t>(row)] = 0;
  if (kept == 0) return;
  // More than num_beams of a row's candidates never go on.
  const std::int32_t wanted = std::min(kept, law.num_beams);
  double total = 0.0;
  const float highest =
      std::max_element(best, best + kept, [](const ScoredIndex& a, const ScoredIndex& b) {
        return a.score < b.score;
      })->score;
  for (std::int32_t i = 0; i < kept; ++i) {
    total += std::exp((static_cast<double>(best[i].score) - highest) / law.temperature);
  }
  for (std::int32_t i = 0; law.kept != nullptr && i < kept; ++i) {
    const double below = (static_cast<double>(best[i].score) - highest) / law.temperature;
    law.kept[i] = {best[i].index, static_cast<float>(std::exp(below) / total)};
  }
  std::partial_sort(best, best + wanted, best + kept, likelier);
  const double log_total = std::log(total);
  Candidate* out = candidates_.data() + row * kKept;
  for (std::int32_t i = 0; i < wanted; ++i) {
    const double below = static_cast<double>(best[i].score) - highest;
    out[i] = {best[i].index, below / law.temperature - log_total};
  }
  num_candidates_[static_cast<std::size_t>(row)] = wanted;
}

void BeamSearch::grow_all(const TokenId* token_ids) {
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

std::int32_t BeamSearch::cut_tree(std::int32_t r, std::int32_t max_drafts, TokenId* tokens,
                                  std::int32_t* parents, std::int32_t* nodes) const {
  const Request& request = requests_[r];
  const std::int32_t count = num_beams(r), length = request.depth;
  if (length == 0) return 0;
  TokenId paths[kMaxDraftLen] = {};
  std::int32_t node_of[kMaxDraftLen];
  beams(r, paths, nullptr);
  const std::int32_t size = merge_beams(paths, count, length, tokens, parents, node_of);
  for (std::int32_t b = 0; b < count; ++b) {
    std::int32_t beam = b;
    for (std::int32_t d = length; d >= 1; --d) {
      const std::int32_t node = request.begins[d] + beam;
      nodes[node_of[b * length + d - 1]] = node;
      beam = request.nodes[node].parent;
    }
  }
  if (size <= max_drafts) return size;
  // A parent is never less likely than its child and stands before it, so it is kept with it.
  std::int32_t order[kMaxDraftLen], index_of[kMaxDraftLen];
  std::iota(order, order + size, 0);
  std::stable_sort(order, order + size, [&](std::int32_t a, std::int32_t b) {
    return request.nodes[nodes[a]].log_prob > request.nodes[nodes[b]].log_prob;
  });
  std::sort(order, order + max_drafts);
  for (std::int32_t i = 0; i < max_drafts; ++i) {
    const std::int32_t node = order[i];
    index_of[node] = i;
    tokens[i] = tokens[node];
    parents[i] = parents[node] < 0 ? -1 : index_of[parents[node]];
    nodes[i] = nodes[node];
  }
  return max_drafts;
}

std::int32_t BeamSearch::tree(std::int32_t r, std::int32_t max_drafts, TokenId* tokens,
                              std::int32_t* parents, double* log_probs) const {
  std::int32_t nodes[kMaxDraftLen];
  const std::int32_t size = cut_tree(r, max_drafts, tokens, parents, nodes);
  for (std::int32_t i = 0; i < size; ++i) log_probs[i] = requests_[r].nodes[nodes[i]].log_prob;
  return size;
}

void BeamSearch::tree_laws(std::int32_t r, std::int32_t max_drafts, std::int32_t num_scores,
                           float* out) const {
  const Request& request = requests_[r];
  SPECDEC_REQUIRE(request.shape.keeps_laws, "request ", r,
                  " keeps no laws: say so when the search is started");
  TokenId tokens[kMaxDraftLen];
  std::int32_t parents[kMaxDraftLen], nodes[kMaxDraftLen];
  const std::int32_t size = cut_tree(r, max_drafts, tokens, parents, nodes);
  std::fill_n(out, static_cast<std::int64_t>(size) * num_scores, 0.0f);
  for (std::int32_t i = 0; i < size; ++i) {
    std::int32_t depth = 1;
    while (nodes[i] >= request.begins[depth + 1]) ++depth;
    const std::int32_t scored = request.begins[depth - 1] + request.nodes[nodes[i]].parent;
    const auto* law = request.laws.data() + static_cast<std::size_t>(scored) * kKept;
    for (std::int32_t j = 0; j < request.law_sizes[scored]; ++j) {
      SPECDEC_REQUIRE(law[j].first < num_scores, "num_scores = ", num_scores,
                      ": less than what was scored");
      out[static_cast<std::int64_t>(i) * num_scores + law[j].first] = law[j].second;
    }
  }
}

}  // namespace specdec
