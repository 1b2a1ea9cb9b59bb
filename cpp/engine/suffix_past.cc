#include "engine/suffix_past.h"

#include <algorithm>
#include <utility>

#include "algo/team.h"

namespace specdec {
namespace {

constexpr int kHalfTokens = SuffixPast::kMaxTokens / 2;
constexpr int kFirstCapacity = 64;
// No tokens, and never equal to each other: no match goes over the beginning of an output.
constexpr TokenId kOutputBegins = -1, kQueryBegins = -2;

}  // namespace

// Room for `tokens`; the index is made anew when it grows, which doubles.
void SuffixPast::Half::reserve(int tokens) {
  if (tokens <= capacity) return;
  capacity = std::max(capacity, kFirstCapacity);
  while (capacity < tokens) capacity *= 2;
  text.resize(static_cast<std::size_t>(capacity) + 1 + kMaxSuffixDepth);
  block.assign((suffix_bytes_required(capacity) + 7) / 8, 0);
  suffix_init(SerialTeam{}, state(), capacity);
}

void SuffixPast::Half::append(const TokenId* output, int length) {
  reserve(size + 1 + length);
  text[size] = kOutputBegins;
  std::copy_n(output, length, text.begin() + size + 1);
  size += 1 + length;
  ++requests;
  suffix_extend(SerialTeam{}, state(), text.data(), size);
}

void SuffixPast::add(const TokenId* output, int length, int max_requests) {
  if (length <= 0 || max_requests <= 0) return;
  const int kept = std::min(length, kHalfTokens - 1);
  const int each = std::max(1, max_requests / 2);
  if (young_.requests >= each || young_.size + 1 + kept > kHalfTokens) {
    if (max_requests > 1) old_ = std::move(young_);
    young_ = {};
  }
  young_.append(output + (length - kept), kept);
}

const SuffixPast::Draft& SuffixPast::draft(const TokenId* history, int length,
                                           const SuffixLookup& how, int max_drafts, int max_depth) {
  draft_.longest = 0;
  draft_.tree.reset(history[length - 1]);
  for (Half* half : {&young_, &old_}) {
    if (half->size > 0) draft_from(half, history, length, how, max_drafts, max_depth);
  }
  return draft_;
}

// The look-up compares with the end of the text it searches, so the end of the history stands there
// while it does; it is not indexed.
void SuffixPast::draft_from(Half* half, const TokenId* history, int length, const SuffixLookup& how,
                            int max_drafts, int max_depth) {
  const int query = std::min(length, kMaxSuffixDepth);
  half->text[half->size] = kQueryBegins;
  std::copy_n(history + (length - query), query, half->text.begin() + half->size + 1);
  DraftTree tree;
  SuffixState* state = half->state();
  suffix_draft(SerialTeam{}, state, half->text.data(), half->size + 1 + query, how, max_drafts,
               max_depth, &tree);
  const int longest = suffix_longest(state);
  if (longest <= draft_.longest) return;
  draft_.longest = longest;
  draft_.tree.reset(history[length - 1]);
  std::array<int, kMaxStepTokens> place{};
  for (int i = 1; i < tree.size; ++i) {
    const int parent = place[tree.parents[i]];
    // An output ends there.
    const bool ends = parent < 0 || tree.tokens[i] < 0;
    place[i] = ends ? -1 : draft_.tree.add(tree.tokens[i], parent);
    if (!ends) draft_.nodes[place[i] - 1] = state->nodes[i - 1];
  }
}

std::int64_t SuffixPast::bytes() const {
  std::size_t bytes = sizeof(SuffixPast);
  for (const Half* half : {&young_, &old_}) {
    bytes += half->text.capacity() * sizeof(TokenId);
    bytes += half->block.capacity() * sizeof(std::uint64_t);
  }
  return static_cast<std::int64_t>(bytes);
}

}  // namespace specdec
