#include "algo/draft_probs.h"

#include <algorithm>

#include "base/check.h"

namespace specdec {
namespace {

void check_row(const float* row, std::int32_t columns, std::int32_t draft) {
  // One pass that compilers turn into vector code; the slow one below names the culprit.
  bool good = true;
  for (std::int32_t i = 0; i < columns; ++i) good &= is_probability(row[i]);
  if (good) return;
  for (std::int32_t i = 0; i < columns; ++i) {
    SPECDEC_REQUIRE(is_probability(row[i]), "probs[", draft, ", ", i, "] = ", row[i],
                    ": probabilities are finite and in [0, 1]; give a softmax, not scores");
  }
}

}  // namespace

void DraftProbs::assign(const float* probs, std::int64_t row_stride, std::int32_t num_columns,
                        const TokenId* vocab_ids, bool with_replacement, const TokenId* tokens,
                        const std::int32_t* parents, std::int32_t drafts, std::int32_t vocab_size,
                        std::vector<std::int32_t>& scratch) {
  clear();
  if (vocab_ids == nullptr) {
    SPECDEC_REQUIRE(num_columns == vocab_size, "probs has ", num_columns,
                    " columns, the vocabulary has ", vocab_size,
                    " tokens: give one column per token, or vocab_ids for a reduced vocabulary");
  } else {
    SPECDEC_REQUIRE(num_columns >= 1 && num_columns <= vocab_size, "vocab_ids has ", num_columns,
                    " entries: give 1..", vocab_size, " (the vocabulary)");
    scratch.assign(vocab_size, -1);  // column of a token
    for (std::int32_t i = 0; i < num_columns; ++i) {
      const TokenId id = vocab_ids[i];
      SPECDEC_REQUIRE(id >= 0 && id < vocab_size, "vocab_ids[", i, "] = ", id,
                      ": token ids are 0..", vocab_size - 1);
      SPECDEC_REQUIRE(scratch[id] < 0, "vocab_ids[", i, "] = ", id, " is there twice (column ",
                      scratch[id], "): every token has one column");
      scratch[id] = i;
    }
  }
  column.resize(drafts);
  mass.resize(drafts);
  for (std::int32_t i = 0; i < drafts; ++i) {
    const float* row = probs + i * row_stride;
    check_row(row, num_columns, i);
    Mass total = 0;
    for (std::int32_t first = 0; first < num_columns; first += kMassBlock) {
      total += block_mass(row + first, std::min(kMassBlock, num_columns - first));
    }
    const double sum = weight_of(total);
    SPECDEC_REQUIRE(sums_to_one(sum), "probs[", i, "] sums to ", sum,
                    ": a row is the distribution its draft was drawn from and sums to 1");
    column[i] = vocab_ids == nullptr ? tokens[i] : scratch[tokens[i]];
    SPECDEC_REQUIRE(column[i] >= 0, "draft ", i, " is token ", tokens[i],
                    ", which vocab_ids does not hold");
    SPECDEC_REQUIRE(row[column[i]] > 0.0f, "probs[", i, "] gives its own draft, token ", tokens[i],
                    ", probability 0: it was not drawn from that row");
    mass[i] = sum;
    for (std::int32_t j = 0; j < i && !with_replacement; ++j) {
      SPECDEC_REQUIRE(parents[j] != parents[i] || tokens[j] != tokens[i], "drafts ", j, " and ", i,
                      " are siblings of one token, ", tokens[i],
                      ": drawn without replacement they differ; for draws with replacement say "
                      "replacement=True");
    }
  }
  rows.resize(static_cast<std::size_t>(drafts) * num_columns);
  for (std::int32_t i = 0; i < drafts; ++i) {
    std::copy_n(probs + i * row_stride, num_columns,
                rows.begin() + static_cast<std::ptrdiff_t>(i) * num_columns);
  }
  if (vocab_ids == nullptr) {
    ids.clear();
  } else {
    ids.assign(vocab_ids, vocab_ids + num_columns);
  }
  replacement = with_replacement;
  columns = num_columns;
}

}  // namespace specdec
