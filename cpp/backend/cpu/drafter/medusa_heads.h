// Medusa heads on few-row linear layers, and the best of their guesses.
//
// From a hidden state c, head h computes
//
//   x <- c,  x <- x + SiLU(x W_hi + b_hi)  for each residual layer i,  scores <- lm_head(x)
//
// Rows are float32 between the layers. A row's scores do not depend on the other rows or threads.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "algo/top_scores.h"
#include "backend/cpu/decoder/row_ops.h"
#include "backend/cpu/linear/packed_linear.h"
#include "base/types.h"

namespace specdec::cpu {

// The layers outlive the heads that are made of them.
struct MedusaLayers {
  // The first residual layers of all heads, which read the same rows: [num_heads * H, H]. Null: no
  // residual layers.
  const PackedLinear* first = nullptr;
  // [num_heads][layers - 1], each [H, H].
  std::vector<std::vector<const PackedLinear*>> deeper;
  // [V', H]: one of each head, one for all of them, or none: the target's.
  std::vector<const PackedLinear*> lm_heads;
};

class MedusaHeads {
 public:
  // scores [rows, num_scores] of x [rows, H]: the target's head.
  using ScoreRows = std::function<void(const float* x, std::int64_t rows, float* scores)>;

  // token_ids [num_scores]: the token of each score; empty: the same number. Errors:
  // std::invalid_argument naming the layer that does not fit.
  MedusaHeads(std::int64_t hidden_size, std::int32_t num_heads, std::int64_t num_scores,
              MedusaLayers layers, ScoreRows target, std::vector<TokenId> token_ids);

  std::int64_t hidden_size() const { return hidden_size_; }
  std::int32_t num_heads() const { return num_heads_; }
  std::int64_t num_scores() const { return num_scores_; }

  // Scores of the first `num_heads` heads, [num_heads, rows, num_scores]; valid until the next
  // call.
  const float* scores(const std::vector<const float*>& hidden, std::int32_t num_heads);
  // ids [rows, num_heads, top_k]: each head's best guesses, the smaller row of its head first on
  // ties; -1 behind the last where fewer scores are above -infinity, and for a row with NaN or
  // +infinity. top_k is at most kMaxTopScores and num_scores.
  void best(const std::vector<const float*>& hidden, std::int32_t num_heads, std::int32_t top_k,
            TokenId* ids);

 private:
  void run_blocks(std::int64_t rows, std::int32_t num_heads);

  std::int64_t hidden_size_;
  std::int32_t num_heads_;
  std::int64_t num_scores_;
  MedusaLayers layers_;
  ScoreRows target_;
  std::vector<TokenId> token_ids_;
  const RowOps& ops_;

  std::vector<float> hidden_;                       // [rows, H]
  std::vector<float> x_;                            // [num_heads, rows, H]
  std::vector<float> delta_;                        // [rows, num_heads * H]
  std::vector<float> scores_;                       // [num_heads, rows, num_scores]
  std::vector<float> ones_;                         // SiLU's factor, [H]
  std::vector<std::vector<std::int32_t>> scratch_;  // of each thread
};

}  // namespace specdec::cpu
