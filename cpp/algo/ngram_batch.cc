#include "algo/ngram_batch.h"

#include <algorithm>

#include "base/check.h"

namespace specdec {
namespace {

constexpr std::int64_t kMostBatchTokens = 1 << 26;

}  // namespace

OwnedNgramIndex::OwnedNgramIndex(std::int32_t max_seq_len, std::int32_t max_ngram)
    : max_seq_len_(max_seq_len), max_ngram_(max_ngram) {
  SPECDEC_REQUIRE(max_seq_len >= 1 && max_seq_len <= (1 << 28),
                  "ngram_index.max_seq_len = ", max_seq_len, ": use 1..", 1 << 28);
  SPECDEC_REQUIRE(max_ngram >= 1 && max_ngram <= kMaxNgram, "ngram_index.max_ngram = ", max_ngram,
                  ": use 1..", kMaxNgram);
  block_ = std::make_unique_for_overwrite<std::uint64_t[]>((bytes() + 7) / 8);
  ngram_init(SerialTeam{}, get(), max_seq_len, ngrams_up_to(max_ngram));
}

NgramBatch::NgramBatch(std::int32_t num_sequences, std::int32_t max_seq_len,
                       std::int32_t max_ngram) {
  SPECDEC_REQUIRE(num_sequences >= 1, "ngram_batch.num_sequences = ", num_sequences,
                  ": use 1 or more");
  // Checked before memory is taken: an index of one sequence checks the rest.
  const std::int64_t most = kMostBatchTokens / std::max(max_seq_len, 1);
  SPECDEC_REQUIRE(num_sequences <= most, "ngram_batch.num_sequences = ", num_sequences, " of ",
                  max_seq_len, " tokens: ", kMostBatchTokens,
                  " tokens of all sequences are the most");
  sequences_.reserve(static_cast<std::size_t>(num_sequences));
  for (std::int32_t b = 0; b < num_sequences; ++b) {
    OwnedNgramIndex index(max_seq_len, max_ngram);
    sequences_.push_back(
        Sequence{std::vector<TokenId>(static_cast<std::size_t>(max_seq_len)), 0, std::move(index)});
  }
}

std::int32_t NgramBatch::length(std::int32_t sequence) const {
  return sequences_.at(static_cast<std::size_t>(sequence)).length;
}

void NgramBatch::clear(std::int32_t sequence) {
  Sequence& s = sequences_.at(static_cast<std::size_t>(sequence));
  s.length = 0;
  ngram_init(SerialTeam{}, s.index.get(), s.index.max_seq_len(), ngrams_up_to(s.index.max_ngram()));
}

void NgramBatch::propose(const TokenId* tokens, std::int64_t stride, const std::int32_t* counts,
                         const NgramLookup& how, TokenId* drafts, std::int32_t* lengths) {
  const std::int32_t batch = num_sequences();
  for (std::int32_t b = 0; b < batch; ++b) {
    const Sequence& s = sequences_[b];
    SPECDEC_REQUIRE(counts[b] >= 0 && counts[b] <= s.index.max_seq_len() - s.length, "counts[", b,
                    "] = ", counts[b], ": the history has ", s.length,
                    " of max_seq_len = ", s.index.max_seq_len(), " tokens; give 0..",
                    s.index.max_seq_len() - s.length);
  }
  for (std::int32_t b = 0; b < batch; ++b) {
    Sequence& s = sequences_[b];
    std::copy_n(tokens + b * stride, counts[b], s.history.data() + s.length);
    s.length += counts[b];
    ngram_prefetch<NgramPrefetch::kEntries>(s.index.get(), s.history.data(), s.length);
  }
  for (Sequence& s : sequences_) {
    ngram_prefetch<NgramPrefetch::kText>(s.index.get(), s.history.data(), s.length);
  }
  for (std::int32_t b = 0; b < batch; ++b) {
    Sequence& s = sequences_[b];
    NgramMatch match;
    ngram_extend(SerialTeam{}, s.index.get(), s.history.data(), s.length);
    ngram_lookup(SerialTeam{}, s.index.get(), s.history.data(), s.length, how, &match);
    std::copy_n(s.history.data() + match.source, match.length,
                drafts + std::int64_t{b} * how.max_draft_len);
    lengths[b] = match.length;
  }
}

}  // namespace specdec
