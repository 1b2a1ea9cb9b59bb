// The run-ahead executor: step t + 1 is enqueued before step t has been read.
//
//   step = executor.plan()      host only: who takes part, which pages, bounds on rows
//   ...                         the caller enqueues the step on a stream (docs/run_ahead.md)
//   outputs = executor.deliver()   the oldest step in flight, after its event: what it brought
//
// The requests' state lives in slots of the backend's memory (algo/slot.h); the device drafts,
// accepts and stops by itself. What the host knows when it plans step t are the results up to step
// t - depth - 1, so it plans with bounds: pages for as many tokens as the steps in flight could
// bring at most, rows for as many drafts as the slots may make.
//
// Served: requests whose choices are made from the model's own scores, greedy or sampled, by any
// acceptance rule, decoded plainly, by lookahead, by prompt lookup or with drafts that operations
// on the stream bring. Beside them, at depth 0 and without drafts, requests whose tokens the host
// chooses from scores (run_ahead_host.h). submit() refuses others.
//
// The host writes what a step needs into a ring of staging buffers and reads results from a ring of
// as many; both have depth + 2 places and are the caller's memory (pinned for CUDA). A place is
// written again only after the event of the step that used it. submit(), cancel() and stats() may
// be called from any thread at any time, plan() and deliver() from one thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "algo/slot_host.h"
#include "engine/draft_len_schedule.h"
#include "engine/executor.h"
#include "engine/request.h"
#include "engine/run_ahead_budget.h"
#include "engine/run_ahead_host.h"
#include "engine/step_cost.h"
#include "kv/page_table.h"

namespace specdec {

inline constexpr int kMaxRunAhead = 2;

struct RunAheadConfig {
  int vocab_size = 0;
  int max_batch_size = 32;
  int max_seq_len = 0;
  int max_num_tokens = 0;  // rows of one step
  // kExternal: operations on the stream bring the drafts into the slots (algo/brought_draft.h).
  DraftMethod method = DraftMethod::kNone;
  LookaheadConfig lookahead;
  NgramParams ngram;
  int external_max_draft_len = 0, external_max_path = 0;  // kExternal: nodes, the deepest of them
  int num_pages = 0, page_size = 0;
  int depth = 1;  // steps that are enqueued while one is read: 0 (synchronous) to kMaxRunAhead
  bool adaptive = true;  // draft budgets follow what was accepted, once set_step_cost() was called
  bool pads_rows = false;  // the model runs as many rows as were planned, not as were drafted
  bool enable_chunked_prefill = true;
  bool enable_block_reuse = false;  // requests start from published pages of equal text and salt
  bool check_integrity = false;
  // By requests that run as far as the host knows: those that ended in steps in flight count.
  DraftLenSchedule draft_len_schedule;
};

// Where the parts of one place of the staging ring lie, in int32 words from its start. Requests of
// a step are ordered: those that read their prompt, then those that decode.
struct StagingLayout {
  StagingLayout() = default;
  StagingLayout(int max_requests, int max_rows, int max_pages_per_request);

  int requests = 0, rows = 0, pages_per_request = 0;
  int slot_ids = 0;     // [B] -1 behind the last request
  int max_drafts = 0;   // [B]
  int window_rows = 0;  // [B] of lookahead, as DraftStepParams
  int guesses = 0;      // [B]
  int kv_len = 0;       // [B] of prompts: tokens in the cache
  int cu_rows = 0;      // [B + 1] of prompts
  int cu_logits = 0;    // [B + 1] of prompts: first choice of each
  // Laws and acceptance rules as accept_step takes them, [B] each; but for the seeds they are
  // written for steps that need scores, greedy behind the last request.
  int temperature = 0, top_p = 0, min_p = 0;                                   // float
  int top_k = 0;                                                               // int
  int seed = 0;                                                                // uint64
  int acceptance = 0;                                                          // uint8
  int posterior_threshold = 0, posterior_alpha = 0, acceptance_threshold = 0;  // float
  int page_table = 0;      // [B, pages_per_request] -1 behind the pages that are held
  int logit_rows = 0;      // [R] rows whose choices are needed; those of decoding are the last rows
  int prompt_tokens = 0;   // [R]
  int prompt_parents = 0;  // [R]
  int words = 0;
};

// The start of a slot, to be copied there before the step's operations.
struct SlotEntry {
  int slot = 0;
  RequestId request = 0;
  std::int64_t offset = 0, bytes = 0;  // within the step's place of the ring of entries
};

// What the host knows of a step. Decoding requests have at most max_decode_rows rows together; the
// device packs those that there are.
struct RunAheadStep {
  std::int64_t index = -1;
  int ring = 0;  // its place in the rings
  int num_prompts = 0, num_decodes = 0;
  int num_prompt_rows = 0, num_prompt_logits = 0;
  int max_decode_rows = 0;
  int max_rows = 0, max_kv_len = 0;  // of any one request, upper bounds
  // Of the step's choices, those that the host makes; their scores go into the ring, in this order.
  std::vector<int> host_choices;
  bool needs_scores = false;  // somebody samples: best tokens are not enough
  std::vector<SlotEntry> entries;
};

struct RunAheadRings {
  std::int32_t* staging = nullptr;        // [depth + 2, StagingLayout::words]
  std::byte* entries = nullptr;           // [depth + 2, entry_bytes()]
  const std::int32_t* results = nullptr;  // [depth + 2, result_words()]
  const float* scores = nullptr;          // [depth + 2, max_host_rows(), vocab_size]
};

// Scores of the host's choices of one step after processors that only the caller knows.
struct HostScores {
  const float* rows = nullptr;  // [host choices, vocab_size]; null: none was changed
  std::int64_t row_stride = 0;
  std::map<RequestId, std::string> errors;  // requests whose processor failed: they end with it
};

struct RunAheadStats {
  ExecutorStats executor;  // as the synchronous executor counts
  int in_flight = 0;       // steps that were planned and not delivered
  int retiring = 0;        // requests that have ended, whose pages a step in flight may touch
  std::int64_t late_results = 0;  // results of requests that had ended; dropped
  std::int64_t empty_steps = 0;   // steps in which the device found nothing to do
};

class RunAheadExecutor {
 public:
  explicit RunAheadExecutor(const RunAheadConfig& config);
  ~RunAheadExecutor();

  const RunAheadConfig& config() const { return config_; }
  const SlotLayout& slot_layout() const { return layout_; }
  const StagingLayout& staging_layout() const { return staging_; }
  int ring_size() const { return config_.depth + 2; }
  std::int64_t entry_bytes() const { return entry_bytes_; }
  // The golden token and the drafts of one step, of a request that sets nothing of its own.
  int max_rows_per_request() const;
  // A SlotResult and the StatusFlag bits of each request: results [B], then flags [B].
  int result_words() const;

  int max_host_rows() const { return std::min(config_.max_batch_size, kMaxHostRows); }

  // Once, before the first plan().
  void bind_rings(const RunAheadRings& rings);

  RequestId submit(RequestParams params);
  // What one forward pass costs; as Executor::set_step_cost().
  void set_step_cost(std::vector<int> rows, std::vector<double> seconds, double context_len = 0.0,
                     std::vector<double> growth = {});
  // What making drafts costs a step beside their rows.
  void set_draft_cost(const DraftCost& cost);
  // What is in flight for it is dropped. False: unknown id, or it has ended.
  bool cancel(RequestId id);

  // Null: nothing to enqueue now. At most `depth` steps may be unread.
  const RunAheadStep* plan();
  // The oldest step in flight: whose choices the host makes, in the order of its scores; 0:
  // nobody's any more.
  std::vector<RequestId> host_requests() const;
  int oldest_ring() const;
  // The oldest step in flight. The caller has seen its event complete. `changed`: what the callers'
  // own processors made of its scores.
  std::vector<StepOutput> deliver(const HostScores& changed = {});
  // Forgets the published pages that nobody holds; returns how many.
  int reset_prefix_cache();
  // A step in flight could not be enqueued as a whole: its requests end with an error. It still has
  // to be delivered, after an event behind what was enqueued of it.
  std::vector<StepOutput> fail(std::int64_t index, const std::string& message);

  int in_flight() const;
  int num_unfinished() const;
  RunAheadStats stats() const;
  // Pages that a request holds, in order; those of ended requests too until they are given back.
  std::vector<std::int32_t> pages(RequestId id) const;

 private:
  struct Request;
  struct Part;
  struct Flight;

  void check(const RequestParams& params) const;
  void check_schedule() const;
  int max_drafts(const RequestParams& params) const;
  int max_path(const RequestParams& params, int drafts) const;
  void admit();
  int prefill_rows(const Request& request, int budget) const;
  bool stage_entry(Request& request);
  void place_prompt(Request& request, int rows);
  void place_rows(Request& request, int start, int rows, bool decides);
  void collect();
  void deliver_choice(Request& request, const float* raw, const float* scores, StepOutput& out);
  std::int64_t pages_needed(const Request& request) const;
  void attach_prefix(Request& request);
  bool better_wait(const Request& request, std::size_t index) const;
  void publish(Request& request, std::int64_t count);
  void choose_chain_limits(int most_drafts, int each);
  AheadShare choose_share(Request& request, int most_drafts);
  void place_decode(Request& request, int most_drafts);
  void learn(Request& request, const Part& part, const SlotResult& result);
  void stage_pages(const Request& request, int index);
  void stage_law(std::int32_t* place, const Request* request, int index) const;
  void deliver_result(Request& request, const SlotResult& result, StepOutput& out);
  void end(Request& request);
  void release_retired(std::int64_t delivered);
  std::int64_t outstanding_pages() const;
  std::int32_t* staged(int offset) { return place_ + offset; }

  RunAheadConfig config_;
  SlotLayout layout_;
  StagingLayout staging_;
  std::int64_t entry_bytes_ = 0;
  PageTable pages_;
  RunAheadRings rings_;
  StepCost step_cost_, cost_now_;  // as measured; for the contexts of the step that is planned
  ChainRates shared_rates_;
  DraftCost draft_cost_;
  std::map<int, SizeArms> shared_sizes_;  // of all requests, by their most drafts
  RunAheadStep step_;
  double planned_drafts_ = 0.0;       // rows that step_ is expected to draft
  std::int32_t* place_ = nullptr;     // of step_ in the staging ring
  std::vector<int> staged_pages_;     // [ring, B] entries of each staged row of the page table
  std::vector<std::uint64_t> block_;  // an entering slot, before it is staged

  mutable std::mutex mutex_;
  RequestId next_id_ = 1;
  std::int64_t next_step_ = 0;
  std::deque<std::unique_ptr<Request>> waiting_;
  std::vector<std::unique_ptr<Request>> running_;   // in order of admission
  std::vector<std::unique_ptr<Request>> retiring_;  // ended, named by a step in flight
  std::vector<Request*> decoding_, choosing_;       // scratch of plan()
  std::vector<ChainOffer> chain_offers_;            // by position in decoding_
  std::vector<int> free_slots_;
  std::deque<Flight> flights_;  // steps in flight, oldest first
  RunAheadStats totals_;
};

}  // namespace specdec
