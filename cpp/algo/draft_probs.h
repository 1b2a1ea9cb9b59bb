// What a drafter said about the drafts of one proposal: the distribution each was drawn from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "algo/residual.h"
#include "base/types.h"

namespace specdec {

struct DraftProbs {
  std::int32_t columns = 0;          // 0: the drafts were chosen without chance
  bool replacement = false;          // siblings were drawn with replacement
  std::vector<float> rows;           // [drafts, columns]
  std::vector<double> mass;          // [drafts] sum of each row
  std::vector<std::int32_t> column;  // [drafts] where the draft's own token stands
  std::vector<TokenId> ids;          // [columns] a reduced vocabulary; empty: column = token

  bool given() const { return columns > 0; }
  void clear() { columns = 0; }

  DraftLaw law(std::int32_t draft) const {
    return {rows.data() + static_cast<std::ptrdiff_t>(draft) * columns,
            ids.empty() ? nullptr : ids.data(), columns, column[draft], mass[draft]};
  }
  std::size_t memory_bytes() const {
    return rows.capacity() * sizeof(float) + mass.capacity() * sizeof(double) +
           column.capacity() * sizeof(std::int32_t) + ids.capacity() * sizeof(TokenId);
  }

  // Takes over a proposal after checking it; throws std::invalid_argument naming the first entry
  // that is wrong. probs: rows `row_stride` elements apart. ids null: columns == vocab_size.
  // `scratch` is working memory that the caller keeps. parents as in DraftTree, shifted by the root
  // (tokens[i] is node i + 1).
  void assign(const float* probs, std::int64_t row_stride, std::int32_t num_columns,
              const TokenId* vocab_ids, bool with_replacement, const TokenId* tokens,
              const std::int32_t* parents, std::int32_t drafts, std::int32_t vocab_size,
              std::vector<std::int32_t>& scratch);
};

}  // namespace specdec
