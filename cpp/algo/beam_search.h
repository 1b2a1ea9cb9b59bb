// Beam search over a drafter's scores, for several requests at once, and the draft tree of its
// beams. The network that makes the scores is elsewhere: start(), then per depth score the rows and
// advance(), until there are no rows.
//
// A beam is extended by the kKept best scores of its row alone (smaller id first on ties), whose
// log-softmax at the request's temperature is added to the beam's log-probability. The num_beams
// best of all extensions become the next depth's beams: larger sum first; on ties the beam that
// stood first, then its better token. Sums are double, so that the order does not depend on the
// machine where two differ at all.
//
// Scores of -infinity are no candidates; a row with NaN or +infinity has none. So a depth may have
// fewer beams than num_beams, and a request whose rows all fail keeps the beams it had.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "algo/top_scores.h"
#include "base/types.h"

namespace specdec {

struct BeamShape {
  std::int32_t num_beams = 1;
  std::int32_t length = 1;  // num_beams * length <= kMaxDraftLen
  double temperature = 1.0;
  bool keeps_laws = false;  // tree_laws() will be asked for
};

// Nodes of the prefix tree of `num_beams` paths of `length` tokens each: equal prefixes are one
// node. Nodes are numbered in the order in which beam after beam first walks over them; parents
// [node]: -1 for the golden token; node_of [num_beams, length]: each beam's nodes, may be null.
// Returns the number of nodes; tokens and parents have room for num_beams * length <= kMaxDraftLen.
std::int32_t merge_beams(const TokenId* beams, std::int32_t num_beams, std::int32_t length,
                         TokenId* tokens, std::int32_t* parents, std::int32_t* node_of);

class BeamSearch {
 public:
  static constexpr std::int32_t kKept = kMaxTopScores;

  // Starts over. Every request has one row: its empty beam.
  void start(const std::vector<BeamShape>& shapes);

  // Beams of the current depth that want scores, request after request, best beam first.
  std::int32_t num_rows() const { return static_cast<std::int32_t>(row_parents_.size()); }
  // Which row of the depth before each of them extends, and its last token. Empty beams have
  // neither: row i is request i, token -1.
  const std::vector<std::int32_t>& row_parents() const { return row_parents_; }
  const std::vector<TokenId>& row_tokens() const { return row_tokens_; }
  const std::vector<double>& row_log_probs() const { return row_log_probs_; }

  // scores [num_rows, vocab_size], `stride` floats from row to row. token_ids [vocab_size] maps a
  // score's index to its token, null: the same number.
  void advance(const float* scores, std::int64_t stride, std::int32_t vocab_size,
               const TokenId* token_ids);

  // advance() of a machine that has found each row's best scores itself: `count` of them a row, in
  // any order, scores and columns [num_rows, count]; count <= kKept, and fewer only where a row has
  // no more than these. Columns are below num_scores.
  void advance_best(const float* scores, const std::int32_t* columns, std::int32_t count,
                    std::int32_t num_scores, const TokenId* token_ids);

  // Beams that request `r` has reached, best first: out [count, depth of the beams].
  std::int32_t num_requests() const { return static_cast<std::int32_t>(requests_.size()); }
  std::int32_t depth(std::int32_t r) const { return requests_[r].depth; }
  std::int32_t num_beams(std::int32_t r) const;
  void beams(std::int32_t r, TokenId* out, double* log_probs) const;

  // Their prefix tree, cut to `max_drafts` nodes: the likeliest stay. Returns the number of nodes;
  // log_probs[node] is the sum along its path.
  std::int32_t tree(std::int32_t r, std::int32_t max_drafts, TokenId* tokens, std::int32_t* parents,
                    double* log_probs) const;

  // What each node of that tree was chosen from: out [nodes, num_scores], zeroed here, column i is
  // the i-th score. For a request that keeps_laws.
  void tree_laws(std::int32_t r, std::int32_t max_drafts, std::int32_t num_scores,
                 float* out) const;

 private:
  struct Node {
    std::int32_t parent;  // beam of the depth before
    TokenId token;
    double log_prob;
  };
  struct Request {
    BeamShape shape;
    std::int32_t depth = 0;
    bool growing = true;
    std::vector<Node> nodes;           // depth after depth
    std::vector<std::int32_t> begins;  // first node of each depth, and the end
    // keeps_laws: (column, probability) of each scored node's candidates, kKept places a node.
    std::vector<std::pair<std::int32_t, float>> laws;
    std::vector<std::int32_t> law_sizes;  // [scored nodes]
  };
  struct Candidate {
    std::int32_t index;
    double log_prob;
  };

  // What a row's request asks for, and where its law is kept (null: nowhere).
  struct RowLaw {
    std::int32_t num_beams;
    double temperature;
    std::pair<std::int32_t, float>* kept;
    std::int32_t* kept_size;
  };
  // The tree of tree(); nodes[i] is the node of `requests_[r].nodes` that node i is.
  std::int32_t cut_tree(std::int32_t r, std::int32_t max_drafts, TokenId* tokens,
                        std::int32_t* parents, std::int32_t* nodes) const;

  // advance() in three parts: what each row is to give, one row's candidates, the next depth.
  void prepare_rows();
  void set_candidates(std::int64_t row, ScoredIndex* best, std::int32_t kept);
  void grow_all(const TokenId* token_ids);
  void grow(Request* request, std::int32_t first_row, std::int32_t count, const TokenId* token_ids);

  std::vector<Request> requests_;
  std::vector<std::int32_t> row_parents_;
  std::vector<TokenId> row_tokens_;
  std::vector<double> row_log_probs_;
  std::vector<Candidate> candidates_;         // [rows, kKept], best first, num_beams at most
  std::vector<std::int32_t> num_candidates_;  // [rows]
  std::vector<RowLaw> row_laws_;              // [rows]
};

}  // namespace specdec
