// plan(): which requests run, how many rows each gets, and the step's geometry.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/executor.h"
#include "engine/executor_request.h"

namespace specdec {

// Pages that an admission takes out of the free ones: its worst case, less published pages that
// somebody holds already. (Unused published pages are free pages until they are attached.)
std::int64_t Executor::pages_needed(const Request& request) const {
  const PageTable::Match match =
      pages_.match(request.params.cache_salt, request.history.data(), request.reusable());
  return request.promised_pages - (match.pages - match.unused);
}

void Executor::admit() {
  while (!waiting_.empty() && !free_slots_.empty()) {
    Request& request = *waiting_.front();
    // First come, first served: a big request at the head is not overtaken for ever.
    if (outstanding_pages() + pages_needed(request) > pages_.free_pages()) break;
    request.slot = free_slots_.back();
    free_slots_.pop_back();
    request.drafter = make_drafter(request);
    // Held from here on, or what was counted on could be evicted.
    pages_.open(request.slot, request.params.cache_salt);
    attach_prefix(request);
    if (pages_.reuse()) {
      ++totals_.reuse_queries;
    }
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

// Takes over what is published of the prompt; may be called again until the first row is placed.
void Executor::attach_prefix(Request& request) {
  const bool hit = request.num_cached > 0;
  const int pages = pages_.attach(request.slot, request.history.data(), request.reusable());
  if (pages == 0) return;
  request.num_cached += pages * pages_.page_size();
  request.prefilled = request.num_cached;
  totals_.reuse_hits += !hit;
  totals_.cached_tokens += static_cast<std::int64_t>(pages) * pages_.page_size();
}

// True when a request before this one finishes, in this step, a prompt that has the next block of
// this request's prompt too: one step later the block is there to be attached. So the outputs of
// one prompt compute it once. Nobody waits twice.
bool Executor::better_wait(const Request& request, std::size_t index) const {
  if (!pages_.reuse() || request.waited || !request.untouched()) return false;
  const int wanted = request.num_cached + pages_.page_size();
  if (wanted > request.reusable()) return false;
  for (std::size_t i = 0; i < index; ++i) {
    const Request& other = *running_[i];
    const bool ends_now =
        prefill_chunk_[i] > 0 && other.prefilled + prefill_chunk_[i] == other.prompt_len();
    if (ends_now && other.prompt_len() >= wanted &&
        other.params.cache_salt == request.params.cache_salt &&
        std::equal(request.history.begin(), request.history.begin() + wanted,
                   other.history.begin())) {
      return true;
    }
  }
  return false;
}

const StepPlan* Executor::plan() {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(!outstanding_,
                  "plan() was called while a plan is outstanding: commit() or fail() it first");
  SPECDEC_REQUIRE(
      moves_.empty(),
      "plan() before the K/V moves of the last step were taken: call take_moves() after "
      "each commit() and make them");
  drop_cancelled();
  admit();
  if (running_.empty()) return nullptr;

  plan_.num_requests = plan_.num_rows = plan_.num_logit_rows = plan_.num_prefill_rows = 0;
  plan_.needs_logits = false;
  plan_.cu_rows[0] = plan_.cu_logits[0] = 0;
  planned_.clear();

  int budget = config_.max_num_tokens;
  for (const auto& request : running_) budget -= request->in_prefill() ? 0 : 1;
  // Prompts come first: they decide when somebody sees the first token.
  std::vector<int>& chunk = prefill_chunk_;
  chunk.assign(running_.size(), 0);
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Request& request = *running_[i];
    if (!request.in_prefill()) continue;
    if (request.untouched()) attach_prefix(request);
    if (better_wait(request, i)) {
      request.waited = true;
      continue;
    }
    const int rows = prefill_rows(request, budget);
    if (rows == 0) continue;
    chunk[i] = rows;
    budget -= rows;
    if (request.prefilled + rows == request.prompt_len()) budget -= external_drafts(request);
    plan_.num_prefill_rows += rows;
  }
  plan_drafts(budget);
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Request& request = *running_[i];
    if (!request.in_prefill()) {
      place_decode(request);
    } else if (chunk[i] > 0) {
      place_prefill(request, chunk[i]);
    }
  }
  SPECDEC_ENSURE(plan_.num_rows > 0, "a plan without rows");
  ++plan_.generation;
  outstanding_ = true;
  if (config_.check_integrity) pages_.check_integrity();
  return &plan_;
}

// Drafts that came with the request, as many as it could still deliver.
int Executor::external_drafts(const Request& request) const {
  const int room = request.max_len - static_cast<int>(request.history.size());
  return std::min(static_cast<int>(request.params.external_drafts.size()), room - 1);
}

// Prompt rows of this step. Its last token and the drafts that came with the request go together.
int Executor::prefill_rows(const Request& request, int budget) const {
  const int left = request.prompt_len() - request.prefilled;
  const int rows = std::min(left, budget);
  const int drafts = external_drafts(request);
  const bool all = rows == left && left + drafts <= budget;
  if (!config_.enable_chunked_prefill) return all ? rows : 0;
  return all || drafts == 0 ? rows : std::min(rows, left - 1);
}

// Fills request->tree of every decoding request. `row_budget`: rows left for drafts.
void Executor::plan_drafts(int row_budget) {
  std::vector<ChainOffer>& offers = chain_offers_;
  offers.clear();
  std::vector<Request*>& chains = chain_requests_;
  chains.clear();
  int decode_requests = 0;
  double tokens = 0.0;  // in the cache, of decoding requests
  for (const auto& request : running_) {
    if (request->in_prefill()) continue;
    ++decode_requests;
    tokens += static_cast<double>(request->history.size()) - 1.0;
  }
  step_cost_.at(decode_requests, tokens / std::max(decode_requests, 1), &cost_now_);
  int rows = plan_.num_prefill_rows + decode_requests;  // of the step, as decided so far
  const int most = max_drafts_of(config_);
  const int scheduled =
      draft_len_limit_for(config_.draft_len_schedule, static_cast<int>(running_.size()), most);
  totals_.shortened_steps += decode_requests > 0 && scheduled < most;
  totals_.unspeculated_steps += decode_requests > 0 && scheduled < most && scheduled == 0;

  for (const auto& owner : running_) {
    Request& request = *owner;
    if (request.in_prefill()) continue;
    request.tree.reset(request.history.back());
    request.tree_has_probs = false;
    const int room = request.max_len - static_cast<int>(request.history.size());
    DraftLimits limits;
    limits.max_depth = room - 1;  // the token after the last draft takes the last place
    limits.max_drafts = std::min({row_budget, step_rows_bound(request.params) - 1, scheduled});
    limits.adaptive = request.params.adaptive.value_or(config_.adaptive) && step_cost_.known();
    int used = 0;
    if (request.has_proposal) {
      used = place_proposal(request, limits);
    } else if (request.drafter) {
      if (limits.max_depth > 0 && limits.max_drafts > 0) {
        const BudgetContext context{cost_now_, rows - 1};
        const int offered = request.drafter->offer(request.history, limits, context);
        const double* survival = request.drafter->survival();
        if (survival != nullptr && limits.adaptive && offered > 0) {
          offers.push_back({survival, offered, 0});
          chains.push_back(&request);
        } else if (offered > 0) {
          request.drafter->build(request.history, offered, &request.tree);
          used = request.tree.num_drafts();
        }
      }
    }
    row_budget -= used;
    rows += used;
  }
  if (offers.empty()) return;
  choose_chain_lengths(offers, rows, decode_requests, row_budget, cost_now_);
  for (std::size_t i = 0; i < offers.size(); ++i) {
    if (offers[i].chosen == 0) continue;
    chains[i]->drafter->build(chains[i]->history, offers[i].chosen, &chains[i]->tree);
  }
}

// Reserves pages, opens the request's entry in the plan; returns its first row.
int Executor::open_rows(Request& request, int rows, std::int64_t kv_len) {
  const bool reserved = pages_.reserve(request.slot, kv_len + rows);
  SPECDEC_ENSURE(reserved, "request ", request.id, " was promised pages for ", kv_len + rows,
                 " tokens and did not get them");
  SPECDEC_ENSURE(kv_len >= pages_.shared_tokens(request.slot), "request ", request.id,
                 " would write at ", kv_len, ", its first ", pages_.shared_tokens(request.slot),
                 " tokens are published");
  const int b = plan_.num_requests++;
  const int first = plan_.num_rows;
  plan_.num_rows += rows;
  plan_.cu_rows[b + 1] = plan_.num_rows;
  plan_.kv_len[b] = static_cast<std::int32_t>(kv_len);
  plan_.slot[b] = request.slot;
  plan_.request_ids[b] = request.id;
  plan_.is_tree[b] = 0;
  const auto& pages = pages_.pages(request.slot);
  std::copy(pages.begin(), pages.end(),
            plan_.page_table.begin() + static_cast<std::ptrdiff_t>(b) * plan_.page_table_stride);
  planned_.push_back(&request);
  request.step_rows = rows;
  return first;
}

void Executor::place_prefill(Request& request, int rows) {
  const int start = request.prefilled;
  const bool last = start + rows == request.prompt_len();
  DraftTree& tree = request.tree;  // its golden token is the prompt's last
  tree.reset(request.history.back());
  const int drafts = last ? external_drafts(request) : 0;
  for (int i = 0; i < drafts; ++i) {
    request.proposal_source[tree.add(request.params.external_drafts[i], i)] = i;
  }
  request.tree_has_probs = drafts > 0 && request.external_probs.given();
  if (request.tree_has_probs) std::swap(request.external_probs, request.step_probs);
  request.step_max_path = drafts;
  const int all = rows + drafts;
  const int first = open_rows(request, all, start);
  const int b = plan_.num_requests - 1;
  for (int i = 0; i < all; ++i) {
    plan_.tokens[first + i] = i < rows ? request.history[start + i] : tree.tokens[i - rows + 1];
    plan_.positions[first + i] = start + i;
    plan_.parents[first + i] = i - 1;
  }
  // The row of the prompt's last token and of the drafts behind it; for logprobs of the prompt all.
  const int from = request.params.prompt_logprobs ? 0 : (last ? rows - 1 : all);
  for (int i = from; i < all; ++i) {
    plan_.logit_rows[plan_.num_logit_rows++] = first + i;
  }
  plan_.needs_logits |= from < all && request.wants_scores();
  plan_.cu_logits[b + 1] = plan_.num_logit_rows;
}

void Executor::place_decode(Request& request) {
  const DraftTree& tree = request.tree;
  const std::int64_t kv_len = static_cast<std::int64_t>(request.history.size()) - 1;
  const int first = open_rows(request, tree.size, kv_len);
  const int b = plan_.num_requests - 1;
  std::int32_t depth[kMaxStepTokens] = {};
  derive_depths(tree.parents, tree.size, depth);
  request.step_max_path = *std::max_element(depth, depth + tree.size);
  for (int i = 0; i < tree.size; ++i) {
    plan_.tokens[first + i] = tree.tokens[i];
    plan_.positions[first + i] = static_cast<std::int32_t>(kv_len) + depth[i];
    plan_.parents[first + i] = tree.parents[i];
    plan_.logit_rows[plan_.num_logit_rows++] = first + i;
  }
  if (!is_chain(tree.parents, tree.size)) {
    plan_.is_tree[b] = 1;
    derive_mask(tree.parents, tree.size,
                plan_.mask.data() + static_cast<std::ptrdiff_t>(first) * kMaskWords);
  }
  plan_.needs_logits |= request.wants_scores();
  plan_.cu_logits[b + 1] = plan_.num_logit_rows;
}

}  // namespace specdec
