// The immediate step: what the host does of a step that it runs itself. Slots lie in its memory, so
// drafts are looked up when the step is planned, and what was accepted is known when commit()
// returns; deliver() says it when it is its turn. Requests that need the host in steps on a device
// are drafted for and decided here, too.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "base/pages.h"
#include "engine/executor.h"

namespace specdec {
namespace {

// Does this step need scores of the request, or are the best tokens enough?
bool wants_scores(const RequestRecord& r, bool is_prefill, int num_output) {
  const RequestParams& p = r.params;
  return !p.sampling.greedy() || p.logprobs.has_value() || p.return_logits || p.processes_scores ||
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
  if (request.suffix_drafts() > 0) {
    const auto bytes = static_cast<std::int64_t>(suffix_bytes_required(request.max_len));
    request.suffix_memory = make_host_slots(1, bytes);
    suffix_init(SerialTeam{}, request.suffix_state(), request.max_len);
  }
  if (host_) entered_.push_back({request.slot, request.id, 0, 0});
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
  plan.num_requests = plan.num_rows = plan.num_logit_rows = 0;
  plan.num_prompts = plan.num_prefill_rows = 0;
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
    ++plan.num_prompts;
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
    if (request.adaptive && request.weighed && !request.own_tree && !request.step_proposal) {
      totals_.expected_accepted_tokens += request.offer.expected(tree.num_drafts());
    }
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
  fill_page_row(pages,
                plan.page_table.data() + static_cast<std::ptrdiff_t>(b) * plan.page_table_stride);
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
  for (int i = 0; ids != nullptr && i < plan.num_logit_rows; ++i) {
    SPECDEC_REQUIRE(ids[i] < config_.vocab_size, "ids[", i, "] = ", ids[i], ": token ids are 0..",
                    config_.vocab_size - 1);
  }
  for (int i = 0; config_.with_suffix && i < step_.num_decodes; ++i) {
    SPECDEC_REQUIRE(!drawn.drawn(i),
                    "draft_probs: drafts that were drawn cannot stand beside those of suffix "
                    "decoding; draft the likeliest tokens (use_draft_logits=False)");
  }
  check_masks(changes.words);
  InFlightStep& flight = flights_.back();
  bool moves = false;
  host_->plan.kv_moves.clear();
  host_->plan.page_orders.clear();
  if (scores != nullptr) draw_roots(scores, row_stride);
  for (std::size_t b = 0; b < flight.places.size(); ++b) {
    host_->path_len[b] = 0;
    commit_place(flight.places[b], static_cast<int>(b), ids, scores, row_stride, changes, drawn);
    moves |= host_->path_len[b] > 0;
  }
  if (moves) move_kv();
  if (hidden.rows != nullptr) keep_hidden(hidden);
  host_->stage = HostSteps::Stage::kIdle;
}

// Draws the first token of each request that needs no more than its row of scores for that: the one
// part of a commit that takes long, and that no request's state changes.
void Executor::draw_roots(const float* scores, std::int64_t row_stride) {
  root_draws_.clear();
  std::vector<Place>& places = flights_.back().places;
  for (std::size_t b = 0; b < places.size(); ++b) {
    Place& place = places[b];
    const RequestRecord& request = *place.request;
    place.root_draw = -1;
    if (request.ended || !place.decides) continue;
    const Slot* slot = request.host_slot;
    if (!acceptor_.draws_root(request.params, request.processor, request.output_so_far(),
                              slot->tree.size)) {
      continue;
    }
    place.root_draw = static_cast<int>(root_draws_.size());
    const int root = host_->plan.cu_logits[b] + place.choices - slot->tree.size;
    root_draws_.push_back({scores + root * row_stride, request.params.sampling,
                           token_uniform(request.params.seed, slot->len)});
  }
  if (root_draws_.size() > 1) acceptor_.draw_roots(root_draws_);
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
  if (ids != nullptr) rows.best = ids + rows.first;
  if (scores == nullptr) {
    std::copy(ids + rows.first, ids + end, rows.sampled);
  } else {
    if (changes.raw != nullptr) rows.best = nullptr;  // of other scores
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

  StepPlan& plan = host_->plan;
  const std::int32_t page_size = host_->cache.page_size;
  for (int b = 0; b < plan.num_requests; ++b) {
    const std::int32_t* pages =
        plan.page_table.data() + static_cast<std::ptrdiff_t>(b) * plan.page_table_stride;
    const auto place = [&](std::int32_t at) {
      return pages[at / page_size] * page_size + at % page_size;
    };
    const std::int32_t* path = moved.path + static_cast<std::ptrdiff_t>(b) * kMaxStepTokens;
    for (int i = 0; i < moved.path_len[b]; ++i) {
      if (path[i] == i + 1) continue;
      plan.kv_moves.push_back(place(plan.kv_len[b] + path[i]));
      plan.kv_moves.push_back(place(plan.kv_len[b] + 1 + i));
    }
  }
}

}  // namespace specdec
