// The step machine: plan, forward, commit ("sans-IO").
//
//   plan = executor.plan()            which requests, which rows, which pages
//   scores = model(plan)              the caller's forward pass
//   outputs = executor.commit(...)    accept, compact K/V, advance histories, stop rules
//
// The executor owns everything but the forward pass and never calls back. Exactly one plan is
// outstanding between plan() and commit()/fail(). submit(), cancel(), propose() and stats() may be
// called from any thread at any time; plan() and commit() from one thread at a time.
//
// guaranteed_no_evict: a request is admitted when its worst case fits into the pages that are not
// promised to others, so a running request never waits for a page.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "algo/acceptance.h"
#include "algo/shared_ngram_pool.h"
#include "backend/backend.h"
#include "engine/chain_budget.h"
#include "engine/draft_len_schedule.h"
#include "engine/drafter.h"
#include "engine/kv_moves.h"
#include "engine/prompt_lookup_drafter.h"
#include "engine/request.h"
#include "engine/score_processor.h"
#include "engine/step_cost.h"
#include "engine/step_plan.h"
#include "kv/page_table.h"

namespace specdec {

// kExternal: drafts come from propose() alone.
enum class DraftMethod : std::uint8_t { kNone, kLookahead, kNgram, kExternal };

struct ExecutorConfig {
  int vocab_size = 0;
  int max_batch_size = 32;
  int max_seq_len = 0;
  int max_num_tokens = 0;  // rows of one step
  DraftMethod method = DraftMethod::kNone;
  LookaheadConfig lookahead;
  NgramParams ngram;
  int external_max_draft_len = kMaxDraftLen;  // drafts from outside: nodes of one step
  bool adaptive = true;
  bool enable_chunked_prefill = true;
  bool enable_block_reuse = false;  // requests start from published pages of equal text and salt
  bool check_integrity = false;
  bool defer_moves = false;  // commit() compacts nothing: take_moves() says what to move
  DraftLenSchedule draft_len_schedule;
  // Not empty: requests with speculation keep drafts at these rates instead of what the target
  // says (algo/synthetic_acceptance.h). For measurements only.
  std::vector<double> synthetic_acceptance_rates;
};

struct ExecutorStats {
  std::int64_t steps = 0, rows = 0, prefill_rows = 0;
  std::int64_t num_drafts = 0, num_draft_tokens = 0, num_accepted_tokens = 0;
  std::int64_t generated_tokens = 0, finished = 0, cancelled = 0, failed = 0;
  // Decode steps in which draft_len_schedule allowed fewer drafts than the engine could make, and
  // how many of them it allowed none.
  std::int64_t shortened_steps = 0, unspeculated_steps = 0;
  int draft_len_limit = 0;  // drafts of one request that the schedule allows now
  int running = 0, waiting = 0;
  int free_pages = 0, total_pages = 0;
  std::int64_t promised_pages = 0;  // held now, or to be given to running requests; shared once
  // Prefix reuse. Cached pages are published and unused; they count as free.
  std::int64_t reuse_queries = 0, reuse_hits = 0;  // requests that looked, and that found a block
  std::int64_t cached_tokens = 0;                  // prompt tokens that were not computed
  int cached_pages = 0;
  ReuseStats reuse;
  std::int64_t pool_bytes = 0;        // drafters of running requests and public pools
  std::int64_t history_bytes = 0;     // token histories of running and waiting requests
  std::int64_t plan_bytes = 0;        // step buffers
  std::int64_t index_bytes = 0;       // which page holds which text
  std::int64_t draft_prob_bytes = 0;  // distributions that drafts of requests came with
};

// What the drafts of one propose() were drawn from; copied.
struct ProposedProbs {
  const float* data = nullptr;  // [rows, columns]; null: they were chosen without chance
  std::int64_t row_stride = 0;  // elements
  std::int32_t rows = 0, columns = 0;
  const TokenId* vocab_ids = nullptr;  // [columns] a reduced vocabulary; null: all tokens
  bool replacement = false;            // siblings were drawn with replacement
};

// Scores that the caller's own processors changed between the forward pass and commit().
struct ScoreChanges {
  const float* raw = nullptr;  // the model's own, for logprobs; null: nothing was changed
  std::int64_t raw_stride = 0;
  std::map<RequestId, std::string> errors;  // requests whose processor failed: they end with it
};

class Executor {
 public:
  Executor(const ExecutorConfig& config, const KvCacheView& cache, const Backend& backend);
  ~Executor();

  void set_step_cost(std::vector<int> rows, std::vector<double> seconds, double context_len = 0.0,
                     std::vector<double> growth = {});

  // external_probs: what params.external_drafts were drawn from.
  RequestId submit(RequestParams params, const ProposedProbs& external_probs = {});
  // Takes effect at once for a waiting request, else with the step in flight. False: unknown id.
  bool cancel(RequestId id);
  // Drafts for the request's next decode step, used once, in place of the in-engine drafter's.
  // parents[i] is the index of draft i's parent among the drafts, -1 for the golden token.
  // A refused proposal leaves none.
  void propose(RequestId id, const std::vector<TokenId>& tokens,
               const std::vector<std::int32_t>& parents, const ProposedProbs& probs = {});
  std::vector<TokenId> history(RequestId id) const;
  bool decoding(RequestId id) const;  // past its prefill
  // Drafts of one request that draft_len_schedule allows for the requests that run now.
  int draft_len_limit() const;

  const StepPlan* plan();  // null: nothing to run
  // Exactly one of ids [L] (greedy choices, -1 for a row that holds a NaN) and scores [L, V] (rows
  // `row_stride` elements apart) is given: scores when plan.needs_logits.
  // `changes`: what the caller did to the scores before handing them over.
  std::vector<StepOutput> commit(const StepPlan& plan, const TokenId* ids, const float* scores,
                                 std::int64_t row_stride, const ScoreChanges& changes = {});
  // The forward pass failed: its requests end with an error, everybody else goes on.
  std::vector<StepOutput> fail(const StepPlan& plan, const std::string& message);

  // With defer_moves, after commit() and before the next plan(): the compaction that the caller
  // makes where the pages lie, before any kernel of a later step. Empty: nothing to move.
  KvMoves take_moves();

  // Forgets the published pages that no running request holds; returns how many. Whoever writes
  // into pages without the executor calls it first.
  int reset_prefix_cache();

  int num_unfinished() const;
  ExecutorStats stats() const;
  const ExecutorConfig& config() const { return config_; }

 private:
  struct Request;

  void validate(const RequestParams& params) const;
  int step_rows_bound(const RequestParams& params) const;
  std::int64_t pages_bound(const RequestParams& params) const;
  std::unique_ptr<Drafter> make_drafter(const Request& request);
  void admit();
  void drop_cancelled();
  void plan_drafts(int row_budget);
  int place_proposal(Request& request, const DraftLimits& limits);
  void place_decode(Request& request);
  int external_drafts(const Request& request) const;
  int prefill_rows(const Request& request, int budget) const;
  void place_prefill(Request& request, int rows);
  void attach_prefix(Request& request);
  bool better_wait(const Request& request, std::size_t index) const;
  std::int64_t outstanding_pages() const;
  std::int64_t pages_needed(const Request& request) const;
  void publish(const Request& request);
  int open_rows(Request& request, int rows, std::int64_t kv_len);
  // raw: the model's scores from the request's first node on; row: its logit row.
  void commit_decode(Request& request, int index, int row, const TokenId* sampled, const float* raw,
                     std::int64_t raw_stride, StepOutput& out);
  void add_prompt_logprobs(const Request& request, const float* raw, std::int64_t raw_stride,
                           StepOutput& out);
  void deliver(Request& request, TokenId token, const float* scores, StepOutput& out);
  const float* processed_scores(const Request& request, int row, const float* raw);
  void find_best(const float* scores, std::int64_t row_stride, int rows, TokenId* ids);
  void sample(const Request& request, const float* scores, std::int64_t row_stride,
              TokenId* sampled);
  void accept_by_probability(const Request& request, const float* scores, std::int64_t row_stride,
                             TokenId* sampled);
  void decide(const Request& request, const float* scores, std::int64_t row_stride,
              TokenId* sampled);
  void move_kv(const StepPlan& plan);
  void accept_synthetic(const Request& request, const float* scores, std::int64_t row_stride,
                        TokenId* sampled);
  void settle(const StepPlan& plan, std::vector<StepOutput>& outputs);
  void finish(Request& request);
  void require_outstanding(const StepPlan& plan) const;

  ExecutorConfig config_;
  KvCacheView cache_;
  const Backend& backend_;
  PageTable pages_;
  StepPlan plan_;
  StepCost step_cost_, cost_now_;  // as measured; for the contexts of the step that is planned
  ChainRates shared_rates_;
  std::unique_ptr<SharedNgramPool> public_pool_;  // null: not public

  mutable std::mutex mutex_;
  bool outstanding_ = false;
  RequestId next_id_ = 1;
  std::deque<std::unique_ptr<Request>> waiting_;
  std::vector<std::unique_ptr<Request>> running_;  // in order of admission
  std::vector<Request*> planned_;                  // by position in the plan
  std::vector<int> free_slots_;
  ExecutorStats totals_;

  // Scratch of one call, kept to avoid allocation on the step path.
  std::vector<int> prefill_chunk_;  // by position in running_
  std::vector<ChainOffer> chain_offers_;
  std::vector<Request*> chain_requests_;  // whose offer it is
  std::vector<TokenId> sampled_;          // [max_rows]
  std::vector<float> processed_row_;      // [V] a row after its request's processors
  TokenSampler sampler_;
  TreeAcceptor acceptor_;
  AcceptResult accepted_;                    // of the request at hand
  std::vector<std::int32_t> vocab_scratch_;  // [V] while a reduced vocabulary is checked
  std::vector<std::int32_t> path_;           // [max_batch, kMaxStepTokens]
  std::vector<std::int32_t> path_len_;       // [max_batch]
  KvMoves moves_;                            // of the last step, if they are deferred
};

}  // namespace specdec
