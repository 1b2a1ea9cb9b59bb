#include "backend/cpu/drafter/beam_drafter.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "base/check.h"

namespace specdec::cpu {

BeamDrafter::BeamDrafter(RecurrentDrafter* network, std::vector<TokenId> token_ids,
                         std::int32_t max_requests, std::int32_t vocab_size)
    : network_(network),
      token_ids_(std::move(token_ids)),
      vocab_size_(vocab_size),
      options_(static_cast<std::size_t>(max_requests)) {
  SPECDEC_REQUIRE(
      token_ids_.empty() || static_cast<std::int64_t>(token_ids_.size()) == network->num_scores(),
      "token_ids has ", token_ids_.size(),
      " entries, expected num_scores = ", network->num_scores());
}

void BeamDrafter::enter(std::int32_t slot, const BeamOptions& options) {
  SPECDEC_REQUIRE(slot >= 0 && slot < static_cast<std::int32_t>(options_.size()), "slot = ", slot,
                  ": there are ", options_.size());
  SPECDEC_REQUIRE(options.num_beams >= 0 && options.num_beams <= kMaxDraftLen &&
                      options.length >= 0 && options.length <= kMaxDraftLen &&
                      options.num_beams * options.length <= kMaxDraftLen,
                  "num_beams = ", options.num_beams, ", length = ", options.length,
                  ": a tree has up to ", kMaxDraftLen, " drafts");
  SPECDEC_REQUIRE(options.temperature > 0.0f && std::isfinite(options.temperature),
                  "temperature = ", options.temperature, ": give a number above 0");
  options_[static_cast<std::size_t>(slot)] = options;
}

SearchCost BeamDrafter::draft(const SlotRequests& step, double pass_price, const BeamLaws& laws) {
  const std::int32_t longest = start(step);
  if (drafting_.empty()) return {};
  bool priced = pass_price > 0.0;
  for (const Drafting& one : drafting_) priced = priced && one.asked->adaptive;
  DepthRule rule;
  if (priced) {
    rule.gains.assign(static_cast<std::size_t>(longest - 1), 1.0);
    rule.pass_seconds = pass_price;
  }
  const TokenId* const map = token_ids_.empty() ? nullptr : token_ids_.data();
  const SearchCost cost = network_->run(&search_, map, rule);
  if (laws.has_probs != nullptr) std::fill_n(laws.has_probs, step.num_requests, std::uint8_t{0});
  for (std::int32_t r = 0; r < search_.num_requests(); ++r) propose(step, r, laws);
  return cost;
}

// Starts the search of who drafts in this step; the length of its longest beam.
std::int32_t BeamDrafter::start(const SlotRequests& step) {
  drafting_.clear();
  shapes_.clear();
  hidden_.clear();
  tokens_.clear();
  std::int32_t longest = 0;
  for (std::int32_t b = 0; b < step.num_requests; ++b) {
    const std::int32_t slot = step.slot_ids[b], len = step.len_to_draft(b);
    if (len == 0 || slot >= static_cast<std::int32_t>(options_.size())) continue;
    const BeamOptions& asked = options_[static_cast<std::size_t>(slot)];
    if (asked.num_beams == 0 || asked.length == 0) continue;
    const Slot* const at = step.slots.at(slot);
    // A tree of n drafts has no more than n leaves and is no deeper.
    const std::int32_t most = asked.adaptive ? step.max_drafts[b] : asked.num_beams * asked.length;
    const std::int32_t length = std::min({asked.length, slot_draft_room(at), most});
    drafting_.push_back({b, len, &asked});
    shapes_.push_back(
        {std::min(asked.num_beams, most), length, asked.temperature, asked.keeps_laws});
    hidden_.push_back(step.hidden_of(b));
    tokens_.push_back(step.slots.at(slot)->history()[len - 1]);
    longest = std::max(longest, length);
  }
  if (drafting_.empty()) return 0;
  search_.start(shapes_);
  network_->start(hidden_, tokens_);
  return longest;
}

// The tree of the search's request `r`, cut to its drafts, into its slot.
void BeamDrafter::propose(const SlotRequests& step, std::int32_t r, const BeamLaws& laws) {
  const Drafting& one = drafting_[static_cast<std::size_t>(r)];
  const BeamTree tree = search_.tree(r, step.max_drafts[one.b]);
  float survival[kMaxDraftLen];
  for (std::int32_t i = 0; i < tree.size; ++i) survival[i] = std::exp(tree.log_probs[i]);
  propose_draft(SerialTeam{}, step.slots.at(step.slot_ids[one.b])->proposed_draft(), one.len,
                tree.tokens, tree.parents, survival, tree.size, vocab_size_);
  if (!one.asked->keeps_laws || laws.probs == nullptr) return;
  SPECDEC_REQUIRE(tree.size <= laws.drafts, "probs has ", laws.drafts, " rows of each request, ",
                  tree.size, " drafts do not fit");
  const std::int64_t first = std::int64_t{one.b} * laws.drafts * BeamSearch::kKept;
  search_.tree_laws(r, tree, token_ids_.empty() ? nullptr : token_ids_.data(), laws.probs + first,
                    laws.ids + first);
  laws.has_probs[one.b] = 1;
}

}  // namespace specdec::cpu
