// What the host drafts for a step: each source's offer, merged into one tree, and the trees of
// requests whose slots are the host's.
#include <algorithm>
#include <utility>

#include "algo/trie_merge.h"
#include "engine/executor.h"

namespace specdec {
namespace {

// How far back the agreement behind a match is counted: beyond this, longer says nothing new.
constexpr int kMatchHorizon = 16;
// The chance of a draft that its drafter says nothing of, where its parent was right; and the least
// one, because what was proposed has some.
constexpr float kUnknownShare = 0.5f, kLeastShare = 1e-4f;

}  // namespace

// Fills the request's offer with what lookups find: `most` drafts, none deeper than `room`.
void Executor::look_up(RequestRecord& request, int most, int room) {
  request.offer.clear();
  const SlotMethod method = request.host_slot->method;
  if (most <= 0 || room <= 0) return;
  if (request.predicts()) {
    offer_chain(request, *request.prediction, request.predicted(), DraftSource::kPrediction,
                std::min({most, room, request.known_drafts}));
  }
  if (!request.forced.empty()) offer_forced(request, std::min(most, room));
  if (method == SlotMethod::kNgram) offer_ngram(request, std::min(most, room));
  if (method == SlotMethod::kSuffix || request.suffix_memory) offer_suffix(request, most, room);
  if (request.prompt_edits) {
    offer_chain(request, *request.prompt_edits, request.prompt_edits->edited(), DraftSource::kEdits,
                std::min(most, room));
  }
  // Drafts of the method alone come in the order of their source, which fixed drafts keep.
  if (request.adaptive || request.knows_drafts()) request.offer.sort();
}

// A chain of what follows in a text that the output is expected to follow.
void Executor::offer_chain(RequestRecord& request, const Prediction& text,
                           std::span<const TokenId> following, DraftSource source, int most) {
  const int length = std::min(most, static_cast<int>(following.size()));
  const bool is_whole = source == DraftSource::kPrediction && text.is_whole();
  const int run = is_whole ? std::max(text.run(), kLongMatch) : text.run();
  int node = DraftOffer::kGolden;
  for (int i = 0; i < length && node >= 0; ++i) {  // negative: there is no room
    // A draft that is right makes the match a token longer. Nothing else is known of the next one.
    const int match = std::min(run + i, kMatchHorizon);
    const DraftOffer::Estimate estimate{static_cast<std::int16_t>(match), 1, 1.0f};
    node = request.offer.add(node, following[static_cast<std::size_t>(i)], source, estimate,
                             request.learnt(), request.shared_rates.get());
  }
}

// A chain from the request's own history or the public pool, whichever agrees with a longer suffix;
// its own on ties.
void Executor::offer_ngram(RequestRecord& request, int most) {
  Slot* slot = request.host_slot;
  const TokenId* history = slot->history();
  NgramMatch& match = slot->match;
  ngram_lookup(SerialTeam{}, slot->ngram_index(), history, slot->len, slot->ngram, &match);
  const TokenId* chain = history + match.source;
  int length = match.length, agree = match.match_len;
  while (length > 0 && agree < kMatchHorizon && agree < match.source &&
         history[match.source - agree - 1] == history[slot->len - agree - 1]) {
    ++agree;
  }
  TokenId pooled[kMaxDraftLen];
  if (public_pool_ && match.match_len < slot->max_ngram) {
    std::int32_t pooled_match = 0;
    const std::int32_t pooled_len =
        public_pool_->lookup(request.params.cache_salt, history, slot->len,
                             slot->ngram.max_draft_len, pooled, &pooled_match);
    if (pooled_len > 0 && pooled_match > match.match_len) {
      chain = pooled;
      length = pooled_len;
      agree = pooled_match;
    }
  }
  int node = DraftOffer::kGolden;
  for (int i = 0; i < std::min(length, most); ++i) {
    const DraftOffer::Estimate estimate{static_cast<std::int16_t>(agree),
                                        static_cast<std::int16_t>(i + 1), 1.0f};
    node = request.offer.add(node, chain[i], DraftSource::kLookup, estimate, request.learnt(),
                             request.shared_rates.get());
  }
}

// The tree that the slot drafts from its suffix index, or, where that agrees with more of the text,
// the one of earlier outputs of its salt.
void Executor::offer_suffix(RequestRecord& request, int most, int room) {
  Slot* slot = request.host_slot;
  SuffixState* state = slot->suffix_state();
  SuffixLookup how = slot->suffix;
  if (request.suffix_memory) {
    state = request.suffix_state();
    how.max_draft_len = request.suffix_drafts();
    suffix_extend(SerialTeam{}, state, slot->history(), slot->len);
  }
  DraftTree tree;
  suffix_draft(SerialTeam{}, state, slot->history(), slot->len, how, most, room, &tree);
  const SuffixNode* nodes = state->nodes;
  if (request.past) {
    const auto& past = request.past->draft(slot->history(), slot->len, how, most, room);
    if (past.longest > suffix_longest(state)) {
      tree = past.tree;
      nodes = past.nodes.data();
    }
  }
  int place[kMaxStepTokens] = {DraftOffer::kGolden};
  for (int i = 1; i < tree.size; ++i) {
    const SuffixNode& node = nodes[i - 1];
    const DraftOffer::Estimate estimate{static_cast<std::int16_t>(node.match), 1,
                                        static_cast<float>(node.share) / kSuffixOne};
    place[i] = request.offer.add(place[tree.parents[i]], tree.tokens[i], DraftSource::kSuffix,
                                 estimate, request.learnt(), request.shared_rates.get());
  }
}

// What operations have proposed, `most` drafts that are no deeper than `room`.
void Executor::offer_model(RequestRecord& request, int most, int room) {
  const Slot* slot = request.host_slot;
  const ProposedDraft* drafts = request.host_slot->proposed_draft();
  if (slot->method != SlotMethod::kProposed || drafts->len != slot->len) return;
  int place[kMaxDraftLen];
  std::int16_t depth[kMaxDraftLen];
  for (int i = 0; i < std::min(most, drafts->count); ++i) {
    const int parent = drafts->parents[i];
    depth[i] = static_cast<std::int16_t>(parent < 0 ? 1 : depth[parent] + 1);
    place[i] = parent < 0 ? DraftOffer::kGolden : place[parent];
    if (place[i] < 0) continue;
    if (depth[i] > room) {
      place[i] = -1;
      continue;
    }
    // How often drafts of this depth are right, over what the model says of itself, is learnt.
    const float above = parent < 0 ? 1.0f : drafts->survival[parent];
    const float here = drafts->survival[i];
    float share = here < 0.0f || above <= 0.0f ? kUnknownShare : std::min(here / above, 1.0f);
    share = std::max(share, kLeastShare);
    place[i] =
        request.offer.add(place[i], drafts->tokens[i], DraftSource::kModel, {depth[i], 1, share},
                          request.learnt(), request.shared_rates.get());
  }
  request.offer.sort();
}

// The tree of drafts that were handed in, less what the limits cut off. The cut looks at places in
// the tree, never at tokens: what is left was drawn from what it says.
void Executor::place_proposal(RequestRecord& request, const DraftShare& share) {
  Slot* slot = request.host_slot;
  DraftTree& tree = slot->tree;
  tree.reset(slot->history()[slot->len - 1]);
  request.step_proposal = std::move(request.proposal);
  const DraftTree& proposal = request.step_proposal->tree;
  const std::int32_t room = slot_draft_room(slot);
  std::int32_t depth[kMaxStepTokens];
  std::int32_t placed[kMaxStepTokens];  // index in the step's tree, -1: cut off
  derive_depths(proposal.parents, proposal.size, depth);
  placed[0] = 0;
  for (int i = 1; i < proposal.size; ++i) {
    const std::int32_t parent = placed[proposal.parents[i]];
    const bool fits = parent >= 0 && depth[i] <= room && tree.num_drafts() < share.max_drafts;
    placed[i] = fits ? tree.add(proposal.tokens[i], parent) : -1;
    if (fits) request.step_proposal->source[placed[i]] = i - 1;
  }
}

// The tree of the request's next decode step.
void Executor::draft_on_host(RequestRecord& request, const DraftShare& share) {
  Slot* slot = request.host_slot;
  DraftTree& tree = slot->tree;
  request.step_proposal = nullptr;
  request.own_tree = false;
  request.sources = {};
  // The history may be longer than it was known to be when the step was planned.
  request.draft_limit =
      std::min(request.draft_limit, static_cast<int>(request.last_written() - slot->len));
  const auto from = [&](DraftSource source) {
    std::fill_n(request.sources.begin(), tree.size, bit_of(source));
  };
  if (request.takes_proposal && request.proposal) {
    place_proposal(request, share);
    from(DraftSource::kModel);
  } else if (request.weighed && !(request.asks() && slot->method == SlotMethod::kLookahead)) {
    tree.reset(slot->history()[slot->len - 1]);
    const int drafts = std::min(request.draft_limit, request.offer.num_drafts());
    request.offer.take(drafts, &tree);
    // That of steps on the host is counted once a grammar has cut them (build_place).
    if (request.adaptive && host_ == nullptr) {
      totals_.expected_accepted_tokens += request.offer.expected(drafts);
    }
    for (int i = 1; i <= drafts; ++i) request.sources[i] = request.offer.sources(i);
  } else {
    DraftShare own = share;
    if (request.weighed) own.max_drafts = request.asked;
    slot_draft(SerialTeam{}, slot, own, &tree);
    request.own_tree = true;
    from(slot->method == SlotMethod::kLookahead ? DraftSource::kLookahead : DraftSource::kModel);
    if (request.weighed) merge_lookahead(request);
  }
}

// Hangs what is at hand into lookahead's tree. Its window rows stay where they are.
void Executor::merge_lookahead(RequestRecord& request) {
  Slot* slot = request.host_slot;
  LookaheadState* state = slot->lookahead_state();
  TrieBuilder trie{&slot->tree, state->first_child(), state->next_sibling(), state->origin()};
  if (request.asked == 0) trie.reset(slot->history()[slot->len - 1]);
  const int drafts = std::min(request.draft_limit, request.offer.num_drafts());
  std::int32_t place[kMaxStepTokens] = {0};
  for (int i = 1; i <= drafts; ++i) {
    const std::int32_t parent = place[request.offer.parent(i)];
    place[i] = trie.descend(parent, request.offer.token(i), kOriginGuess);
    request.sources[place[i]] |= request.offer.sources(i);
  }
}

// The tree behind the prompt's last token: the first `drafts` that came with the request.
void Executor::take_external(RequestRecord& request, int drafts) {
  Slot* slot = request.host_slot;
  slot->tree.reset(slot->history()[slot->len - 1]);
  request.step_proposal = nullptr;
  request.own_tree = true;
  if (drafts == 0) return;
  request.step_proposal = std::move(request.external);
  Proposal& external = *request.step_proposal;
  // In front of the output stand a prediction's or a grammar's first tokens, or what was brought.
  DraftSource source = DraftSource::kRequest;
  if (!request.params.forced.empty()) source = DraftSource::kGrammar;
  if (request.prediction) source = DraftSource::kPrediction;
  std::fill_n(request.sources.begin(), 1 + drafts, bit_of(source));
  for (int i = 1; i <= drafts; ++i) {
    slot->tree.add(external.tree.tokens[i], external.tree.parents[i]);
    external.source[i] = i - 1;
  }
}

// Merges the proposed drafts with what was at hand, and keeps those that are worth their rows,
// where the drafter says how likely they are. The same budget as for chains, whose order is by
// likelihood, too.
void Executor::cut_proposed_drafts() {
  if (config_.method != DraftMethod::kProposed) return;
  const InFlightStep& flight = flights_.back();
  const int first = step_.num_prompts;
  int rows = step_.num_prompt_rows + step_.num_decodes;
  int most = config_.max_num_tokens - rows;
  chain_offers_.assign(step_.num_decodes, {});
  for (int i = 0; i < step_.num_decodes; ++i) {
    RequestRecord& request = *flight.places[first + i].request;
    const Slot* slot = request.host_slot;
    int allowed = staged(staging_.max_drafts)[first + i];
    if (request.weighed) {
      if (request.asked > 0) {
        offer_model(request, request.asked, request.room());
        request.draft_limit =
            std::min(request.draft_limit + request.asked, request.offer.num_drafts());
      }
      if (request.asked > 0 && request.adaptive && cost_now_.known()) {
        chain_offers_[i] = {request.offer.survival(), request.draft_limit};
      } else {
        rows += request.draft_limit;
        most -= request.draft_limit;
      }
      continue;
    }
    const ProposedDraft* drafts =
        slot->method == SlotMethod::kProposed ? request.host_slot->proposed_draft() : nullptr;
    const bool decided = request.takes_proposal && request.proposal != nullptr;
    const bool current = drafts != nullptr && drafts->len == slot->len && !decided;
    const int count = current ? std::min(allowed, drafts->count) : 0;
    int known = 0;
    request.survival.clear();
    double least = 1.0;
    for (; known < count && drafts->survival[known] >= 0.0f; ++known) {
      least = std::min(least, static_cast<double>(drafts->survival[known]));
      request.survival.push_back(least);
    }
    if (request.adaptive && count > 0 && known == count) {
      chain_offers_[i] = {request.survival.data(), count};
    } else {
      rows += decided ? allowed : count;
      most -= decided ? allowed : count;
      request.survival.clear();
    }
  }
  if (!cost_now_.known()) return;
  // Making them is paid for already.
  budget_.cut(chain_offers_, step_base(rows, static_cast<double>(step_.num_decodes), most));
  for (int i = 0; i < step_.num_decodes; ++i) {
    if (chain_offers_[i].length == 0) continue;
    RequestRecord& request = *flight.places[first + i].request;
    int& limit = request.weighed ? request.draft_limit : staged(staging_.max_drafts)[first + i];
    limit = chain_offers_[i].chosen;
  }
}

}  // namespace specdec
