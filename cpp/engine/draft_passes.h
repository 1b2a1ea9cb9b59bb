// The passes of a draft model in steps that run where they are enqueued: which rows each pass
// reads, and what it proposes, from the texts in the slots. The caller owns both models; per step
// it does
//
//   begin(round)                   whose drafts are wanted
//   while (plan = plan()) {        one pass for all of them
//     take(model(*plan));          one more draft of each, or one more level of its tree
//   }                              the drafts lie in the slots
//
// The draft model has pages with the ids of the target's, so a request's page table names both.
// What it has read of a text is known per slot. A step reads what is missing (the golden token, and
// what came in steps in which the request did not draft) with its first pass; a long rest is read
// in pieces, and the request drafts when it is done. Prompts are read beside the target:
// plan_prompts().
//
// Chains: the pass that makes draft i reads draft i - 1, so the last one is read by the next step,
// if it was accepted. Trees: a pass reads the golden token and all opened nodes again, since only
// the rows of a step are masked (algo/draft_growth.h).
//
// Heads (`takes_features`): a row reads a feature beside its token, sources() says which. Rows of
// drafts read what the pass before made, so what they leave is not what a text leaves: the next
// step reads accepted drafts again. The first token of a text has no feature in front of it and no
// row.
//
// A pass that raised is not taken: what was read stays known, and the drafts so far are dropped.
// Not thread-safe: one thread at a time (from Python, the GIL).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "algo/draft_growth.h"
#include "algo/sample.h"
#include "backend/accept_ops.h"
#include "backend/slot_ops.h"
#include "engine/step_plan.h"

namespace specdec {

struct DraftPassesConfig {
  int vocab_size = 0;  // ids of the target are 0..vocab_size-1
  int num_scores = 0;  // columns of a row of scores that may become drafts; more are ignored
  int num_slots = 0;
  int max_rows = 0;                // of one pass
  int max_len = 0;                 // tokens of one text that the draft model has positions for
  int max_drafts = 0;              // of one request in one step
  int top_k = 1;                   // more than 1: a tree of so many children
  int max_depth = 0;               // levels of a tree
  bool takes_features = false;     // the model is a head on the target's own states
  float min_confidence = 0.0f;     // a chain ends behind a draft to which the model gives less
  std::vector<TokenId> input_ids;  // [vocab_size] what the model reads for an id; empty: the id
  std::vector<TokenId>
      output_ids;  // [num_scores] ascending tokens of the columns; empty: the column
};

// How the drafts of a request that samples are chosen.
//   kBest     the likeliest token
//   kCoupled  the draw with the number that the target will use at that position: where the models
//             agree on a distribution they draw the same token, and exact match takes it
//   kOwn      a draw from q, the request's law applied to the draft model's scores; q is left in
//             bind_probs()' memory, for acceptance by probabilities
enum class DraftPick : std::int32_t { kBest, kCoupled, kOwn };

// The requests of a step that decode. All memory is the caller's and lives until the round's end.
struct DraftRound {
  SlotPoolView slots;
  const std::int32_t* slot_ids = nullptr;    // [D]
  const std::int32_t* max_drafts = nullptr;  // [D]
  const std::int32_t* page_table = nullptr;  // [D, max_pages]
  int max_pages = 0;
  SamplingView laws;  // [D]; null: no request samples
  int num_requests = 0;
  // Tokens that a pass has to bring: requests that are `adaptive` stop where they expect fewer. 0:
  // passes are free. Needs scores.
  double pass_price = 0.0;
};

// Rows of prompts that the target reads in the same step.
struct PromptPieces {
  const TokenId* tokens = nullptr;           // [R]
  const std::int32_t* slot_ids = nullptr;    // [P] -1: no drafts are wanted for it
  const std::int32_t* kv_len = nullptr;      // [P]
  const std::int32_t* cu_rows = nullptr;     // [P + 1]
  const std::int32_t* page_table = nullptr;  // [P, max_pages]
  int max_pages = 0;
  int num_requests = 0, num_rows = 0;
};

class DraftPasses {
 public:
  explicit DraftPasses(const DraftPassesConfig& config);

  // The draft model's pages.
  void bind_pages(int page_size, int num_pages);

  // A request takes a slot: nothing of its text was read.
  void enter(int slot, DraftPick mode, bool adaptive = true);

  // `gives_scores`: the passes are to give scores, not ids, which say nothing of how sure they are.
  void begin(const DraftRound& round, bool gives_scores);
  const StepPlan* plan();
  // ids [L] or scores [L, >= num_scores] of the plan's logit rows, rows `row_stride` apart.
  void take_ids(const TokenId* ids);
  void take_scores(const float* scores, std::int64_t row_stride);

  // takes_features, by the rows of the plan: the row of the pass before whose result is the row's
  // feature; -1: the feature of the position in front of it, by the target.
  const std::int32_t* sources() const { return sources_.data(); }

  // The rows of prompts as far as the draft model has positions; null: none. The caller drops what
  // the pass gives.
  const StepPlan* plan_prompts(const PromptPieces& prompts);
  void take_prompts();

  // DraftPick::kOwn, by the step's requests: q [max_requests, max_drafts, num_scores], where each
  // draft stands in it [max_requests, max_drafts], and whose drafts were drawn [max_requests].
  void bind_probs(float* probs, std::int32_t* columns, std::uint8_t* drawn);
  bool draws() const { return draws_; }  // somebody's drafts of this round are drawn

  const DraftPassesConfig& config() const { return config_; }
  std::size_t memory_bytes() const;
  // Tokens of the slot's text whose K/V was in place when its last round began.
  int num_read(int slot) const { return slots_[slot].read; }

 private:
  // What is known of a slot's text.
  struct Reading {
    DraftPick mode = DraftPick::kBest;
    bool adaptive = true;
    int read = 0;                 // tokens of the text whose K/V is in place
    std::vector<TokenId> drafts;  // read behind them, in place if they came true
  };
  // A request of this round that drafts.
  struct Drafting {
    int request, slot, len;
    int limit, depth;  // drafts of the round; levels
    DraftPick mode = DraftPick::kBest;
    int made = 0;  // drafts of a chain; levels of a tree
    bool ends = false;
    int golden_row = 0;  // of the last pass, and where the pass has the rows of the nodes
    int first_row = 0;
    DraftGrowth growth;  // a chain is kept in it, too
  };
  struct Planned {
    int index, rows, first_logit;  // index: in drafting_
  };

  void open_plan(int max_pages, bool gives_scores);
  // The request's rows follow those of the plan; false: it lacks a page for them.
  bool add_request(const std::int32_t* pages, int request, int kv_len, int rows);
  void put_row(int row, TokenId token, int position, int parent, int source = -1);
  void stop_where_dear();
  double chance_below(const Drafting& d) const;
  void place(int index, int most);
  void place_tree(Drafting& d);
  void settle(const Planned& planned);
  void add_draft(Drafting& d, std::int32_t column, float confidence);
  void choose(Drafting& d, const float* scores);
  void grow(Drafting& d, const float* scores, std::int64_t row_stride);
  void propose();
  bool is_tree() const { return config_.top_k > 1; }
  const Slot* slot(const Drafting& d) const { return round_.slots.at(d.slot); }

  DraftPassesConfig config_;
  int page_size_ = 1, num_pages_ = 0;
  std::unique_ptr<StepPlan> plan_;
  std::vector<std::int32_t> sources_;  // [max_rows]
  std::vector<Reading> slots_;
  DraftRound round_;
  bool gives_scores_ = false, draws_ = false;
  std::vector<Drafting> drafting_;
  std::vector<Planned> planned_;
  struct PromptEnd {
    int slot, end;
  };
  std::vector<PromptEnd> prompt_ends_;
  TokenSampler sampler_;
  DraftGrowthScratch scratch_;
  std::vector<float> shares_;          // [rows, top_k]
  std::vector<std::int32_t> columns_;  // [rows, top_k]
  std::vector<std::int32_t> order_;
  float* probs_ = nullptr;
  std::int32_t* probs_columns_ = nullptr;
  std::uint8_t* drawn_ = nullptr;
};

}  // namespace specdec
