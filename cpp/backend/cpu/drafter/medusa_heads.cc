#include "backend/cpu/drafter/medusa_heads.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "backend/cpu/linear/linear_call.h"
#include "base/check.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

void require_shape(const PackedLinear& layer, const char* name, std::size_t index, std::int64_t n,
                   std::int64_t k) {
  SPECDEC_REQUIRE(layer.n() == n && layer.k() == k, name, "[", index, "] has shape [", layer.n(),
                  ", ", layer.k(), "], expected [", n, ", ", k, "]");
}

}  // namespace

MedusaHeads::MedusaHeads(std::int64_t hidden_size, std::int32_t num_heads, std::int64_t num_scores,
                         MedusaLayers layers, ScoreRows target, std::vector<TokenId> token_ids)
    : hidden_size_(hidden_size),
      num_heads_(num_heads),
      num_scores_(num_scores),
      layers_(std::move(layers)),
      target_(std::move(target)),
      token_ids_(std::move(token_ids)),
      ops_(row_ops()),
      ones_(static_cast<std::size_t>(hidden_size), 1.0f) {
  if (layers_.first != nullptr) {
    require_shape(*layers_.first, "first", 0, num_heads * hidden_size, hidden_size);
  }
  const auto heads = static_cast<std::size_t>(num_heads);
  SPECDEC_REQUIRE(layers_.deeper.size() == heads, "deeper has the layers of ",
                  layers_.deeper.size(), " heads, there are ", heads);
  for (std::size_t h = 0; h < heads; ++h) {
    SPECDEC_REQUIRE(layers_.deeper[h].size() == layers_.deeper[0].size() &&
                        (layers_.first != nullptr || layers_.deeper[h].empty()),
                    "deeper[", h, "] has ", layers_.deeper[h].size(),
                    " layers: every head has as many, and none without a first");
    for (const PackedLinear* layer : layers_.deeper[h]) {
      require_shape(*layer, "deeper", h, hidden_size, hidden_size);
    }
  }
  const std::size_t own = layers_.lm_heads.size();
  SPECDEC_REQUIRE(own == heads || own == 1 || (own == 0 && target_), "lm_heads has ", own,
                  " layers: give ", heads, ", 1, or none and a target");
  for (std::size_t h = 0; h < own; ++h) {
    require_shape(*layers_.lm_heads[h], "lm_heads", h, num_scores, hidden_size);
  }
  SPECDEC_REQUIRE(token_ids_.empty() || static_cast<std::int64_t>(token_ids_.size()) == num_scores,
                  "token_ids has ", token_ids_.size(),
                  " entries, expected num_scores = ", num_scores);
}

const float* MedusaHeads::scores(const std::vector<const float*>& hidden, std::int32_t num_heads) {
  const auto rows = static_cast<std::int64_t>(hidden.size());
  hidden_.resize(static_cast<std::size_t>(rows * hidden_size_));
  for (std::int64_t r = 0; r < rows; ++r) {
    std::copy_n(hidden[static_cast<std::size_t>(r)], hidden_size_,
                hidden_.data() + r * hidden_size_);
  }
  run_blocks(rows, num_heads);
  scores_.resize(static_cast<std::size_t>(num_heads * rows * num_scores_));
  if (layers_.lm_heads.empty()) {
    target_(x_.data(), num_heads * rows, scores_.data());
  } else if (layers_.lm_heads.size() == 1) {
    run_linear(*layers_.lm_heads[0], rows_view(x_.data(), num_heads * rows, hidden_size_),
               rows_view(scores_.data(), num_heads * rows, num_scores_));
  } else {
    for (std::int32_t h = 0; h < num_heads; ++h) {
      run_linear(*layers_.lm_heads[static_cast<std::size_t>(h)],
                 rows_view(x_.data() + h * rows * hidden_size_, rows, hidden_size_),
                 rows_view(scores_.data() + h * rows * num_scores_, rows, num_scores_));
    }
  }
  return scores_.data();
}

void MedusaHeads::best(const std::vector<const float*>& hidden, std::int32_t num_heads,
                       std::int32_t top_k, TokenId* ids) {
  const float* const all = scores(hidden, num_heads);
  const auto rows = static_cast<std::int64_t>(hidden.size());
  ThreadPool& pool = ThreadPool::global();
  const ThreadPool::Hold threads(pool);
  scratch_.resize(static_cast<std::size_t>(pool.size()));
  pool.run_items(num_heads * rows, num_scores_, [&](Range range, int rank) {
    ScoredIndex found[kMaxTopScores];
    for (std::int64_t i = range.begin; i < range.end; ++i) {
      const std::int64_t head = i / rows, row = i % rows;
      const std::int32_t count =
          top_scores(all + i * num_scores_, static_cast<std::int32_t>(num_scores_), top_k,
                     &scratch_[static_cast<std::size_t>(rank)], found);
      std::sort(found, found + count, likelier);
      TokenId* const to = ids + (row * num_heads + head) * top_k;
      for (std::int32_t k = 0; k < count; ++k) {
        const auto index = static_cast<std::size_t>(found[k].index);
        to[k] = token_ids_.empty() ? found[k].index : token_ids_[index];
      }
      std::fill(to + count, to + top_k, -1);
    }
  });
}

// x_ of hidden_.
void MedusaHeads::run_blocks(std::int64_t rows, std::int32_t num_heads) {
  const std::int64_t size = hidden_size_;
  x_.resize(static_cast<std::size_t>(num_heads * rows * size));
  if (layers_.first == nullptr) {
    for (std::int32_t h = 0; h < num_heads; ++h) {
      std::copy_n(hidden_.data(), rows * size, x_.data() + h * rows * size);
    }
    return;
  }
  const std::int64_t stacked = num_heads_ * size;
  delta_.resize(static_cast<std::size_t>(rows * stacked));
  run_linear(*layers_.first, rows_view(hidden_.data(), rows, size),
             rows_view(delta_.data(), rows, stacked));
  // x [rows, H] = SiLU(delta) + from, rows of delta `stride` apart.
  const auto add_silu = [&](float* delta, std::int64_t stride, const float* from, float* x) {
    for (std::int64_t r = 0; r < rows; ++r) {
      float* const y = delta + r * stride;
      ops_.silu_mul_f32(y, ones_.data(), size, y);
      if (x != from) std::copy_n(from + r * size, size, x + r * size);
      ops_.add(y, size, x + r * size);
    }
  };
  for (std::int32_t h = 0; h < num_heads; ++h) {
    float* const x = x_.data() + h * rows * size;
    add_silu(delta_.data() + h * size, stacked, hidden_.data(), x);
  }
  for (std::int32_t h = 0; h < num_heads; ++h) {
    float* const x = x_.data() + h * rows * size;
    for (const PackedLinear* layer : layers_.deeper[static_cast<std::size_t>(h)]) {
      run_linear(*layer, rows_view(x, rows, size), rows_view(delta_.data(), rows, size));
      add_silu(delta_.data(), size, x, x);
    }
  }
}

}  // namespace specdec::cpu
