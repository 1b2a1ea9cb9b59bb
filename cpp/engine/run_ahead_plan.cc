// plan(): a step is staged from what the host knows, without the results of the steps in flight.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "engine/run_ahead.h"
#include "engine/run_ahead_request.h"

namespace specdec {

const RunAheadStep* RunAheadExecutor::plan() {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(rings_.staging != nullptr, "plan() needs bind_rings() first");
  SPECDEC_REQUIRE(static_cast<int>(flights_.size()) <= config_.depth, "plan() with ",
                  flights_.size(), " steps unread: at run_ahead = ", config_.depth, " deliver() ",
                  "comes first");
  admit();
  int ring = static_cast<int>(next_step_ % ring_size());
  if (fault(Fault::kStagingReused))
    ring = static_cast<int>(next_step_ % std::max(config_.depth, 1));
  place_ = rings_.staging + static_cast<std::ptrdiff_t>(ring) * staging_.words;
  step_.entries.clear();
  step_.index = next_step_;
  step_.ring = ring;
  step_.num_prompts = step_.num_decodes = step_.num_prompt_rows = step_.num_prompt_logits = 0;
  planned_drafts_ = 0.0;
  step_.max_decode_rows = step_.max_rows = step_.max_kv_len = 0;
  step_.needs_scores = false;
  step_.host_choices.clear();
  flights_.push_back({next_step_, ring, false, {}});

  collect();
  double tokens = 0.0;  // in the cache, of decoding requests, as far as it is known
  for (const auto* list : {&decoding_, &choosing_}) {
    for (const Request* request : *list) tokens += request->known_len - 1;
  }
  const int decoding = static_cast<int>(decoding_.size() + choosing_.size());
  step_cost_.at(decoding, tokens / std::max(decoding, 1), &cost_now_);
  int budget = config_.max_num_tokens - decoding;
  // Prompts come first: they decide when somebody sees the first token.
  staged(staging_.cu_rows)[0] = staged(staging_.cu_logits)[0] = 0;
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Request& request = *running_[i];
    if (!request.in_prefill()) continue;
    if (request.untouched()) attach_prefix(request);
    if (better_wait(request, i)) continue;
    const int rows = prefill_rows(request, budget);
    if (rows == 0) continue;
    if (!request.entered && !stage_entry(request)) break;
    place_prompt(request, rows);
    budget -= rows;
  }
  for (Request* request : choosing_) place_rows(*request, request->known_len - 1, 1, true);
  const int most = max_rows_per_request() - 1;
  const int scheduled =
      draft_len_limit_for(config_.draft_len_schedule, static_cast<int>(running_.size()), most);
  choose_chain_limits(budget, scheduled);
  for (Request* request : decoding_) {
    place_decode(*request, std::min(budget, scheduled));
    budget -= request->parts.back().rows - 1;
  }
  const int requests = step_.num_prompts + step_.num_decodes;
  if (requests == 0) {
    flights_.pop_back();
    return nullptr;
  }
  std::fill(staged(staging_.slot_ids) + requests, staged(staging_.slot_ids) + staging_.requests,
            -1);
  int* logit_rows = staged(staging_.logit_rows) + step_.num_prompt_logits;
  for (int i = 0; i < step_.max_decode_rows; ++i) logit_rows[i] = step_.num_prompt_rows + i;
  const auto& places = flights_.back().places;
  step_.needs_scores = std::any_of(places.begin(), places.end(), [](const Flight::Place& place) {
    return place.decides && (place.request->host || !place.request->law.greedy());
  });
  for (int b = 0; step_.needs_scores && b < staging_.requests; ++b) {
    // What the host chooses is drawn greedily, too, and nobody reads it.
    const bool by_device = b < requests && !places[b].request->host;
    stage_law(place_, by_device ? places[b].request : nullptr, b);
  }
  for (int b = 0; b < requests; ++b) {
    const std::uint64_t seed = places[b].request->slot_request.seed;
    std::memcpy(staged(staging_.seed) + 2 * b, &seed, sizeof(seed));
  }
  ++next_step_;
  totals_.executor.shortened_steps += step_.num_decodes > 0 && scheduled < most;
  totals_.executor.unspeculated_steps +=
      step_.num_decodes > 0 && scheduled < most && scheduled == 0;
  if (config_.check_integrity) pages_.check_integrity();
  return &step_;
}

// Who decodes in this step: what runs ahead, and choices of the host's, those first that have
// waited for longest.
void RunAheadExecutor::collect() {
  decoding_.clear();
  choosing_.clear();
  for (const auto& request : running_) {
    if (request->in_prefill() || request->surely_complete()) continue;
    if (!request->host) {
      decoding_.push_back(request.get());
    } else if (request->parts.empty()) {
      choosing_.push_back(request.get());
    }
  }
  std::stable_sort(choosing_.begin(), choosing_.end(),
                   [](const Request* a, const Request* b) { return a->last_step < b->last_step; });
  const auto most = static_cast<std::size_t>(max_host_rows());
  if (choosing_.size() > most) choosing_.resize(most);
}

int RunAheadExecutor::prefill_rows(const Request& request, int budget) const {
  int left = request.prompt_len - request.prefilled;
  const auto choices = step_.host_choices.size() + choosing_.size();
  if (request.host && choices >= static_cast<std::size_t>(max_host_rows())) {
    if (!config_.enable_chunked_prefill) return 0;
    --left;  // its last row has to wait
  }
  if (!config_.enable_chunked_prefill) return left <= budget ? left : 0;
  return std::min(left, budget);
}

// False: no room in this step's place of the ring.
bool RunAheadExecutor::stage_entry(Request& request) {
  const std::int64_t bytes = written_slot_bytes(request.slot_request);
  const std::int64_t offset =
      step_.entries.empty()
          ? 0
          : (step_.entries.back().offset + step_.entries.back().bytes + 15) / 16 * 16;
  if (offset + bytes > entry_bytes_) return false;
  block_.resize(static_cast<std::size_t>(bytes / 8 + 1));
  write_slot(layout_, request.slot_request, block_.data());
  std::memcpy(rings_.entries + step_.ring * entry_bytes_ + offset, block_.data(),
              static_cast<std::size_t>(bytes));
  request.entered = true;
  if (fault(Fault::kEntryLost) && request.id > config_.max_batch_size) return true;
  step_.entries.push_back({request.slot, request.id, offset, bytes});
  return true;
}

// The law and the rule of the step's request `index`; null: greedy, for padding.
void RunAheadExecutor::stage_law(std::int32_t* place, const Request* request, int index) const {
  const SamplingLaw law = request == nullptr ? SamplingLaw{} : request->law;
  const AcceptanceParams rule = request == nullptr ? AcceptanceParams{} : request->acceptance;
  const auto put = [&](int offset, auto value) {
    std::memcpy(reinterpret_cast<std::byte*>(place + offset) + index * sizeof(value), &value,
                sizeof(value));
  };
  put(staging_.temperature, law.temperature);
  put(staging_.top_p, law.top_p);
  put(staging_.min_p, law.min_p);
  put(staging_.top_k, law.top_k);
  put(staging_.acceptance, static_cast<std::uint8_t>(rule.rule));
  put(staging_.posterior_threshold, rule.posterior_threshold);
  put(staging_.posterior_alpha, rule.posterior_alpha);
  put(staging_.acceptance_threshold, rule.threshold);
}

// The pages of the step's request `index`, after reserving what it may touch.
void RunAheadExecutor::stage_pages(const Request& request, int index) {
  const std::int64_t tokens = request.tokens_to_hold();
  const bool reserved = pages_.reserve(request.slot, tokens);
  SPECDEC_ENSURE(reserved, "request ", request.id, " was promised pages for ", tokens,
                 " tokens and did not get them");
  const auto& pages = pages_.pages(request.slot);
  std::int32_t* row =
      staged(staging_.page_table) + static_cast<std::ptrdiff_t>(index) * staging_.pages_per_request;
  std::copy(pages.begin(), pages.end(), row);
  // What the row's last use left behind must not look like a page.
  int& used = staged_pages_[static_cast<std::size_t>(step_.ring) * staging_.requests + index];
  if (used > static_cast<int>(pages.size())) std::fill(row + pages.size(), row + used, -1);
  used = static_cast<int>(pages.size());
  step_.max_kv_len = std::max(step_.max_kv_len, static_cast<int>(tokens));
}

void RunAheadExecutor::place_prompt(Request& request, int rows) {
  const int start = request.prefilled;
  request.prefilled = start + rows;
  const bool last = !request.in_prefill();
  place_rows(request, start, rows, last);
  if (last) request.slot_request.prompt = {};
}

// Rows of known tokens, from position `start` on.
void RunAheadExecutor::place_rows(Request& request, int start, int rows, bool last) {
  SPECDEC_ENSURE(start >= pages_.shared_tokens(request.slot), "request ", request.id,
                 " would write at ", start, ", its first ", pages_.shared_tokens(request.slot),
                 " tokens are published");
  const int end = start + rows;
  const int b = step_.num_prompts++;
  const std::vector<TokenId>& text =
      request.text.empty() ? request.slot_request.prompt : request.text;
  request.parts.push_back({step_.index, end, rows, last ? 1 : 0, -1});
  request.last_step = step_.index;
  flights_.back().places.push_back({&request, start < request.prompt_len, last, rows});
  staged(staging_.slot_ids)[b] = request.host ? -1 : request.slot;
  staged(staging_.max_drafts)[b] = 0;
  staged(staging_.kv_len)[b] = start;
  const int first = step_.num_prompt_rows;
  for (int i = 0; i < rows; ++i) {
    staged(staging_.prompt_tokens)[first + i] = text[start + i];
    staged(staging_.prompt_parents)[first + i] = i - 1;
  }
  step_.num_prompt_rows += rows;
  if (last) {
    if (request.host) step_.host_choices.push_back(step_.num_prompt_logits);
    staged(staging_.logit_rows)[step_.num_prompt_logits++] = first + rows - 1;
  }
  staged(staging_.cu_rows)[b + 1] = step_.num_prompt_rows;
  staged(staging_.cu_logits)[b + 1] = step_.num_prompt_logits;
  step_.max_rows = std::max(step_.max_rows, rows);
  stage_pages(request, b);
}

// Of each adaptive request that drafts chains: how long its chain may be in this step.
// `most_drafts`: rows left for drafts; `each`: of one request.
void RunAheadExecutor::choose_chain_limits(int most_drafts, int each) {
  if (config_.method != DraftMethod::kNgram || !cost_now_.known()) return;
  int rows = step_.num_prompt_rows + static_cast<int>(decoding_.size());
  chain_offers_.assign(decoding_.size(), {});
  for (std::size_t i = 0; i < decoding_.size(); ++i) {
    Request& request = *decoding_[i];
    const int length = std::max(0, std::min({request.max_drafts, each, request.room()}));
    if (request.adaptive) {
      chain_offers_[i] = {request.lookup.survival(shared_rates_, length), length, 0};
    } else {
      rows += length;
      most_drafts -= length;
    }
  }
  choose_chain_lengths(chain_offers_, rows, static_cast<int>(decoding_.size()), most_drafts,
                       cost_now_);
  for (std::size_t i = 0; i < decoding_.size(); ++i) {
    Request& request = *decoding_[i];
    if (!request.adaptive) continue;
    const auto& [unused, length, chosen] = chain_offers_[i];
    const bool probe = length > 0 && request.lookup.probes(cost_now_, rows, length, chosen);
    request.chain_limit = probe ? length : chosen;
    rows += request.chain_limit;
  }
}

// What the request may draft in this step. `most_drafts`: rows left for drafts.
AheadShare RunAheadExecutor::choose_share(Request& request, int most_drafts) {
  AheadShare chosen;
  chosen.share.max_drafts = std::min(request.max_drafts, most_drafts);
  if (!request.adaptive || !cost_now_.known() || chosen.share.max_drafts <= 0) return chosen;
  // What the step has beside this request's drafts: rows of prompts, golden tokens, other drafts.
  const int others = step_.num_prompt_rows + static_cast<int>(decoding_.size()) - 1;
  if (request.sizes) {
    chosen.arm = request.sizes->choose(cost_now_, others + static_cast<int>(planned_drafts_ + 0.5));
    chosen.share.max_drafts = std::min(chosen.share.max_drafts, request.sizes->drafts(chosen.arm));
    return chosen;
  }
  if (request.chain) {
    chosen.share.max_drafts = std::min(chosen.share.max_drafts, request.chain_limit);
    return chosen;
  }
  chosen.arm = request.arms->choose(cost_now_, others + static_cast<int>(planned_drafts_ + 0.5));
  const LookaheadBudget budget = request.arms->budget(chosen.arm);
  chosen.share.window_rows = budget.window_rows;
  chosen.share.guesses = budget.guesses;
  chosen.share.max_drafts = std::min(chosen.share.max_drafts,
                                     lookahead_draft_bound(request.slot_request.lookahead, budget));
  return chosen;
}

// `most_drafts`: rows left for drafts.
void RunAheadExecutor::place_decode(Request& request, int most_drafts) {
  const int b = step_.num_prompts + step_.num_decodes++;
  const AheadShare chosen = choose_share(request, most_drafts);
  int drafts = chosen.share.max_drafts;
  int path = std::min(request.max_path, drafts);
  // The token after the last draft takes the last place. The device knows how long the history is
  // and leaves out what has no place; the host knows how long it is at least.
  path = std::min(path, request.room());
  if (request.chain) drafts = path;
  const int rows = 1 + drafts;
  request.parts.push_back({step_.index, 0, rows, path + 1, chosen.arm});
  request.last_step = step_.index;
  flights_.back().places.push_back({&request, false, true, 0});
  staged(staging_.slot_ids)[b] = request.slot;
  staged(staging_.max_drafts)[b] = drafts;
  staged(staging_.window_rows)[b] = chosen.share.window_rows;
  staged(staging_.guesses)[b] = chosen.share.guesses;
  const bool counts_all = chosen.arm < 0 || config_.pads_rows;
  planned_drafts_ += counts_all ? drafts : request.any_arms()->rows(chosen.arm);
  step_.max_decode_rows += rows;
  step_.max_rows = std::max(step_.max_rows, rows);
  stage_pages(request, b);
}

}  // namespace specdec
