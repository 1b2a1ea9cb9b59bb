// plan(): a step is staged from what the host knows, without the results of the steps in flight.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "engine/executor.h"

namespace specdec {
namespace {

// A prompt goes on by so many rows in each step, however long others wait for them.
constexpr int kLeastPrefillRows = 16;

}  // namespace

// max_utilization: pages for who runs, and the copies of pages that this takes.
void Executor::make_room() {
  SPECDEC_REQUIRE(host_ == nullptr || config_.num_host_pages == 0 || !page_pools_.empty(),
                  "plan() with num_host_pages = ", config_.num_host_pages,
                  " needs bind_host_pages() first");
  // Whoever computes K/V again has drafters that begin anew: what they know of pages is gone.
  for (const RequestRecord* request : book_.make_room(step_cost_)) {
    entered_.push_back({request->slot, request->id, 0, 0});
  }
  follow_orders();
}

// Opens the next step: its place in the rings, nobody in it.
void Executor::begin_step() {
  int ring = static_cast<int>(next_step_ % ring_size());
  if (fault(Fault::kStagingReused)) {
    ring = static_cast<int>(next_step_ % std::max(config_.overlap_depth, 1));
  }
  place_ = rings_.staging + static_cast<std::ptrdiff_t>(ring) * staging_.words;
  step_.entries = std::exchange(entered_, {});
  step_.page_orders = std::exchange(orders_, {});
  step_.host_choices.clear();
  step_.host_trees.clear();
  step_.kept_rows.clear();
  step_.index = next_step_;
  step_.ring = ring;
  step_.num_prompts = step_.num_decodes = step_.num_prompt_rows = step_.num_prompt_logits = 0;
  step_.max_decode_rows = step_.max_rows = step_.max_kv_len = step_.most_asked = 0;
  step_.needs_scores = step_.moves = false;
  step_.second_worth = 0.0;
  flights_.push_back({next_step_, ring, false, {}, {}});
  for (const PageOrder& copy : step_.page_orders) flights_.back().copied.push_back(copy.request);
  staged(staging_.cu_rows)[0] = staged(staging_.cu_logits)[0] = 0;
}

const StagedStep* Executor::plan() {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(rings_.staging != nullptr, "plan() needs bind_rings() or run_on_host() first");
  SPECDEC_REQUIRE(host_ == nullptr || host_->stage == HostSteps::Stage::kIdle,
                  "plan() was called while a plan is outstanding: commit() or fail() it first");
  SPECDEC_REQUIRE(static_cast<int>(flights_.size()) <= config_.overlap_depth, "plan() with ",
                  flights_.size(), " steps unread: at overlap_depth = ", config_.overlap_depth,
                  " deliver() comes first");
  if (book_.preempts()) make_room();
  while (RequestRecord* request = book_.admit_next()) {
    weigh_beginning(*request);
    if (host_ || request->by_host) enter_on_host(*request);
  }
  if (book_.preempts()) book_.make_room_for_drafts();
  begin_step();
  collect();
  double tokens = 0.0;  // that rows of decoding requests see, as far as it is known
  const AttentionSpan& span = config_.attention;
  const double most = span.window > 0 ? static_cast<double>(span.window + span.sink_tokens) : 1e18;
  for (const RequestRecord* request : decoding_) tokens += std::min(request->known_len - 1.0, most);
  const int decoding = static_cast<int>(decoding_.size());
  step_cost_.at(decoding, tokens / std::max(decoding, 1), &cost_now_);
  int budget = config_.max_num_tokens - decoding;
  PrefillRoom room = prefill_room(decoding);
  // Prompts come first: they decide when somebody sees the first token.
  const auto& running = book_.running();
  const auto readers = std::count_if(running.begin(), running.end(),
                                     [](const auto& r) { return r->in_prefill() && !r->sits_out; });
  prompts_ = {.readers = static_cast<int>(readers), .decoding = std::max(decoding, 1)};
  for (std::size_t i = 0; i < running.size(); ++i) {
    RequestRecord& request = *running[i];
    if (!request.in_prefill() || request.sits_out) continue;
    if (request.untouched()) book_.attach_prefix(request);
    if (book_.better_wait(i)) continue;
    int most = room_for(request, room, budget);
    // Drafts behind a prompt go with its last token, whatever that takes.
    const int left = request.read_to - request.prefilled;
    if (left <= most) most = std::min(budget, std::max(most, left + request.external_drafts()));
    if (request.chunk() > 0) most = std::min(most, request.chunk());
    const int rows = prefill_rows(request, most);
    if (rows == 0) {
      // It is read as a whole, or not at all: those behind it would take its rows for ever.
      if (!config_.enable_chunked_prefill) break;
      continue;
    }
    if (!request.entered && !enter(request)) break;
    if (request.device_drafts && request.mirrored == 0 && !mirror(request)) break;
    const int before = step_.num_prompt_rows, start = request.prefilled;
    place_prompt(request, rows);
    const int placed = step_.num_prompt_rows - before;
    budget -= placed;
    room.seconds -= step_cost_.known() ? step_cost_.prefill(room.rows, placed, start) : 0.0;
    room.rows += placed;
  }
  prompts_.rows = step_.num_prompt_rows;
  host_drafts_each_ = choosing_.empty() ? 0 : host_rows_left_ / static_cast<int>(choosing_.size());
  const int longest = max_drafts_of(config_);
  const int scheduled =
      draft_len_limit_for(config_.draft_len_schedule, static_cast<int>(running.size()), longest);
  weigh_lookups(budget, scheduled);
  choose_arms(budget, scheduled);
  for (std::size_t i = 0; i < decoding_.size(); ++i) {
    const int most = std::min(budget, most_drafts_of(*decoding_[i], scheduled));
    place_decode(*decoding_[i], most, arms_chosen_[i]);
    budget -= decoding_[i]->shares.back().rows - 1;
  }
  const int requests = step_.num_prompts + step_.num_decodes;
  // Drafts of fixed length are made whatever they cost.
  const bool adaptive = std::any_of(decoding_.begin(), decoding_.end(),
                                    [](const RequestRecord* r) { return r->adaptive; });
  if (cost_now_.known() && adaptive) {
    step_.second_worth = specdec::second_worth(
        step_base(prompts_.rows + decoding, static_cast<double>(step_.num_decodes), 0));
  }
  if (requests == 0) {
    entered_ = std::exchange(step_.entries, {});
    orders_ = std::exchange(step_.page_orders, {});
    flights_.pop_back();
    return nullptr;
  }
  if (host_) {
    // Pages that rows of this step took from published texts have lost what they held.
    follow_orders();
    auto& due = host_->plan.page_orders;
    due.insert(due.end(), followed_.begin(), followed_.end());
    followed_.clear();
  }
  for (const int ids : {staging_.slot_ids, staging_.commit_ids}) {
    std::fill(staged(ids) + requests, staged(ids) + staging_.requests, -1);
  }
  int* logit_rows = staged(staging_.logit_rows) + step_.num_prompt_logits;
  for (int i = 0; i < step_.max_decode_rows; ++i) logit_rows[i] = step_.num_prompt_rows + i;
  const auto& places = flights_.back().places;
  step_.needs_scores = !step_.host_choices.empty() || !step_.host_trees.empty() ||
                       std::any_of(places.begin(), places.end(), [](const Place& place) {
                         return place.decides && !place.request->params.sampling.greedy();
                       });
  for (int b = 0; step_.needs_scores && b < staging_.requests; ++b) {
    // What the host chooses is drawn greedily, too, and nobody reads it.
    const bool by_device = b < requests && !places[b].request->by_host;
    stage_law(place_, by_device ? places[b].request : nullptr, b);
  }
  staged(staging_.move_cu_rows)[0] = 0;
  for (int b = 0; b < requests; ++b) {
    const std::uint64_t seed = places[b].request->params.seed;
    std::memcpy(staged(staging_.seed) + 2 * b, &seed, sizeof(seed));
    place_moves(*places[b].request, b);
  }
  ++next_step_;
  totals_.shortened_steps += decoding > 0 && scheduled < longest;
  totals_.unspeculated_steps += decoding > 0 && scheduled < longest && scheduled == 0;
  if (host_) host_->stage = HostSteps::Stage::kPlanned;
  book_.check_integrity();
  return &step_;
}

// Who decodes in this step: those that need the host, if nothing of theirs is in flight and first
// those that have waited for longest, then those that run ahead.
void Executor::collect() {
  decoding_.clear();
  choosing_.clear();
  int external = 0;  // rows of scores that a prompt with drafts behind it needs at once
  const auto decoders = static_cast<int>(
      std::count_if(book_.running().begin(), book_.running().end(),
                    [](const auto& r) { return !r->in_prefill() && !r->sits_out; }));
  const int budget = config_.max_num_tokens - decoders;
  const PrefillRoom room = prefill_room(decoders);
  for (const auto& request : book_.running()) {
    const int drafts = request->external_drafts(), left = request->read_to - request->prefilled;
    // It needs them with its last row, which this step may or may not come to.
    const bool ends = left + drafts <= budget && left <= room_for(*request, room, budget) &&
                      (request->chunk() == 0 || left <= request->chunk());
    if (drafts > 0 && left > 0 && ends && request->by_host && !request->sits_out) {
      external = std::max(external, 1 + drafts);
    }
    const bool waits = request->by_host && !request->shares.empty();
    if (request->in_prefill() || request->sits_out || request->surely_complete() || waits) continue;
    (request->by_host ? choosing_ : decoding_).push_back(request.get());
  }
  std::stable_sort(
      choosing_.begin(), choosing_.end(),
      [](const RequestRecord* a, const RequestRecord* b) { return a->last_step < b->last_step; });
  const auto most = static_cast<std::size_t>(max_host_rows() - external);
  if (choosing_.size() > most) choosing_.resize(most);
  // Trees that the host has made are placed like prompts, in front of those of the device.
  std::stable_partition(choosing_.begin(), choosing_.end(),
                        [](const RequestRecord* r) { return !r->device_drafts; });
  for (RequestRecord* request : choosing_) {
    const bool room = !request->device_drafts || mirror(*request);
    SPECDEC_ENSURE(room, "no room for the slot of request ", request->id);
  }
  decoding_.insert(decoding_.begin(), choosing_.begin(), choosing_.end());
  host_rows_left_ = max_host_rows() - static_cast<int>(choosing_.size());
}

// How long prompts may hold up a step beside `decoding` requests, which wait for their rows with
// every token.
Executor::PrefillRoom Executor::prefill_room(int decoding) const {
  const double slowdown = config_.max_prefill_slowdown;
  const bool limited = slowdown > 0.0 && config_.enable_chunked_prefill;
  if (!limited || decoding == 0 || !cost_now_.known()) return {false, 0.0, decoding, decoding};
  return {true, (slowdown - 1.0) * cost_now_(decoding), decoding, decoding};
}

// Rows of `request`'s prompt that fit into `room`, of `budget`: the prompts of a step go on by
// kLeastPrefillRows rows, whatever they take.
int Executor::room_for(const RequestRecord& request, const PrefillRoom& room, int budget) const {
  if (!room.limited) return budget;
  const int least = std::max(0, kLeastPrefillRows - (room.rows - room.decoding));
  int fits = std::min(least, budget), beyond = budget + 1;
  while (beyond - fits > 1) {
    const int rows = fits + (beyond - fits) / 2;
    const double seconds = step_cost_.prefill(room.rows, rows, request.prefilled);
    (seconds <= room.seconds ? fits : beyond) = rows;
  }
  return fits;
}

// Prompt rows of this step. A prompt's last token and the drafts that came with the request go
// together.
int Executor::prefill_rows(const RequestRecord& request, int budget) const {
  const int left = request.read_to - request.prefilled;
  const int drafts = request.external_drafts();
  if (request.begun()) return std::min(left, budget);  // it decides nothing
  const bool every_score = request.params.prompt_logprobs.has_value();
  bool all = left + drafts <= budget;
  int rows = std::min(left, budget);
  if (request.by_host) {
    all = all && (every_score ? left : 1) + drafts <= host_rows_left_;
    if (every_score) rows = std::min(rows, host_rows_left_);
  }
  if (!config_.enable_chunked_prefill) return all ? left : 0;
  return all ? left : std::min(rows, left - 1);
}

void Executor::place_prompt(RequestRecord& request, int rows) {
  const int start = request.prefilled;
  request.prefilled = start + rows;
  const bool last = !request.in_prefill() && !request.begun();
  const DraftTree* drafts = nullptr;
  if (last && request.by_host) {
    take_external(request, request.external_drafts());
    drafts = &request.host_slot->tree;
  } else if (last && request.external) {
    drafts = &request.external->tree;
  }
  place_rows(request, start, rows, drafts, last);
  if (request.by_host) host_rows_left_ -= flights_.back().places.back().choices;
  if (last && request.host_slot == nullptr && !book_.keeps_text()) request.text = {};
}

// Rows of known tokens, from position `start` on, and the drafts of a tree (null: none) behind the
// last of them, its root.
void Executor::place_rows(RequestRecord& request, int start, int rows, const DraftTree* tree,
                          bool decides) {
  const std::int64_t shared = book_.pages().shared_tokens(request.slot);
  SPECDEC_ENSURE(start >= shared, "request ", request.id, " would write at ", start, ", its first ",
                 shared, " tokens are published");
  const int drafts = tree == nullptr ? 0 : tree->num_drafts();
  const int all = rows + drafts;
  const int b = step_.num_prompts++;
  const TokenId* text = request.tokens();
  request.shares.push_back({step_.index, start + all, all, decides ? 1 + drafts : 0, -1});
  request.last_step = step_.index;
  const bool is_prefill = start < request.read_to;
  // The row of the last token and of the drafts behind it; for logprobs of the prompt all.
  int from = decides ? rows - 1 : all;
  if (is_prefill && request.params.prompt_logprobs && !request.begun()) {
    from = std::clamp(request.scored_to - start, 0, from);
    request.scored_to = std::max(request.scored_to, start + rows);
  }
  const int choices = all - from;
  flights_.back().places.push_back(
      {&request, is_prefill, decides, start, rows, drafts, -1, choices, {}});
  const int device_slot = request.by_host && !request.device_drafts ? -1 : request.slot;
  staged(staging_.slot_ids)[b] = device_slot;
  staged(staging_.commit_ids)[b] = request.by_host ? -1 : request.slot;
  staged(staging_.max_drafts)[b] = 0;
  staged(staging_.kv_len)[b] = start;
  const int first = step_.num_prompt_rows;
  for (int i = 0; i < all; ++i) {
    const int draft = i - rows + 1;
    staged(staging_.prompt_tokens)[first + i] = draft < 1 ? text[start + i] : tree->tokens[draft];
    staged(staging_.prompt_parents)[first + i] =
        draft < 1 ? i - 1 : tree->parents[draft] + rows - 1;
  }
  step_.num_prompt_rows += all;
  if (choices > 0 && request.by_host) {
    step_.host_choices.push_back({step_.num_prompt_logits, choices, decides ? device_slot : -1});
  }
  for (int i = from; i < all; ++i) {
    const int parent = staged(staging_.prompt_parents)[first + i] - from;
    staged(staging_.choice_parents)[step_.num_prompt_logits] = std::max(parent, -1);
    staged(staging_.logit_rows)[step_.num_prompt_logits++] = first + i;
  }
  staged(staging_.cu_rows)[b + 1] = step_.num_prompt_rows;
  staged(staging_.cu_logits)[b + 1] = step_.num_prompt_logits;
  step_.max_rows = std::max(step_.max_rows, all);
  stage_pages(request, b, start, start + all);
}

// `most_drafts`: rows left for drafts.
void Executor::place_decode(RequestRecord& request, int most_drafts, int arm) {
  DraftShare share = share_of(request, most_drafts, arm);
  int drafts = std::max(0, share.max_drafts);
  // What is proposed from here on is for the step behind this one, whose depth is staged now.
  request.takes_proposal = request.proposal != nullptr;
  const bool any_path = request.proposal || request.weighed;
  int path = any_path ? drafts : std::min(request.max_path, drafts);
  // The token after the last draft takes the last place. The device knows how long the history is
  // and leaves out what has no place; the host knows how long it is at least.
  path = std::max(0, std::min(path, request.room()));
  if (request.chain && !request.proposal) drafts = path;
  request.draft_limit = std::min(request.draft_limit, drafts);
  if (request.by_host && !request.device_drafts) {
    share.max_drafts = drafts;
    draft_on_host(request, share);
    place_rows(request, request.known_len - 1, 1, &request.host_slot->tree, true);
    request.shares.back().arm = arm;
    return;
  }
  const int b = step_.num_prompts + step_.num_decodes++;
  const int rows = 1 + drafts;
  request.shares.push_back({step_.index, 0, rows, path + 1, arm});
  request.last_step = step_.index;
  const int tree = request.by_host ? static_cast<int>(step_.host_trees.size()) : -1;
  flights_.back().places.push_back({&request, false, true, 0, 0, 0, tree, rows, {}});
  if (tree >= 0) step_.host_trees.push_back({b - step_.num_prompts, rows, request.slot});
  staged(staging_.slot_ids)[b] = request.slot;
  staged(staging_.commit_ids)[b] = request.by_host ? -1 : request.slot;
  // What the host has found itself is no drafter's.
  const int asked = request.weighed && request.host_slot != nullptr ? request.asked : drafts;
  staged(staging_.max_drafts)[b] = asked;
  step_.most_asked = std::max(step_.most_asked, asked);
  staged(staging_.window_rows)[b] = share.window_rows;
  staged(staging_.guesses)[b] = share.guesses;
  step_.max_decode_rows += rows;
  step_.max_rows = std::max(step_.max_rows, rows);
  stage_pages(request, b, request.known_len - 1, request.tokens_to_hold());
}

}  // namespace specdec
