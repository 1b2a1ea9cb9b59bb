// The immediate step: what the host does of a step that it runs itself. Slots lie in its memory, so
// drafts are looked up when the step is planned, and what was accepted is known when commit()
// returns; deliver() says it when it is its turn. Requests that need the host in steps on a device
// are drafted for and decided here, too.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/pages.h"
#include "engine/executor.h"

namespace specdec {
namespace {

// How far back the agreement behind a match is counted: beyond this, longer says nothing new.
constexpr int kMatchHorizon = 16;
// Does this step need scores of the request, or are the best tokens enough?
bool wants_scores(const RequestRecord& r, bool is_prefill, int num_output) {
  const RequestParams& p = r.params;
  return !p.sampling.greedy() || p.logprobs.has_value() || p.return_logits || p.needs_scores ||
         p.grammar || (p.prompt_logprobs && is_prefill) || r.processor.active(num_output);
}

}  // namespace

void Executor::enter_on_host(RequestRecord& request) {
  if (request.by_host) request.own_slot = make_host_slots(1, layout_.bytes);
  Slot* slot = request.by_host ? reinterpret_cast<Slot*>(request.own_slot.get())
                               : host_->slots.at(request.slot);
  write_slot(layout_, slot_request(request, /*take_prompt=*/true), slot);
  request.host_slot = slot;
  request.entered = true;
  if (host_) entered_.push_back({request.slot, request.id, 0, 0});
}

// Fills the request's offer with what lookups find: `most` drafts, none deeper than `room`.
void Executor::look_up(RequestRecord& request, int most, int room) {
  request.offer.clear();
  const SlotMethod method = request.host_slot->method;
  if (most <= 0 || room <= 0) return;
  if (request.predicts()) offer_prediction(request, std::min(most, room));
  if (!request.forced.empty()) offer_forced(request, std::min(most, room));
  if (method == SlotMethod::kNgram) offer_ngram(request, std::min(most, room));
  if (method == SlotMethod::kSuffix) offer_suffix(request, most, room);
  // Drafts of the method alone come in the order of their source, which fixed drafts keep.
  if (request.adaptive || request.knows_drafts()) request.offer.sort();
}

// A chain from the cursor in the text that the user predicts.
void Executor::offer_prediction(RequestRecord& request, int most) {
  const auto following = request.prediction->following();
  const auto match = static_cast<std::int16_t>(std::min(request.prediction->run(), kMatchHorizon));
  int node = DraftOffer::kGolden;
  for (int i = 0; i < std::min({most, request.known_drafts, static_cast<int>(following.size())});
       ++i) {
    const DraftOffer::Estimate estimate{match, static_cast<std::int16_t>(i + 1), 1.0f};
    node = request.offer.add(node, following[i], DraftSource::kPrediction, estimate,
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

// The tree that the slot drafts from its suffix index.
void Executor::offer_suffix(RequestRecord& request, int most, int room) {
  Slot* slot = request.host_slot;
  SuffixState* state = slot->suffix_state();
  DraftTree tree;
  suffix_draft(SerialTeam{}, state, slot->history(), slot->len, slot->suffix, most, room, &tree);
  int place[kMaxStepTokens] = {DraftOffer::kGolden};
  for (int i = 1; i < tree.size; ++i) {
    const SuffixNode& node = state->nodes[i - 1];
    const DraftOffer::Estimate estimate{static_cast<std::int16_t>(node.match), 1,
                                        static_cast<float>(node.share) / kSuffixOne};
    place[i] = request.offer.add(place[tree.parents[i]], tree.tokens[i], DraftSource::kSuffix,
                                 estimate, request.learnt(), request.shared_rates.get());
  }
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
  if (request.proposal) {
    place_proposal(request, share);
  } else if (request.weighed) {
    tree.reset(slot->history()[slot->len - 1]);
    request.offer.take(std::min(share.max_drafts, request.offer.num_drafts()), &tree);
  } else {
    slot_draft(SerialTeam{}, slot, share, &tree);
  }
}

// The tree behind the prompt's last token: the first `drafts` that came with the request.
void Executor::take_external(RequestRecord& request, int drafts) {
  Slot* slot = request.host_slot;
  slot->tree.reset(slot->history()[slot->len - 1]);
  request.step_proposal = nullptr;
  if (drafts == 0) return;
  request.step_proposal = std::move(request.external);
  Proposal& external = *request.step_proposal;
  for (int i = 1; i <= drafts; ++i) {
    slot->tree.add(external.tree.tokens[i], external.tree.parents[i]);
    external.source[i] = i - 1;
  }
}

// Keeps the proposed drafts that are worth their rows, where the drafter
// says how likely they are. The same budget as for chains, whose order is by likelihood, too.
void Executor::cut_proposed_drafts() {
  if (config_.method != DraftMethod::kProposed || !cost_now_.known()) return;
  const InFlightStep& flight = flights_.back();
  const int first = step_.num_prompts;
  int rows = step_.num_prompt_rows + step_.num_decodes;
  int most = config_.max_num_tokens - rows;
  chain_offers_.assign(step_.num_decodes, {});
  for (int i = 0; i < step_.num_decodes; ++i) {
    RequestRecord& request = *flight.places[first + i].request;
    const Slot* slot = request.host_slot;
    const int allowed = staged(staging_.max_drafts)[first + i];
    const ProposedDraft* drafts =
        slot->method == SlotMethod::kProposed ? request.host_slot->proposed_draft() : nullptr;
    const bool decided = request.proposal != nullptr || request.weighed;
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
  // Making them is paid for already.
  budget_.cut(chain_offers_, {cost_now_, rows, static_cast<double>(step_.num_decodes), most});
  for (int i = 0; i < step_.num_decodes; ++i) {
    if (chain_offers_[i].length > 0)
      staged(staging_.max_drafts)[first + i] = chain_offers_[i].chosen;
  }
}

// The trees of the step that was planned, unless they are there.
void Executor::draft_places() {
  if (host_->stage != HostSteps::Stage::kPlanned) return;
  cut_proposed_drafts();
  InFlightStep& flight = flights_.back();
  for (std::size_t b = 0; b < flight.places.size(); ++b) {
    draft_place(flight.places[b], static_cast<int>(b));
  }
  host_->stage = HostSteps::Stage::kDrafted;
}

void Executor::draft_place(Place& place, int index) {
  RequestRecord& request = *place.request;
  request.uncut.clear();
  if (place.is_prefill && place.decides) {
    take_external(request, place.drafts);
  } else if (!place.is_prefill) {
    DraftShare share;
    share.max_drafts = staged(staging_.max_drafts)[index];
    share.window_rows = staged(staging_.window_rows)[index];
    share.guesses = staged(staging_.guesses)[index];
    draft_on_host(request, share);
  }
  if (!request.params.grammar || !place.decides) return;
  request.uncut.resize(request.host_slot->tree.size);
  std::iota(request.uncut.begin(), request.uncut.end(), -1);
}

const StepPlan* Executor::build() {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(host_ != nullptr && host_->stage != HostSteps::Stage::kIdle,
                  "build() follows a plan() of steps that the host runs");
  StepPlan& plan = host_->plan;
  if (host_->stage == HostSteps::Stage::kBuilt) return &plan;  // its caller was interrupted
  plan.step = step_.index;
  plan.num_requests = plan.num_rows = plan.num_logit_rows = plan.num_prefill_rows = 0;
  plan.needs_logits = false;
  plan.cu_rows[0] = plan.cu_logits[0] = 0;
  draft_places();
  InFlightStep& flight = flights_.back();
  for (std::size_t b = 0; b < flight.places.size(); ++b) {
    build_place(flight.places[b], static_cast<int>(b));
  }
  ++plan.generation;
  host_->stage = HostSteps::Stage::kBuilt;
  return &plan;
}

// Fills the step's tree and its rows of the plan.
void Executor::build_place(Place& place, int index) {
  RequestRecord& request = *place.request;
  StepPlan& plan = host_->plan;
  Slot* slot = request.host_slot;
  const int b = plan.num_requests++, first = plan.num_rows;
  if (place.is_prefill) {
    const int all = place.rows + place.drafts;
    const std::int32_t* tokens = staged(staging_.prompt_tokens) + staged(staging_.cu_rows)[index];
    for (int i = 0; i < all; ++i) {
      plan.tokens[first + i] = tokens[i];
      plan.positions[first + i] = place.start + i;
      plan.parents[first + i] = i - 1;
    }
    plan.num_prefill_rows += place.rows;
    plan.kv_len[b] = place.start;
    plan.is_tree[b] = 0;
    plan.num_rows += all;
    for (int i = all - place.choices; i < all; ++i) {
      plan.logit_rows[plan.num_logit_rows++] = first + i;
    }
    plan.needs_logits |= place.choices > 0 && wants_scores(request, true, request.output_so_far());
  } else {
    const DraftTree& tree = slot->tree;
    place.choices = tree.size;
    const std::int32_t kv_len = slot->len - 1;
    std::int32_t depth[kMaxStepTokens];
    derive_depths(tree.parents, tree.size, depth);
    for (int i = 0; i < tree.size; ++i) {
      plan.tokens[first + i] = tree.tokens[i];
      plan.positions[first + i] = kv_len + depth[i];
      plan.parents[first + i] = tree.parents[i];
      plan.logit_rows[plan.num_logit_rows++] = first + i;
    }
    plan.kv_len[b] = kv_len;
    plan.num_rows += tree.size;
    plan.is_tree[b] = !is_chain(tree.parents, tree.size);
    if (plan.is_tree[b]) {
      derive_mask(tree.parents, tree.size,
                  plan.mask.data() + static_cast<std::ptrdiff_t>(first) * kMaskWords);
    }
    plan.needs_logits |= wants_scores(request, false, request.output_so_far());
  }
  plan.cu_rows[b + 1] = plan.num_rows;
  plan.cu_logits[b + 1] = plan.num_logit_rows;
  plan.slot[b] = request.slot;
  plan.request_ids[b] = request.id;
  const auto& pages = book_.pages().pages(request.slot);
  std::copy(pages.begin(), pages.end(),
            plan.page_table.begin() + static_cast<std::ptrdiff_t>(b) * plan.page_table_stride);
}

void Executor::commit(const StepPlan& plan, const TokenId* ids, const float* scores,
                      std::int64_t row_stride, const ScoreChanges& changes,
                      const HiddenRows& hidden, const StepDraftProbs& drawn) {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(
      host_ != nullptr && &plan == &host_->plan && host_->stage == HostSteps::Stage::kBuilt,
      "this plan is not the outstanding one: commit() or fail() takes each plan() once");
  SPECDEC_REQUIRE(!plan.needs_logits || scores != nullptr,
                  "this plan needs scores (plan.needs_logits): a request has processors or wants "
                  "logprobs; give float32 scores [num_logit_rows, vocab_size]");
  for (int i = 0; scores == nullptr && i < plan.num_logit_rows; ++i) {
    SPECDEC_REQUIRE(ids[i] < config_.vocab_size, "ids[", i, "] = ", ids[i], ": token ids are 0..",
                    config_.vocab_size - 1);
  }
  check_masks(changes.words);
  InFlightStep& flight = flights_.back();
  bool moves = false;
  for (std::size_t b = 0; b < flight.places.size(); ++b) {
    host_->path_len[b] = 0;
    commit_place(flight.places[b], static_cast<int>(b), ids, scores, row_stride, changes, drawn);
    moves |= host_->path_len[b] > 0;
  }
  if (moves) move_kv();
  if (hidden.rows != nullptr) keep_hidden(hidden);
  host_->stage = HostSteps::Stage::kIdle;
}

// What failed or has ended keeps nothing.
void Executor::keep_hidden(const HiddenRows& hidden) const {
  for (const Place& place : flights_.back().places) {
    const RequestRecord& request = *place.request;
    if (request.ended || request.host_slot->frozen() || place.out.last_logit_row < 0) continue;
    std::memcpy(hidden.kept + request.slot * hidden.row_bytes,
                hidden.rows + place.out.last_logit_row * hidden.stride,
                static_cast<std::size_t>(hidden.row_bytes));
  }
}

std::vector<StepOutput> Executor::fail_planned(const StepPlan& plan, const std::string& message) {
  std::int64_t index = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    SPECDEC_REQUIRE(
        host_ != nullptr && &plan == &host_->plan && host_->stage == HostSteps::Stage::kBuilt,
        "this plan is not the outstanding one: commit() or fail() takes each plan() once");
    index = step_.index;
  }
  return fail(index, message);
}

void Executor::commit_place(Place& place, int index, const TokenId* ids, const float* scores,
                            std::int64_t row_stride, const ScoreChanges& changes,
                            const StepDraftProbs& drawn) {
  RequestRecord& request = *place.request;
  if (request.ended) return;
  HostSteps& host = *host_;
  PlaceRows rows;
  rows.first = host.plan.cu_logits[index];
  const int end = host.plan.cu_logits[index + 1];
  rows.sampled = host.sampled.data() + rows.first;
  if (scores == nullptr) {
    std::copy(ids + rows.first, ids + end, rows.sampled);
  } else {
    rows.stride = row_stride;
    rows.scores = scores + rows.first * rows.stride;
    rows.raw_stride = changes.raw == nullptr ? row_stride : changes.raw_stride;
    rows.raw = (changes.raw == nullptr ? scores : changes.raw) + rows.first * rows.raw_stride;
  }
  decide_place(place, request.shares.back(), rows, changes.words, &drawn, index - step_.num_prompts,
               host.results.data() +
                   static_cast<std::ptrdiff_t>(flights_.back().ring) * config_.max_batch_size +
                   index,
               host.path.data() + static_cast<std::ptrdiff_t>(index) * kMaxStepTokens,
               &host.path_len[index]);
}

// Brings the K/V of accepted drafts to its final place.
void Executor::move_kv() {
  CompactKvParams moved;
  moved.step = host_->plan.view();
  moved.cache = host_->cache;
  moved.path = host_->path.data();
  moved.path_len = host_->path_len.data();
  host_->backend.compact_kv(moved);
}

}  // namespace specdec
