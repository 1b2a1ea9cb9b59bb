// The executor: who takes part in which step, what a step brought, and nothing of the model.
//
//   plan()     host only: who takes part, which pages, bounds on rows; writes one place of the
//              staging ring
//   ...        drafts, geometry, forward pass, acceptance, commit: on a device the caller enqueues
//              them as operations on a stream; on the host the executor runs them itself, build()
//              in front of the forward pass and commit() behind it (immediate.cc)
//   deliver()  the oldest step in flight: new tokens, ends, pages back
//
// The requests' state lives in slots (algo/slot.h) of the memory where steps run. Up to
// `overlap_depth` steps are enqueued while one is read; depth changes when the host reads, never
// what is decided. What the host knows when it plans step t are the results up to step t - depth -
// 1, so it plans with bounds: pages for as many tokens as the steps in flight could bring at most,
// rows for as many drafts as the slots may make. Where the host runs the steps, a step has run when
// it was enqueued, and the bounds are exact.
//
// On a device, requests that need the host in each step (tokens that it chooses from scores, drafts
// that it makes) take part at depth 0 beside others that run ahead. Their slots lie in the host's
// memory: it drafts and stages the tree, the device computes scores of its rows, deliver() accepts
// as commit() does where the host runs the steps, and the next step moves K/V that needs it.
//
// submit(), cancel(), propose() and stats() may be called from any thread at any time, plan(),
// build(), commit() and deliver() from one thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "algo/shared_ngram_pool.h"
#include "algo/slot_host.h"
#include "backend/backend.h"
#include "engine/config.h"
#include "engine/executor_stats.h"
#include "engine/host_accept.h"
#include "engine/immediate.h"
#include "engine/page_pools.h"
#include "engine/per_salt.h"
#include "engine/request.h"
#include "engine/request_book.h"
#include "engine/staging.h"
#include "engine/step_cost.h"
#include "engine/window_memory.h"

namespace specdec {

class Executor {
 public:
  explicit Executor(const ExecutorConfig& config);
  ~Executor();

  const ExecutorConfig& config() const { return config_; }
  const SlotLayout& slot_layout() const { return layout_; }
  const StagingLayout& staging_layout() const { return staging_; }
  int ring_size() const { return config_.overlap_depth + 2; }
  std::int64_t entry_bytes() const { return entry_bytes_; }
  // The golden token and the drafts of one step, of a request that sets nothing of its own.
  int max_rows_per_request() const { return 1 + max_drafts_of(config_); }
  // A SlotResult and the StatusFlag bits of each request: results [B], then flags [B].
  int result_words() const;
  int tree_words() const { return sizeof(DraftTree) / sizeof(std::int32_t); }
  // Rows of one step on a device whose scores the host reads; others wait for their turn.
  int max_host_rows() const { return std::min(config_.max_num_tokens, kMaxStepTokens); }

  // One of these, once, before the first plan(). bind_rings: steps run on a device, in the caller's
  // hands. run_on_host: build() and commit() run them, over `cache`.
  void bind_rings(const StepRings& rings);
  void run_on_host(const KvCacheView& cache, const Backend& backend);
  const HostSteps* host() const { return host_.get(); }
  // Where the host runs the steps and has a pool for preempted requests: what is copied. Before the
  // first plan().
  void bind_host_pages(PagePools pools);

  void set_step_cost(std::vector<int> rows, std::vector<double> seconds, double context_len = 0.0,
                     std::vector<double> growth = {}, const PrefillScale& prefill = {});
  // What making drafts costs a step besides their rows.
  void set_draft_cost(const DraftCost& cost);

  // The id of a request that submit() will bring, so that its caller can prepare for it: it may be
  // planned before submit() has returned.
  RequestId reserve();
  // external_probs: what params.external_drafts were drawn from.
  RequestId submit(RequestParams params, const ProposedProbs& external_probs = {});
  // What is in flight for it is dropped. False: unknown id, or it has ended.
  bool cancel(RequestId id);
  // Where the request's slot is the host's: drafts for its next decode step that is planned, used
  // once, in place of its own drafter's. parents[i] is the index of draft i's parent among the
  // drafts, -1 for the golden token. A refused proposal leaves none.
  void propose(RequestId id, const std::vector<TokenId>& tokens,
               const std::vector<std::int32_t>& parents, const ProposedProbs& probs = {});
  // What a grammar allows alone behind history(), for the request's next decode step: drafts that
  // are sure to be accepted. Used once; ignored where a step in flight decides the next token.
  void force(RequestId id, std::vector<TokenId> tokens);
  // The output from token `first` on, if nothing in flight decides more of it; else nothing.
  std::vector<TokenId> output(RequestId id, int first) const;
  // Prompt and tokens, on the host as far as steps have run.
  std::vector<TokenId> history(RequestId id) const;
  // Past its prefill, and its next token follows history(): no step in flight decides one.
  bool decoding(RequestId id) const;
  // Drafts of one request that draft_len_schedule allows for the requests that run now.
  int draft_len_limit() const;

  // Null: nothing to enqueue now. At most `overlap_depth` steps may be unread.
  const StagedStep* plan();
  // On the host, between plan() and build(): makes the drafts. The trees of requests with a
  // grammar.
  std::vector<ChoiceTree> draft();
  // Then: takes the drafts out of a request's tree that its grammar does not allow, and what is
  // below them. kept: one entry for each node; the first ChoiceTree::fixed stay.
  void cut(RequestId id, const std::vector<std::uint8_t>& kept);
  // On the host: drafts, and the arrays of the step that was planned last. Valid until the next.
  const StepPlan* build();
  // On the host, after the forward pass of build()'s plan. scores [L, V] (rows `row_stride`
  // elements apart) are given when plan.needs_logits; ids [L] (greedy choices by the model's own
  // scores, -1 for a row that holds a NaN) when not, and else if they are known. Throws before
  // anything is changed.
  void commit(const StepPlan& plan, const TokenId* ids, const float* scores,
              std::int64_t row_stride, const ScoreChanges& changes = {},
              const HiddenRows& hidden = {}, const StepDraftProbs& drawn = {});

  // The trees whose scores the caller's own processors or grammars change: of build()'s plan, or of
  // the oldest step in flight on a device. Those of requests that have ended are left out.
  std::vector<ChoiceTree> choice_trees();
  // Rows of scores of the oldest step in flight on a device, and its place in the rings.
  int oldest_host_rows() const;
  int oldest_ring() const;
  // The oldest step in flight. The caller has seen its event complete. scores [oldest_host_rows(),
  // V]: what processors made of them, null: they changed nothing.
  std::vector<StepOutput> deliver(const float* scores = nullptr, const HostWords& words = {});
  // A step in flight could not be enqueued as a whole: its requests end with an error. It still has
  // to be delivered, after an event behind what was enqueued of it.
  std::vector<StepOutput> fail(std::int64_t index, const std::string& message);

  // The same for the step that build() returned.
  std::vector<StepOutput> fail_planned(const StepPlan& plan, const std::string& message);

  // Forgets the published pages that no request holds and returns their number. Call it before
  // writing into pages without the executor.
  int reset_prefix_cache();
  int in_flight() const;
  std::vector<std::int64_t> steps_in_flight() const;  // their indices, oldest first
  // The step that plan() has planned last, for a caller that was interrupted before enqueuing it.
  const StagedStep& newest() const { return step_; }
  int num_unfinished() const;
  ExecutorStats stats() const;
  // Pages that a request holds, in order; those of ended requests too until they are given back.
  std::vector<std::int32_t> pages(RequestId id) const;

 private:
  using Place = InFlightStep::Place;

  // executor.cc
  int method_drafts(const RequestParams& params) const;
  int max_drafts(const RequestParams& params) const;
  int max_path(const RequestParams& params, int drafts) const;
  SlotRequest slot_request(RequestRecord& request, bool take_prompt) const;
  void end(RequestRecord& request);
  void follow_orders();
  // check.cc
  void check(const RequestParams& params) const;
  bool needs_host(const RequestParams& params) const;
  int max_external_drafts(const RequestParams& params) const;
  // plan.cc
  void make_room();
  void begin_step();
  void collect();
  // What a step's own method brought: its drafts, how many of them were right, and which, as places
  // in the drafter's order, if that is known of all (else none).
  struct Brought {
    int drafts = 0, accepted = 0;
    std::span<const int> right = {};
  };
  // What prompts may add to a step: seconds beside `rows` rows that it has already.
  struct PrefillRoom {
    bool limited;
    double seconds;
    int decoding, rows;
  };
  PrefillRoom prefill_room(int decoding) const;
  int room_for(const RequestRecord& request, const PrefillRoom& room, int budget) const;
  int prefill_rows(const RequestRecord& request, int budget) const;
  void place_prompt(RequestRecord& request, int rows);
  void place_rows(RequestRecord& request, int start, int rows, const DraftTree* drafts,
                  bool decides);
  // `each`: as draft_len_schedule says, or, where there is none, what the method makes.
  int most_drafts_of(const RequestRecord& request, int each) const {
    if (request.knows_drafts() && config_.draft_len_schedule.empty()) {
      each = std::max(each, request.known_drafts);
    }
    each = std::min(each, request.page_room);
    return request.by_host ? std::min(each, host_drafts_each_) : each;
  }
  void place_decode(RequestRecord& request, int most_drafts, int arm);
  std::int32_t* staged(int offset) { return place_ + offset; }
  // weigh.cc
  bool weighs(const RequestRecord& request) const;
  StepBase step_base(int rows, double tokens, int max_more_rows) const;
  void weigh_beginning(RequestRecord& request);
  void weigh_lookups(int most_drafts, int each);
  void choose_arms(int most_drafts, int each);
  DraftShare share_of(RequestRecord& request, int most_drafts, int arm) const;
  DraftShare asked_of(const RequestRecord& request, int most_drafts, int arm) const;
  // stage.cc
  bool enter(RequestRecord& request);
  bool stage_entry(SlotEntry entry, const void* bytes);
  bool mirror(RequestRecord& request);
  void place_moves(RequestRecord& request, int index);
  void stage_pages(const RequestRecord& request, int index, std::int64_t from, std::int64_t to);
  static void fill_page_row(const std::vector<std::int32_t>& pages, std::int32_t* row,
                            std::int32_t behind = 0);
  void stage_law(std::int32_t* place, const RequestRecord* request, int index) const;
  // draft.cc
  void look_up(RequestRecord& request, int most, int room);
  void offer_ngram(RequestRecord& request, int most);
  void offer_chain(RequestRecord& request, const Prediction& text,
                   std::span<const TokenId> following, DraftSource source, int most);
  void offer_forced(RequestRecord& request, int most);
  void keep_drafts(const RequestRecord& request, const SlotResult& result, StepOutput& out) const;
  void offer_suffix(RequestRecord& request, int most, int room);
  void offer_model(RequestRecord& request, int most, int room);
  void cut_proposed_drafts();
  void merge_lookahead(RequestRecord& request);
  void place_proposal(RequestRecord& request, const DraftShare& share);
  void draft_on_host(RequestRecord& request, const DraftShare& share);
  void take_external(RequestRecord& request, int drafts);
  // immediate.cc
  void enter_on_host(RequestRecord& request);
  void keep_hidden(const HiddenRows& hidden) const;
  void draft_places();
  void draft_place(Place& place, int index);
  void build_place(Place& place, int index);
  void draw_roots(const float* scores, std::int64_t row_stride);
  void commit_place(Place& place, int index, const TokenId* ids, const float* scores,
                    std::int64_t row_stride, const ScoreChanges& changes,
                    const StepDraftProbs& drawn);
  void move_kv();
  // grammar.cc
  ChoiceTree choice_tree(const Place& place, int first) const;
  void check_masks(const HostWords& words) const;
  // decide.cc
  void decide_place(Place& place, const StepShare& share, const PlaceRows& rows,
                    const HostWords& words, const StepDraftProbs* drawn, int drawn_index,
                    SlotResult* result, std::int32_t* path, std::int32_t* path_len);
  void count_sources(RequestRecord& request, const SlotResult& result, StepOutput& out);
  void deliver_on_host(Place& place, int root, const PlaceRows& rows, SlotResult* result);
  void learn_on_host(RequestRecord& request, const StepShare& share, const SlotResult& result,
                     bool first);
  Brought brought_on_host(const RequestRecord& request, const SlotResult& result);
  void feed_pool(RequestRecord& request, int at_least);
  // deliver.cc
  Brought brought_on_device(const RequestRecord& request, const StepShare& share,
                            const SlotResult& result);
  void learn(RequestRecord& request, const StepShare& share, const SlotResult& result,
             const Brought& brought);
  void deliver_result(RequestRecord& request, const SlotResult& result, StepOutput& out);
  bool read_tree(Place& place, int ring);
  void choose_place(Place& place, const StepShare& share, int first_row, const float* raw,
                    const float* scores, const HostWords& words, SlotResult* result);
  void read_place(Place& place, const StepShare& share, const SlotResult& result, int flags,
                  StepOutput& out);
  void settle(RequestRecord& request, const Place& place, const StepOutput& out, int known_before);

  ExecutorConfig config_;
  SlotLayout layout_;
  StagingLayout staging_;
  std::int64_t entry_bytes_ = 0;
  RequestBook book_;
  StepRings rings_;
  std::unique_ptr<HostSteps> host_;  // null: steps run on a device
  StepCost step_cost_, cost_now_;    // as measured; for the contexts of the step that is planned
  PerSaltAndLaw<SourceRates> shared_rates_;
  DraftCost draft_cost_;
  Budget budget_;
  PerSaltAndLaw<std::map<int, SizeBandit>> shared_sizes_;  // by the requests' most drafts
  std::unique_ptr<SharedNgramPool> public_pool_;           // null: not public
  PerSalt<SuffixPast> suffix_pasts_{kMaxSuffixPasts};
  StagedStep step_;
  int host_rows_left_ = 0;                 // of step_, for prompts of requests that need the host
  int host_drafts_each_ = 0;               // of one such request that decodes
  std::int32_t* place_ = nullptr;          // of step_ in the staging ring
  std::vector<int> staged_pages_;          // [ring, B] entries of each staged row of the page table
  std::vector<std::int32_t> block_parts_;  // of a row of a narrow window's table
  std::vector<std::uint64_t> block_;       // an entering slot, before it is staged
  std::vector<SlotEntry> entered_;         // slots that the host has written since the last step
  PagePools page_pools_;                   // of steps that the host runs
  std::unique_ptr<WindowMemory> window_memory_;  // of steps that the host runs
  std::vector<PageOrder> orders_;                // a device's, since the last step
  std::vector<std::int32_t> followed_;           // the host's, as StepPlan::page_orders
  HostAcceptor acceptor_;
  AcceptResult accepted_;                    // of the request at hand
  std::vector<RootDraw> root_draws_;         // of the step that is committed
  std::vector<int> right_drafts_;            // of a Brought
  std::vector<std::int32_t> vocab_scratch_;  // [V] while a reduced vocabulary is checked

  mutable std::mutex mutex_;
  std::int64_t next_step_ = 0;
  std::vector<RequestRecord*> decoding_, choosing_;  // scratch of plan()
  std::vector<Offer> chain_offers_;                  // by position in decoding_
  std::vector<int> arms_chosen_;                     // the same; -1: none
  PromptShare prompts_;                              // of the step that is planned
  std::deque<InFlightStep> flights_;                 // steps in flight, oldest first
  ExecutorStats totals_;
};

}  // namespace specdec
