#include "engine/token_mask.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "algo/residual.h"
#include "backend/backend.h"
#include "engine/score_processor.h"

namespace specdec {

void apply_token_mask(const std::uint32_t* bits, int vocab_size, const float* scores, float* out) {
  for (int first = 0; first < vocab_size; first += 32) {
    const std::uint32_t word = bits[first / 32];
    const int count = std::min(32, vocab_size - first);
    // Most words are all or nothing.
    if (word == 0) {
      std::fill_n(out + first, count, kForbiddenScore);
    } else if (word == ~0u) {
      std::copy_n(scores + first, count, out + first);
    } else {
      for (int i = 0; i < count; ++i) {
        out[first + i] = ((word >> i) & 1u) != 0 ? scores[first + i] : kForbiddenScore;
      }
    }
  }
}

std::optional<TokenId> best_allowed(const std::uint32_t* bits, int vocab_size, const float* scores,
                                    std::vector<float>* masked) {
  masked->resize(static_cast<std::size_t>(vocab_size));
  apply_token_mask(bits, vocab_size, scores, masked->data());
  TokenId token = -1;
  ArgmaxParams params;
  params.scores = masked->data();
  params.row_stride = vocab_size;
  params.rows = 1;
  params.vocab = vocab_size;
  params.ids = &token;
  cpu_backend().argmax(params);
  if (token < 0 || !std::isfinite((*masked)[token])) return std::nullopt;
  return token;
}

void CutDraftProbs::fill(const DraftTree& tree, const TokenMasks& masks, const std::int32_t* uncut,
                         const float* rows, std::int32_t columns, const TokenId* ids,
                         bool ids_of_each) {
  const auto drafts = static_cast<std::size_t>(tree.num_drafts());
  probs.columns = columns;
  probs.rows.resize(drafts * columns);
  probs.mass.resize(drafts);
  probs.column.resize(drafts);
  source.resize(drafts + 1);
  own_ids.clear();
  for (int node = 1; node < tree.size; ++node) {
    const std::ptrdiff_t from = std::ptrdiff_t{uncut[node]} * columns;
    const std::ptrdiff_t to = std::ptrdiff_t{node - 1} * columns;
    const TokenId* row_ids = ids == nullptr ? nullptr : ids_of_each ? ids + from : ids;
    if (ids_of_each) own_ids.insert(own_ids.end(), row_ids, row_ids + columns);
    float* row = probs.rows.data() + to;
    double mass = 0.0;
    for (std::int32_t c = 0; c < columns; ++c) {
      const TokenId token = row_ids == nullptr ? c : row_ids[c];
      const bool allowed = token >= 0 && masks.allows(tree.parents[node], token);
      row[c] = allowed ? rows[from + c] : 0.0f;
      mass += row[c];
      if (token == tree.tokens[node]) probs.column[node - 1] = c;
    }
    Mass total = 0;
    for (std::int32_t c = 0; c < columns; ++c) row[c] = static_cast<float>(row[c] / mass);
    for (std::int32_t first = 0; first < columns; first += kMassBlock) {
      total += block_mass(row + first, std::min(kMassBlock, columns - first));
    }
    probs.mass[node - 1] = weight_of(total);
    source[node] = node - 1;
  }
}

}  // namespace specdec
