// Construction, admission and everything that may be called at any time; plan(), propose() and
// commit() are in executor_plan.cc, executor_propose.cc and executor_commit.cc.
#include "engine/executor.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "engine/executor_request.h"
#include "engine/lookahead_drafter.h"
#include "engine/prompt_lookup_drafter.h"

namespace specdec {
namespace {

// A slot's page table covers the longest sequence plus one step whose rows are all drafts.
int pages_per_slot(const ExecutorConfig& config, int page_size) {
  return (config.max_seq_len + kMaxStepTokens + page_size - 1) / page_size;
}

}  // namespace

Executor::Executor(const ExecutorConfig& config, const KvCacheView& cache, const Backend& backend)
    : config_(checked_config(config)),
      cache_(cache),
      backend_(backend),
      pages_(cache.num_pages, cache.page_size, config.max_batch_size,
             pages_per_slot(config, cache.page_size), config.enable_block_reuse),
      plan_(config.max_batch_size, config.max_num_tokens, pages_per_slot(config, cache.page_size)),
      sampled_(config.max_num_tokens),
      path_(static_cast<std::size_t>(config.max_batch_size) * kMaxStepTokens),
      path_len_(config.max_batch_size) {
  if (config.method == DraftMethod::kNgram && config.ngram.is_public_pool) {
    SharedNgramPool::Options options;
    options.max_ngram = config.ngram.max_matching_ngram_size;
    public_pool_ = std::make_unique<SharedNgramPool>(options);
  }
  for (int slot = config.max_batch_size - 1; slot >= 0; --slot) free_slots_.push_back(slot);
  running_.reserve(config.max_batch_size);
  planned_.reserve(config.max_batch_size);
}

Executor::~Executor() = default;

void Executor::set_step_cost(std::vector<int> rows, std::vector<double> seconds, double context_len,
                             std::vector<double> growth) {
  std::lock_guard<std::mutex> lock(mutex_);
  step_cost_.set(std::move(rows), std::move(seconds), context_len, std::move(growth));
}

int Executor::step_rows_bound(const RequestParams& params) const {
  if (!params.speculative) return 1;
  int drafts = max_drafts_of(config_);
  if (config_.method == DraftMethod::kLookahead && params.lookahead) {
    drafts = max_drafts_of(*params.lookahead);
  }
  if (params.max_draft_len) {
    drafts = *params.max_draft_len;
  }
  return 1 + drafts;
}

std::int64_t Executor::pages_bound(const RequestParams& params) const {
  const std::int64_t longest = std::min<std::int64_t>(
      static_cast<std::int64_t>(params.prompt.size()) + params.max_tokens, config_.max_seq_len);
  // The last step starts with at most longest - 1 tokens in the cache.
  return pages_.pages_for(longest - 1 + step_rows_bound(params));
}

RequestId Executor::submit(RequestParams params, const ProposedProbs& external_probs) {
  validate(params);
  const auto num_drafts = static_cast<std::int32_t>(params.external_drafts.size());
  SPECDEC_REQUIRE(external_probs.data == nullptr || external_probs.rows == num_drafts,
                  "external_probs has ", external_probs.rows, " rows for ", num_drafts,
                  " external drafts: give one row per draft");
  std::lock_guard<std::mutex> lock(mutex_);
  auto request = std::make_unique<Request>(next_id_, std::move(params), config_.vocab_size);
  request->max_len = static_cast<int>(std::min<std::int64_t>(
      static_cast<std::int64_t>(request->prompt_len()) + request->params.max_tokens,
      config_.max_seq_len));
  request->promised_pages = pages_bound(request->params);
  if (external_probs.data != nullptr) {
    std::vector<std::int32_t> parents(num_drafts);
    std::iota(parents.begin(), parents.end(), -1);
    request->external_probs.assign(external_probs.data, external_probs.row_stride,
                                   external_probs.columns, external_probs.vocab_ids,
                                   external_probs.replacement,
                                   request->params.external_drafts.data(), parents.data(),
                                   num_drafts, config_.vocab_size, vocab_scratch_);
  }
  waiting_.push_back(std::move(request));
  return next_id_++;
}

bool Executor::cancel(RequestId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
    if ((*it)->id != id) continue;
    waiting_.erase(it);
    ++totals_.cancelled;
    return true;
  }
  for (auto& request : running_) {
    if (request->id != id || request->cancelled) continue;
    request->cancelled = true;
    ++totals_.cancelled;
    if (!outstanding_) drop_cancelled();
    return true;
  }
  return false;
}

std::vector<TokenId> Executor::history(RequestId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& request : running_) {
    if (request->id == id) return request->history;
  }
  for (const auto& request : waiting_) {
    if (request->id == id) return request->history;
  }
  SPECDEC_REQUIRE(false, "history: request ", id, " is unknown or has finished");
  return {};
}

bool Executor::decoding(RequestId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& request : running_) {
    if (request->id == id) return !request->in_prefill();
  }
  return false;
}

int Executor::draft_len_limit() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return draft_len_limit_for(config_.draft_len_schedule, static_cast<int>(running_.size()),
                             max_drafts_of(config_));
}

int Executor::num_unfinished() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(running_.size() + waiting_.size());
}

ExecutorStats Executor::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  ExecutorStats s = totals_;
  s.running = static_cast<int>(running_.size());
  s.waiting = static_cast<int>(waiting_.size());
  s.draft_len_limit =
      draft_len_limit_for(config_.draft_len_schedule, s.running, max_drafts_of(config_));
  s.free_pages = pages_.free_pages();
  s.total_pages = pages_.num_pages();
  s.promised_pages = s.total_pages - s.free_pages + outstanding_pages();
  s.cached_pages = pages_.cached_pages();
  s.reuse = pages_.reuse_stats();
  s.pool_bytes = public_pool_ ? public_pool_->bytes() : 0;
  auto add_request = [&](const Request& r) {
    s.history_bytes += static_cast<std::int64_t>(r.history.capacity() * sizeof(TokenId));
    s.draft_prob_bytes +=
        static_cast<std::int64_t>(r.external_probs.memory_bytes() +
                                  r.proposal_probs.memory_bytes() + r.step_probs.memory_bytes());
  };
  for (const auto& request : running_) {
    add_request(*request);
    if (request->drafter) {
      s.pool_bytes += static_cast<std::int64_t>(request->drafter->memory_bytes());
    }
  }
  for (const auto& request : waiting_) add_request(*request);
  s.plan_bytes = static_cast<std::int64_t>(plan_.memory_bytes());
  s.index_bytes = static_cast<std::int64_t>(pages_.index_bytes());
  return s;
}

std::unique_ptr<Drafter> Executor::make_drafter(const Request& request) {
  const RequestParams& p = request.params;
  if (!p.speculative || p.max_tokens == 1) return nullptr;
  switch (config_.method) {
    case DraftMethod::kNone:
    case DraftMethod::kExternal:
      return nullptr;
    case DraftMethod::kLookahead: {
      const LookaheadConfig triple = p.lookahead.value_or(config_.lookahead);
      if (max_drafts_of(triple) == 0) return nullptr;
      return std::make_unique<LookaheadDrafter>(triple, request.max_len, p.seed);
    }
    case DraftMethod::kNgram: {
      NgramParams ngram = config_.ngram;
      ngram.max_draft_len = p.max_draft_len.value_or(ngram.max_draft_len);
      if (ngram.max_draft_len == 0) return nullptr;
      return std::make_unique<PromptLookupDrafter>(ngram, request.max_len, &shared_rates_,
                                                   public_pool_.get(), p.cache_salt);
    }
  }
  return nullptr;
}

int Executor::reset_prefix_cache() {
  std::lock_guard<std::mutex> lock(mutex_);
  return pages_.drop_unused();
}

// Pages that running requests may still ask for: their promises less what they hold.
std::int64_t Executor::outstanding_pages() const {
  std::int64_t pages = 0;
  for (const auto& request : running_) {
    pages +=
        request->promised_pages - static_cast<std::int64_t>(pages_.pages(request->slot).size());
  }
  return pages;
}

void Executor::finish(Request& request) {
  pages_.release(request.slot);
  free_slots_.push_back(request.slot);
  request.slot = -1;
}

void Executor::drop_cancelled() {
  std::erase_if(running_, [&](std::unique_ptr<Request>& request) {
    if (!request->cancelled) return false;
    finish(*request);
    return true;
  });
}

void Executor::require_outstanding(const StepPlan& plan) const {
  SPECDEC_REQUIRE(
      outstanding_ && &plan == &plan_,
      "this plan is not the outstanding one: commit() or fail() takes each plan() once");
}

}  // namespace specdec
