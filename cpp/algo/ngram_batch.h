// Prompt lookup for a batch of sequences, each with its own history and index, host side: one call
// takes every sequence's new tokens and returns every sequence's draft.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "algo/ngram_index.h"
#include "base/types.h"

namespace specdec {

// An NgramIndex with the memory it lives in.
class OwnedNgramIndex {
 public:
  // Throws std::invalid_argument unless max_seq_len >= 1 and 1 <= max_ngram <= kMaxNgram.
  OwnedNgramIndex(std::int32_t max_seq_len, std::int32_t max_ngram);

  NgramIndex* get() const { return reinterpret_cast<NgramIndex*>(block_.get()); }
  std::size_t bytes() const { return ngram_bytes_required(max_seq_len_, ngrams_up_to(max_ngram_)); }
  std::int32_t max_seq_len() const { return max_seq_len_; }
  std::int32_t max_ngram() const { return max_ngram_; }

 private:
  std::int32_t max_seq_len_, max_ngram_;
  std::unique_ptr<std::uint64_t[]> block_;
};

class NgramBatch {
 public:
  NgramBatch(std::int32_t num_sequences, std::int32_t max_seq_len, std::int32_t max_ngram);

  std::int32_t num_sequences() const { return static_cast<std::int32_t>(sequences_.size()); }
  std::int32_t length(std::int32_t sequence) const;

  // Forgets a sequence's history.
  void clear(std::int32_t sequence);
  // Appends counts[b] tokens from tokens[b * stride] to every sequence b and looks up all of them.
  // Writes lengths[b] draft tokens to drafts[b * how.max_draft_len]. No allocation. Throws
  // std::invalid_argument, before any change, when a history would exceed max_seq_len.
  void propose(const TokenId* tokens, std::int64_t stride, const std::int32_t* counts,
               const NgramLookup& how, TokenId* drafts, std::int32_t* lengths);

 private:
  struct Sequence {
    std::vector<TokenId> history;  // [max_seq_len]
    std::int32_t length = 0;
    OwnedNgramIndex index;
  };
  std::vector<Sequence> sequences_;
};

}  // namespace specdec
