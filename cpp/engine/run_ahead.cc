// Construction, admission and everything that may be called at any time; plan() and deliver() are
// in run_ahead_plan.cc and run_ahead_deliver.cc, what is refused in run_ahead_check.cc.
#include "engine/run_ahead.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"
#include "engine/run_ahead_check.h"
#include "engine/run_ahead_request.h"

namespace specdec {
namespace {

constexpr std::int64_t kLeastEntryBytes = 64 * 1024;

SlotMethod slot_method_of(DraftMethod method) {
  switch (method) {
    case DraftMethod::kLookahead:
      return SlotMethod::kLookahead;
    case DraftMethod::kNgram:
      return SlotMethod::kNgram;
    case DraftMethod::kExternal:
      return SlotMethod::kBrought;
    case DraftMethod::kNone:
      break;
  }
  return SlotMethod::kNone;
}

// A slot's page table covers the longest sequence plus one step whose rows are all drafts.
int pages_of_slot(const RunAheadConfig& c) {
  return (c.max_seq_len + kMaxStepTokens + c.page_size - 1) / c.page_size;
}

}  // namespace

StagingLayout::StagingLayout(int max_requests, int max_rows, int max_pages_per_request)
    : requests(max_requests), rows(max_rows), pages_per_request(max_pages_per_request) {
  std::int64_t next = 0;
  auto take = [&](std::int64_t count) {
    const std::int64_t offset = next;
    next += (count + 3) / 4 * 4;  // 16-byte aligned
    return static_cast<int>(offset);
  };
  slot_ids = take(requests);
  max_drafts = take(requests);
  window_rows = take(requests);
  guesses = take(requests);
  kv_len = take(requests);
  cu_rows = take(requests + 1);
  cu_logits = take(requests + 1);
  temperature = take(requests);
  top_p = take(requests);
  min_p = take(requests);
  top_k = take(requests);
  seed = take(std::int64_t{2} * requests);
  acceptance = take((requests + 3) / 4);
  posterior_threshold = take(requests);
  posterior_alpha = take(requests);
  acceptance_threshold = take(requests);
  page_table = take(std::int64_t{requests} * pages_per_request);
  logit_rows = take(rows);
  prompt_tokens = take(rows);
  prompt_parents = take(rows);
  SPECDEC_REQUIRE(next <= std::numeric_limits<std::int32_t>::max(), "run_ahead: a step's staging ",
                  "buffer of ", next, " words is too large: lower max_batch_size or max_seq_len");
  words = static_cast<int>(next);
}

RunAheadExecutor::RunAheadExecutor(const RunAheadConfig& config)
    : config_(checked_config(config)),
      layout_(make_slot_layout(slot_method_of(config.method), config.max_seq_len, config.lookahead,
                               config.ngram.max_matching_ngram_size)),
      pages_(config.num_pages, config.page_size, config.max_batch_size, pages_of_slot(config),
             config.enable_block_reuse) {
  staging_ = StagingLayout(config.max_batch_size, config.max_num_tokens, pages_of_slot(config));
  const std::int64_t largest = static_cast<std::int64_t>(sizeof(Slot)) +
                               std::int64_t{config.max_seq_len} * sizeof(TokenId) + 16;
  entry_bytes_ = std::max(kLeastEntryBytes, largest / 16 * 16);
  staged_pages_.assign(static_cast<std::size_t>(ring_size()) * config.max_batch_size,
                       pages_of_slot(config));
  for (int slot = config.max_batch_size - 1; slot >= 0; --slot) free_slots_.push_back(slot);
  running_.reserve(config.max_batch_size);
  decoding_.reserve(config.max_batch_size);
  check_schedule();
}

RunAheadExecutor::~RunAheadExecutor() = default;

int RunAheadExecutor::result_words() const {
  static_assert(sizeof(SlotResult) % sizeof(std::int32_t) == 0);
  return config_.max_batch_size * static_cast<int>(sizeof(SlotResult) / sizeof(std::int32_t) + 1);
}

void RunAheadExecutor::bind_rings(const RunAheadRings& rings) {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(next_step_ == 0, "bind_rings: steps were planned already");
  SPECDEC_REQUIRE(rings.staging != nullptr && rings.entries != nullptr && rings.results != nullptr,
                  "bind_rings: staging, entries and results are all needed");
  rings_ = rings;
  // Padding is greedy from the first step on.
  for (int ring = 0; ring < ring_size(); ++ring) {
    for (int b = 0; b < staging_.requests; ++b) {
      stage_law(rings.staging + static_cast<std::ptrdiff_t>(ring) * staging_.words, nullptr, b);
    }
  }
}

RequestId RunAheadExecutor::submit(RequestParams p) {
  check(p);
  auto request = std::make_unique<Request>();
  Request& r = *request;
  r.prompt_len = r.known_len = static_cast<int>(p.prompt.size());
  r.max_len = static_cast<int>(
      std::min<std::int64_t>(std::int64_t{r.prompt_len} + p.max_tokens, config_.max_seq_len));
  if (needs_host_choice(p)) p.speculative = false;
  r.max_drafts = max_drafts(p);
  r.max_path = max_path(p, r.max_drafts);
  r.law = p.sampling;
  r.acceptance = p.acceptance;
  r.chain = config_.method == DraftMethod::kNgram || brings_chains(config_);
  r.adaptive = p.adaptive.value_or(config_.adaptive) && r.max_drafts > 0;
  if (r.adaptive && config_.method == DraftMethod::kLookahead) {
    r.arms.emplace(p.lookahead.value_or(config_.lookahead));
  }
  // The largest that tokens_to_hold() can ever be.
  r.promised_pages =
      pages_.pages_for(std::max<std::int64_t>(r.prompt_len, r.max_len - 1 + r.max_drafts));
  SPECDEC_REQUIRE(r.promised_pages <= pages_.num_pages(), "the request needs ", r.promised_pages,
                  " KV pages of ", pages_.page_size(), " tokens (prompt ", r.prompt_len,
                  " + max_tokens ", p.max_tokens, " + drafts), the whole pool has ",
                  pages_.num_pages(), ": lower max_tokens or raise kv_cache_config.max_tokens");
  SlotRequest& s = r.slot_request;
  r.cache_salt = p.cache_salt;
  r.whole_prompt = p.compute_whole_prompt;
  if (needs_host_choice(p)) {
    r.host = std::make_unique<HostChoice>(p, config_.vocab_size);
    r.host->params.prompt = {};
    r.entered = true;  // it has no slot
  }
  if (r.host || pages_.reuse()) {
    r.text.reserve(static_cast<std::size_t>(r.max_len));
    r.text = p.prompt;
  }
  s.prompt = std::move(p.prompt);
  s.max_tokens = p.max_tokens;
  if (!p.ignore_eos) s.eos_token_ids = std::move(p.eos_token_ids);
  s.stop_token_ids = std::move(p.stop_token_ids);
  s.speculative = r.max_drafts > 0;
  s.lookahead = p.lookahead.value_or(config_.lookahead);
  s.ngram = NgramLookup{r.max_drafts, config_.ngram.is_keep_all, config_.ngram.is_use_oldest};
  s.seed = p.seed;
  std::lock_guard<std::mutex> lock(mutex_);
  if (r.adaptive && config_.method == DraftMethod::kExternal) {
    // What all requests of this size have shown is where a new one begins.
    r.sizes = shared_sizes_.try_emplace(r.max_drafts, r.max_drafts, r.max_path).first->second;
  }
  r.id = next_id_++;
  waiting_.push_back(std::move(request));
  return r.id;
}

void RunAheadExecutor::set_step_cost(std::vector<int> rows, std::vector<double> seconds,
                                     double context_len, std::vector<double> growth) {
  std::lock_guard<std::mutex> lock(mutex_);
  step_cost_.set(std::move(rows), std::move(seconds), context_len, std::move(growth));
}

void RunAheadExecutor::set_draft_cost(const DraftCost& cost) {
  SPECDEC_REQUIRE(cost.fixed >= 0.0 && cost.each >= 0.0, "draft_cost = ", cost.fixed, ", ",
                  cost.each, " seconds: give 0 or more");
  std::lock_guard<std::mutex> lock(mutex_);
  draft_cost_ = cost;
}

bool RunAheadExecutor::cancel(RequestId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
    if ((*it)->id != id) continue;
    waiting_.erase(it);
    ++totals_.executor.cancelled;
    return true;
  }
  for (const auto& request : running_) {
    if (request->id != id || request->cancelled) continue;
    request->cancelled = true;
    ++totals_.executor.cancelled;
    if (!fault(Fault::kCancelledRunsOn)) end(*request);
    return true;
  }
  return false;
}

// Pages that running requests may still ask for: their promises less what they hold.
std::int64_t RunAheadExecutor::outstanding_pages() const {
  std::int64_t pages = 0;
  for (const auto& request : running_) {
    pages +=
        request->promised_pages - static_cast<std::int64_t>(pages_.pages(request->slot).size());
  }
  return pages;
}

// guaranteed_no_evict: the worst case of every running request fits, so nobody waits for a page in
// the middle of a text. Requests that have ended hold pages until their last step is done.
void RunAheadExecutor::admit() {
  while (!waiting_.empty() && !free_slots_.empty()) {
    Request& request = *waiting_.front();
    std::int64_t needed = outstanding_pages() + pages_needed(request);
    if (fault(Fault::kAdmitWithoutBound)) needed = pages_.pages_for(request.prompt_len);
    // First come, first served: a big request at the head is not overtaken for ever.
    if (needed > pages_.free_pages()) break;
    request.slot = free_slots_.back();
    free_slots_.pop_back();
    // Held from here on, or what was counted on could be evicted.
    pages_.open(request.slot, request.cache_salt);
    attach_prefix(request);
    totals_.executor.reuse_queries += pages_.reuse();
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

// The request takes part in no further step. Its slot and its pages stay until the last step that
// names it is done.
void RunAheadExecutor::end(Request& request) {
  request.ended = true;
  const auto it = std::find_if(running_.begin(), running_.end(),
                               [&](const auto& owner) { return owner.get() == &request; });
  if (fault(Fault::kPagesBackEarly)) pages_.release(request.slot);
  retiring_.push_back(std::move(*it));
  running_.erase(it);
  release_retired(flights_.empty() ? next_step_ - 1 : flights_.front().step - 1);
}

void RunAheadExecutor::release_retired(std::int64_t delivered) {
  std::erase_if(retiring_, [&](std::unique_ptr<Request>& request) {
    if (request->last_step > delivered) return false;
    pages_.release(request->slot);
    free_slots_.push_back(request->slot);
    return true;
  });
}

int RunAheadExecutor::in_flight() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(flights_.size());
}

int RunAheadExecutor::num_unfinished() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(running_.size() + waiting_.size());
}

RunAheadStats RunAheadExecutor::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  RunAheadStats stats = totals_;
  stats.in_flight = static_cast<int>(flights_.size());
  stats.retiring = static_cast<int>(retiring_.size());
  ExecutorStats& s = stats.executor;
  s.running = static_cast<int>(running_.size());
  s.waiting = static_cast<int>(waiting_.size());
  s.draft_len_limit =
      draft_len_limit_for(config_.draft_len_schedule, s.running, max_rows_per_request() - 1);
  s.free_pages = pages_.free_pages();
  s.total_pages = pages_.num_pages();
  s.promised_pages = s.total_pages - s.free_pages + outstanding_pages();
  s.cached_pages = pages_.cached_pages();
  s.reuse = pages_.reuse_stats();
  s.index_bytes = static_cast<std::int64_t>(pages_.index_bytes());
  s.pool_bytes = layout_.bytes * config_.max_batch_size;
  s.plan_bytes = ring_size() * (std::int64_t{4} * (staging_.words + result_words()) + entry_bytes_);
  s.plan_bytes += std::int64_t{4} * ring_size() * max_host_rows() * config_.vocab_size;
  const auto add_request = [&](const Request& r) {
    const std::size_t tokens = r.slot_request.prompt.capacity() + r.text.capacity();
    s.history_bytes += static_cast<std::int64_t>(tokens * sizeof(TokenId));
  };
  for (const auto& request : running_) add_request(*request);
  for (const auto& request : retiring_) add_request(*request);
  for (const auto& request : waiting_) add_request(*request);
  return stats;
}

std::vector<std::int32_t> RunAheadExecutor::pages(RequestId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto* list : {&running_, &retiring_}) {
    for (const auto& request : *list) {
      if (request->id == id) return pages_.pages(request->slot);
    }
  }
  return {};
}

}  // namespace specdec
