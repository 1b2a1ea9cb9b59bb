// ReDrafter's network on few-row linear layers, and the beam search over its scores.
//
// With c the target's last hidden state and a state s that starts at zero:
//
//   s <- SiLU([e(t), s] W_r + b_r)    recurrence; without one s <- s + e(t)
//   x <- [c, s]                       and if there is a projection: x <- x W_p + b_p
//   x <- x + SiLU(x W_i + b_i)        for each block
//   scores <- head(x)
//
// All of a step's requests share a call, one row per beam. Rows are float32 between the layers.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "algo/beam_search_host.h"
#include "backend/cpu/decoder/row_ops.h"
#include "backend/cpu/linear/packed_linear.h"
#include "base/types.h"

namespace specdec::cpu {

// The layers outlive the network that is made of them.
struct RecurrentLayers {
  const PackedLinear* recurrence = nullptr;  // [H, 2H], null: none
  const PackedLinear* projection = nullptr;  // [exit_dim, 2H], null: exit_dim = 2H
  std::vector<const PackedLinear*> blocks;   // [exit_dim, exit_dim] each
};

// When a search ends before its beams have their lengths.
struct DepthRule {
  // [depth - 1]: the seconds that an expected draft of this depth promises to save if the search
  // continues; depths behind the last are searched.
  std::vector<double> gains;
  // Seconds of a pass over one depth; 0: unknown, the first pass of the search counts.
  double pass_seconds = 0.0;
};

// What a search took. Network: the layers, without the choice of beams.
struct SearchCost {
  std::int32_t passes = 0;
  std::int64_t rows = 0;
  double seconds = 0.0, network_seconds = 0.0;
  double network_thread_seconds = 0.0;  // processor time of the calling thread
};

class RecurrentDrafter {
 public:
  // out [count, H]: rows of the target's input embedding table.
  using EmbedRows = std::function<void(const TokenId* tokens, std::int64_t count, float* out)>;
  // scores [rows, num_scores] of x [rows, exit_dim].
  using ScoreRows = std::function<void(const float* x, std::int64_t rows, float* scores)>;

  // Errors: std::invalid_argument naming the layer that does not fit.
  RecurrentDrafter(std::int64_t hidden_size, std::int64_t num_scores, RecurrentLayers layers,
                   EmbedRows embed, ScoreRows head);

  // The states of requests: the hidden state [H] and the last token of each.
  void start(const std::vector<const float*>& hidden, const std::vector<TokenId>& tokens);
  // Scores of the search's rows, which are the requests of start() or extend the rows before.
  void score(const BeamSearch& search);
  // The next depth from these scores; see BeamSearch::advance.
  void advance(BeamSearch* search, const TokenId* token_ids) const;
  // After start(): score() and advance() until the search has no rows or the rule says that going
  // on does not pay.
  SearchCost run(BeamSearch* search, const TokenId* token_ids, const DepthRule& rule);

  std::int64_t hidden_size() const { return hidden_size_; }
  std::int64_t num_scores() const { return num_scores_; }
  std::int64_t num_rows() const { return rows_; }
  const float* scores() const { return scores_.data(); }  // [num_rows, num_scores]

 private:
  void gather(const BeamSearch& search);
  void advance_state();
  void apply_silu(std::int64_t n, float* x);

  std::int64_t hidden_size_, exit_dim_, num_scores_;
  RecurrentLayers layers_;
  EmbedRows embed_;
  ScoreRows head_;
  const RowOps& ops_;

  std::int64_t rows_ = 0;
  bool started_ = false;                        // no depth has been scored since start()
  std::vector<TokenId> tokens_;                 // [rows]
  std::vector<float> context_, next_context_;   // [rows, H]
  std::vector<float> state_, next_state_;       // [rows, H]
  std::vector<float> embedding_;                // [rows, H]
  std::vector<float> pair_, features_, delta_;  // [rows, 2H], [rows, exit_dim] twice
  std::vector<float> scores_;                   // [rows, num_scores]
  std::vector<float> ones_;                     // SiLU's factor, [max(H, exit_dim)]
};

}  // namespace specdec::cpu
