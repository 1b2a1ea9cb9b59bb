// Construction, submission and everything that may be called at any time; plan.cc, stage.cc and
// deliver.cc have the steps, weigh.cc and draft.cc what they draft, immediate.cc those that the
// host runs, grammar.cc what grammars change, decide.cc what it decides, check.cc what is refused.
#include "engine/executor.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace specdec {
namespace {

// A step's entering slots take their heads, and prompts of this many bytes together.
constexpr std::int64_t kEntryPromptBytes = 64 * 1024;

SlotMethod slot_method_of(DraftMethod method) {
  switch (method) {
    case DraftMethod::kLookahead:
      return SlotMethod::kLookahead;
    case DraftMethod::kNgram:
      return SlotMethod::kNgram;
    case DraftMethod::kSuffix:
      return SlotMethod::kSuffix;
    case DraftMethod::kProposed:
      return SlotMethod::kProposed;
    case DraftMethod::kNone:
      break;
  }
  return SlotMethod::kNone;
}

}  // namespace

Executor::Executor(const ExecutorConfig& config)
    : config_(checked_config(config)),
      layout_(make_slot_layout(slot_method_of(config.method), config.max_seq_len, config.lookahead,
                               config.ngram.max_matching_ngram_size)),
      staging_(config.max_batch_size, config.max_num_tokens, RequestBook::pages_per_slot(config),
               static_cast<int>(narrow_groups(config.narrow_windows).size())),
      book_(config),
      acceptor_(config.vocab_size, config.synthetic_acceptance_rates) {
  // A slot that is kept like the host's gets a head and the tokens of a step.
  const std::int64_t head = static_cast<std::int64_t>(sizeof(Slot)) + 32 + 4 * kMaxStepTokens;
  const std::int64_t longest = std::int64_t{config.max_seq_len} * sizeof(TokenId);
  entry_bytes_ = (config.max_batch_size * head + std::max(kEntryPromptBytes, longest)) / 16 * 16;
  staged_pages_.assign(static_cast<std::size_t>(ring_size()) * config.max_batch_size,
                       staging_.pages_per_request);
  decoding_.reserve(config.max_batch_size);
  if (config_.method == DraftMethod::kNgram && config_.ngram.is_public_pool) {
    SharedNgramPool::Options options;
    options.max_ngram = config_.ngram.max_matching_ngram_size;
    public_pool_ = std::make_unique<SharedNgramPool>(options);
  }
}

Executor::~Executor() = default;

int Executor::result_words() const {
  static_assert(sizeof(SlotResult) % sizeof(std::int32_t) == 0);
  return config_.max_batch_size * static_cast<int>(sizeof(SlotResult) / sizeof(std::int32_t) + 1);
}

void Executor::bind_rings(const StepRings& rings) {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(next_step_ == 0 && host_ == nullptr,
                  "bind_rings: steps were planned already, or the host runs them");
  SPECDEC_REQUIRE(rings.staging != nullptr && rings.entries != nullptr && rings.results != nullptr,
                  "bind_rings: staging, entries and results are all needed");
  SPECDEC_REQUIRE(!config_.with_suffix || config_.method == DraftMethod::kLookahead,
                  "bind_rings: with_suffix beside drafts of operations needs steps that the host "
                  "runs: use device='cpu', or one of the two");
  rings_ = rings;
  book_.narrow(/*numbered=*/true);
  // Padding is greedy from the first step on.
  for (int ring = 0; ring < ring_size(); ++ring) {
    for (int b = 0; b < staging_.requests; ++b) {
      stage_law(rings.staging + static_cast<std::ptrdiff_t>(ring) * staging_.words, nullptr, b);
    }
  }
}

void Executor::run_on_host(const KvCacheView& cache, const Backend& backend) {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(rings_.staging == nullptr && host_ == nullptr,
                  "run_on_host: it is decided already where steps run");
  SPECDEC_REQUIRE(cache.num_pages == config_.num_pages && cache.page_size == config_.page_size,
                  "run_on_host: the cache has ", cache.num_pages, " pages of ", cache.page_size,
                  " tokens, the executor was made for ", config_.num_pages, " of ",
                  config_.page_size);
  host_ = std::make_unique<HostSteps>(cache, backend, layout_, config_.max_batch_size,
                                      config_.max_num_tokens, staging_.pages_per_request,
                                      ring_size(), staging_.words);
  if (!config_.narrow_windows.empty()) {
    window_memory_ = std::make_unique<WindowMemory>(cache, config_.narrow_windows);
    book_.narrow(/*numbered=*/false);
  }
  rings_.staging = host_->staging.data();
  rings_.results = reinterpret_cast<const std::int32_t*>(host_->results.data());
}

void Executor::bind_host_pages(PagePools pools) {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(host_ != nullptr && next_step_ == 0,
                  "bind_host_pages: for steps that the host runs, before the first plan()");
  page_pools_ = std::move(pools);
}

// Drafts of the method in one step.
int Executor::method_drafts(const RequestParams& p) const {
  if (!p.speculative || p.max_tokens <= 1) return 0;
  if (config_.method == DraftMethod::kLookahead && p.lookahead) return max_drafts_of(*p.lookahead);
  if (p.max_draft_len) return *p.max_draft_len;
  return method_drafts_of(config_);
}

// The same of all sources.
int Executor::max_drafts(const RequestParams& p) const {
  const int method = method_drafts(p);
  if (!config_.with_suffix || !p.speculative || p.max_tokens <= 1) return method;
  return std::min(method + p.suffix_draft_len.value_or(config_.suffix.max_draft_len), kMaxDraftLen);
}

// Drafts of one step that can be accepted.
int Executor::max_path(const RequestParams& p, int drafts) const {
  if (config_.method == DraftMethod::kProposed) return std::min(drafts, config_.proposed_max_path);
  if (config_.method != DraftMethod::kLookahead) return drafts;
  return std::min(drafts,
                  static_cast<int>(lookahead_max_depth(p.lookahead.value_or(config_.lookahead))));
}

RequestId Executor::reserve() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return book_.reserve();
}

RequestId Executor::submit(RequestParams p, const ProposedProbs& external_probs) {
  check(p);
  // The first step takes the prediction's start as drafts that came with the request.
  if (!p.prediction.empty()) {
    const auto first = static_cast<std::ptrdiff_t>(std::min<std::size_t>(
        p.prediction.size(), std::clamp(max_external_drafts(p), 0, kKnownDrafts)));
    p.external_drafts.assign(p.prediction.begin(), p.prediction.begin() + first);
  }
  // The same of what a grammar forces.
  const bool drafted = !p.external_drafts.empty() || max_drafts(p) == 0;
  p.forced.resize(drafted
                      ? 0
                      : std::min<std::size_t>(p.forced.size(),
                                              std::clamp(max_external_drafts(p), 0, kKnownDrafts)));
  p.external_drafts.insert(p.external_drafts.end(), p.forced.begin(), p.forced.end());
  const auto num_external = static_cast<std::int32_t>(p.external_drafts.size());
  SPECDEC_REQUIRE(external_probs.data == nullptr || external_probs.rows == num_external,
                  "external_probs has ", external_probs.rows, " rows for ", num_external,
                  " external drafts: give one row per draft");
  const bool by_host = host_ == nullptr && needs_host(p);
  auto record = std::make_unique<RequestRecord>(std::move(p), config_.vocab_size);
  RequestRecord& r = *record;
  r.by_host = by_host;
  r.entered = by_host;  // its slot is the host's
  r.device_drafts = by_host && config_.method == DraftMethod::kProposed &&
                    !config_.proposed_by_host && r.params.prediction.empty();
  r.max_len = static_cast<int>(std::min<std::int64_t>(
      std::int64_t{r.prompt_len} + r.params.max_tokens, config_.max_seq_len));
  r.max_drafts = max_drafts(r.params);
  r.method_drafts = method_drafts(r.params);
  r.max_path = max_path(r.params, r.method_drafts);
  if (!r.params.prediction.empty()) {
    r.prediction.emplace(std::move(r.params.prediction));
  }
  const bool knows = r.prediction || (r.params.grammar && r.max_drafts > 0 && !r.device_drafts);
  const bool adaptive = r.params.adaptive.value_or(config_.adaptive);
  // Behind a window pages are for the rows of a step, and there are no more than for these.
  const bool windowed = config_.attention.window > 0 || !config_.narrow_windows.empty();
  const bool weighed = r.prediction && adaptive && !windowed;
  r.known_drafts = weighed ? std::min(kWeighedDrafts, config_.max_draft_depth) : kKnownDrafts;
  if (!knows || r.max_len <= r.prompt_len + 1) r.known_drafts = 0;
  r.chain =
      config_.method == DraftMethod::kNgram || (proposes_chains(config_) && !config_.with_suffix);
  r.adaptive = adaptive && r.most_drafts() > 0;
  // Who writes the prompt anew edits it; a prediction says better what.
  const bool by_suffix = config_.method == DraftMethod::kSuffix || r.suffix_drafts() > 0;
  if (r.adaptive && r.max_drafts > 0 && by_suffix && !r.prediction &&
      (host_ != nullptr || by_host)) {
    r.prompt_edits.emplace(r.text);
  }
  if (r.adaptive && r.method_drafts > 0 && config_.method == DraftMethod::kLookahead) {
    r.arms.emplace(r.params.lookahead.value_or(config_.lookahead));
  }
  r.device_drafts = r.device_drafts && r.max_drafts > 0;
  book_.promise(&r);
  if (num_external > 0) {
    std::vector<std::int32_t> parents(num_external);
    std::iota(parents.begin(), parents.end(), -1);
    r.external = std::make_unique<Proposal>();
    r.external->tree.reset(0);
    for (int i = 0; i < r.external_drafts(); ++i) {
      r.external->tree.add(r.params.external_drafts[i], i);
    }
    if (external_probs.data != nullptr) {
      std::vector<std::int32_t> scratch;
      r.external->probs.assign(external_probs.data, external_probs.row_stride,
                               external_probs.columns, external_probs.vocab_ids,
                               external_probs.replacement, r.params.external_drafts.data(),
                               parents.data(), num_external, config_.vocab_size, scratch);
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  r.shared_rates = shared_rates_.of(r.params.cache_salt, r.params.sampling);
  if (config_.suffix_cached_requests > 0 && r.max_drafts > 0) {
    r.past = suffix_pasts_.of(r.params.cache_salt);
  }
  const bool weighed_before = r.by_host || host_ != nullptr;
  if (r.adaptive && r.method_drafts > 0 &&
      (config_.method == DraftMethod::kProposed ||
       (config_.method == DraftMethod::kSuffix && !weighed_before))) {
    // What requests of this size, salt and law have shown is where a new one begins.
    r.shared_sizes = shared_sizes_.of(r.params.cache_salt, r.params.sampling);
    auto& shared = *r.shared_sizes;
    r.sizes.emplace(
        &shared.try_emplace(r.method_drafts, r.method_drafts, r.max_path).first->second);
  }
  return book_.add(std::move(record));
}

// What the request's slot holds when it enters. `take_prompt`: the record needs its text no more.
SlotRequest Executor::slot_request(RequestRecord& r, bool take_prompt) const {
  SlotRequest s;
  if (take_prompt) {
    s.prompt = std::move(r.text);
    r.text = {};
  } else {
    s.prompt = r.text;
  }
  s.max_tokens = r.params.max_tokens;
  if (!r.params.ignore_eos) s.eos_token_ids = r.params.eos_token_ids;
  s.stop_token_ids = r.params.stop_token_ids;
  s.speculative = r.method_drafts > 0;
  s.lookahead = r.params.lookahead.value_or(config_.lookahead);
  s.ngram = NgramLookup{r.method_drafts, config_.ngram.is_keep_all, config_.ngram.is_use_oldest};
  s.suffix = config_.suffix;
  s.suffix.max_draft_len = r.method_drafts;
  s.seed = r.params.seed;
  return s;
}

void Executor::propose(RequestId id, const std::vector<TokenId>& tokens,
                       const std::vector<std::int32_t>& parents, const ProposedProbs& probs) {
  SPECDEC_REQUIRE(tokens.size() == parents.size(), "propose: ", tokens.size(), " tokens and ",
                  parents.size(), " parents");
  SPECDEC_REQUIRE(tokens.size() <= static_cast<std::size_t>(kMaxDraftLen),
                  "propose: ", tokens.size(), " drafts, a step has at most ", kMaxDraftLen);
  auto proposal = std::make_unique<Proposal>();
  DraftTree& tree = proposal->tree;
  tree.reset(0);
  for (std::size_t i = 0; i < tokens.size(); ++i) tree.add(tokens[i], parents[i] + 1);
  validate_tree(tree.tokens, tree.parents, tree.size, config_.vocab_size);
  SPECDEC_REQUIRE(probs.data == nullptr || probs.rows == tree.num_drafts(), "propose: probs has ",
                  probs.rows, " rows for ", tree.num_drafts(), " drafts: give one row per draft");
  std::lock_guard<std::mutex> lock(mutex_);
  RequestRecord* request = book_.find_running(id);
  SPECDEC_REQUIRE(request != nullptr, "propose: request ", id, " is not running");
  SPECDEC_REQUIRE(request->host_slot != nullptr, "propose: the drafts of request ", id,
                  " are made on a device");
  SPECDEC_REQUIRE(tree.num_drafts() <= request->max_drafts, "propose: ", tree.num_drafts(),
                  " drafts, this request may have ", request->max_drafts);
  request->proposal = nullptr;
  if (probs.data != nullptr) {
    proposal->probs.assign(probs.data, probs.row_stride, probs.columns, probs.vocab_ids,
                           probs.replacement, tokens.data(), parents.data(), tree.num_drafts(),
                           config_.vocab_size, vocab_scratch_);
  }
  request->proposal = std::move(proposal);
}

void Executor::set_step_cost(std::vector<int> rows, std::vector<double> seconds, double context_len,
                             std::vector<double> growth, const PrefillScale& prefill) {
  std::lock_guard<std::mutex> lock(mutex_);
  step_cost_.set(std::move(rows), std::move(seconds), context_len, std::move(growth), prefill);
}

void Executor::set_draft_cost(const DraftCost& cost) {
  SPECDEC_REQUIRE(cost.fixed >= 0.0 && cost.each >= 0.0, "draft_cost = ", cost.fixed, ", ",
                  cost.each, " seconds: give 0 or more");
  std::lock_guard<std::mutex> lock(mutex_);
  draft_cost_ = cost;
}

bool Executor::cancel(RequestId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (book_.drop_waiting(id)) {
    ++totals_.cancelled;
    return true;
  }
  RequestRecord* request = book_.find_running(id);
  if (request == nullptr || request->cancelled) return false;
  request->cancelled = true;
  ++totals_.cancelled;
  if (!fault(Fault::kCancelledRunsOn)) end(*request);
  follow_orders();
  return true;
}

void Executor::end(RequestRecord& request) {
  if (request.past && request.host_slot != nullptr) {
    request.past->add(request.host_slot->history() + request.prompt_len, request.output_so_far(),
                      config_.suffix_cached_requests);
  }
  book_.end(request, flights_.empty() ? next_step_ - 1 : flights_.front().step - 1);
}

std::vector<TokenId> Executor::history(RequestId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const RequestRecord* request = book_.find(id);
  SPECDEC_REQUIRE(request != nullptr && !request->ended, "history: request ", id,
                  " is unknown or has finished");
  const Slot* slot = request->host_slot;
  const std::size_t len =
      slot != nullptr ? static_cast<std::size_t>(slot->len) : request->text.size();
  return {request->tokens(), request->tokens() + len};
}

bool Executor::decoding(RequestId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const RequestRecord* request = book_.find_running(id);
  if (request == nullptr) return false;
  if (request->host_slot == nullptr) return !request->in_prefill();
  return request->host_slot->begun != 0 && (host_ != nullptr || request->shares.empty());
}

int Executor::draft_len_limit() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return draft_len_limit_for(config_.draft_len_schedule, static_cast<int>(book_.running().size()),
                             max_drafts_of(config_));
}

int Executor::reset_prefix_cache() {
  std::lock_guard<std::mutex> lock(mutex_);
  const int dropped = book_.pages().drop_unused();
  follow_orders();
  return dropped;
}

// What the books have ordered is done: where the host runs the steps now, since nothing else is
// under way, and by ranks that hold other heads before their next pass; on a device in front of the
// next step.
void Executor::follow_orders() {
  std::vector<PageOrder> orders = book_.take_orders();
  if (host_ == nullptr) {
    std::move(orders.begin(), orders.end(), std::back_inserter(orders_));
    return;
  }
  for (const PageOrder& order : orders) {
    if (order.left >= 0) {
      window_memory_->leave(order.left, order.page);
      followed_.insert(followed_.end(), {kLeftPage, order.page, order.left});
    } else {
      page_pools_.copy(order);
      followed_.insert(followed_.end(), {order.to_host, order.page, order.host_page});
    }
  }
}

int Executor::in_flight() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(flights_.size());
}

std::vector<std::int64_t> Executor::steps_in_flight() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::int64_t> steps;
  for (const InFlightStep& flight : flights_) steps.push_back(flight.step);
  return steps;
}

int Executor::num_unfinished() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return book_.num_unfinished();
}

ExecutorStats Executor::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  ExecutorStats s = totals_;
  book_.add_stats(&s);
  s.in_flight = static_cast<int>(flights_.size());
  s.draft_len_limit =
      draft_len_limit_for(config_.draft_len_schedule, s.running, max_drafts_of(config_));
  if (host_ == nullptr) s.pool_bytes = layout_.bytes * config_.max_batch_size;
  for (const auto& request : book_.running()) {
    if (request->host_slot) s.pool_bytes += used_drafter_bytes(*request->host_slot);
    if (request->suffix_memory) {
      s.pool_bytes += static_cast<std::int64_t>(suffix_bytes_required(request->max_len));
    }
  }
  if (public_pool_) s.pool_bytes += public_pool_->bytes();
  suffix_pasts_.for_each([&](const SuffixPast& past) { s.pool_bytes += past.bytes(); });
  s.plan_bytes =
      host_ ? host_->memory_bytes()
            : ring_size() * (std::int64_t{4} * (staging_.words + result_words()) + entry_bytes_ +
                             std::int64_t{4} * max_host_rows() * config_.vocab_size);
  s.budget = budget_.stats;
  return s;
}

std::vector<std::int32_t> Executor::pages(RequestId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const RequestRecord* request = book_.find(id);
  if (request == nullptr || request->slot < 0) return {};
  return book_.pages().pages(request->slot);
}

}  // namespace specdec
