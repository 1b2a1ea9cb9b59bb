// The bookkeeping of a draft model: which tokens of which request it has read, where their K/V
// lies, and what it has proposed since the target last spoke.
//
// The caller owns the model and its forward pass, as with the executor. One round, per step of the
// target:
//
//   extend(slot, tokens)         what the target decided; K/V of drafts that came true is kept
//   repeat  plan(slots, ...)     one pass for all of them: what has not been read yet
//           take(scores)         one more draft of each, or one more level of its tree
//   drafts(slot)                 what to propose
//
// Validity never rests on the caller's counts: after extend() the K/V that counts is that of the
// longest common prefix of what was read and what was decided. A plan that is not taken, because
// the forward pass raised, changes nothing.
//
// Chains: the pass that makes draft i reads draft i - 1, so when all K drafts are accepted the next
// round's first pass reads the last of them together with the new golden token.
// Trees: a pass reads the golden token and all nodes expanded so far again, since only the rows of
// a step are masked. The K/V of accepted nodes is moved to its place when the target has spoken.
//
// Ids are the target's. A draft model with another table of ids gets them through `input_ids`, and
// its score columns mean `output_ids`.
//
// Not thread-safe: one thread at a time (from Python, the GIL).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "algo/draft_choice.h"
#include "backend/backend.h"
#include "engine/kv_moves.h"
#include "engine/step_plan.h"
#include "kv/page_table.h"

namespace specdec {

struct DraftRunnerConfig {
  int vocab_size = 0;    // ids of the target are 0..vocab_size-1
  int num_scores = 0;    // columns of a row of scores that may become drafts; more are ignored
  int max_requests = 0;  // slots
  int max_rows = 0;      // rows of one pass
  int max_len = 0;       // tokens of one request that the draft model has positions for
  std::vector<TokenId> input_ids;   // [vocab_size] what the model reads for an id; empty: the id
  bool enable_block_reuse = false;  // share full pages of decided tokens among equal salts
  std::vector<TokenId> output_ids;  // [num_scores] ascending ids of the columns; empty: the column
  bool defer_moves = false;         // extend() compacts nothing: take_moves() says what to move
};

enum class DraftMode : std::uint8_t { kBest, kCoupled, kOwn };  // algo/draft_choice.h

// What take() gives for a slot of the plan, in the place of a token id.
enum DraftStatus : TokenId {
  kNoDraft = -1,       // the row holds a NaN or an infinity
  kStillReading = -2,  // more prompt than the pass had rows for
  kNoPages = -3,       // the pool has no pages for this pass
  kTooLong = -4        // more tokens than the draft model has positions
};

struct DraftNode {
  TokenId token = 0;
  std::int32_t parent = -1;  // among the request's nodes, -1: the golden token
  std::int32_t depth = 1;
  float confidence = 0.0f;  // of the token behind its parent (algo/draft_choice.h)
  float value = 0.0f;       // product of the confidences along its path
  std::int32_t row = -1;    // trees: its row in the passes of this round, -1: never read
};

class DraftRunner {
 public:
  DraftRunner(const DraftRunnerConfig& config, const KvCacheView& cache, const Backend& backend);

  // A slot for a request with these tokens, the last of which is the golden one; -1: none is free.
  int open(std::vector<TokenId> tokens, const SamplingLaw& law, std::uint64_t seed, DraftMode mode,
           std::string salt);
  void close(int slot);
  // Appends decided tokens and ends the round. Returns what it says about the round's drafts:
  // (confidence, came true) of every node whose parent came true.
  std::vector<std::pair<float, bool>> extend(int slot, const std::vector<TokenId>& tokens);

  // The next pass for these slots; null: nothing to read, see statuses(). A slot with more than a
  // few unread tokens gets rows out of `prefill_rows`, which all such slots share.
  const StepPlan* plan(const std::vector<int>& slots, int prefill_rows, bool needs_scores);
  // Chains. ids [L] or scores [L, >= num_scores] of the plan's logit rows, rows `row_stride` apart.
  // Afterwards statuses() holds a token or a DraftStatus for each slot of the plan.
  void take_ids(const TokenId* ids);
  void take_scores(const float* scores, std::int64_t row_stride);
  // Trees: every row gets its `top_k` likeliest children; the `top_k` most valuable of them all are
  // expanded by the next pass. statuses(): how many these are, or a DraftStatus.
  void take_level(const float* scores, std::int64_t row_stride, int top_k);

  // With defer_moves, before plan(): what extend() would have moved; the caller does it before any
  // kernel of a later pass.
  KvMoves take_moves();

  const std::vector<TokenId>& statuses() const { return statuses_; }
  const std::vector<float>& confidences() const { return confidences_; }  // of a chain's new drafts
  const std::vector<DraftNode>& nodes(int slot) const;
  // The `count` most valuable nodes, parents before children; indices into nodes().
  std::vector<std::int32_t> best_nodes(int slot, int count) const;

  // DraftMode::kOwn: q of the i-th draft of a slot goes to probs[slot, i, 0..num_scores).
  void bind_probs(float* probs, int max_drafts);

  int cached(int slot) const;  // tokens of the request whose K/V is in place
  const std::vector<std::int32_t>& pages(int slot) const { return pages_.pages(slot); }
  int free_pages() const { return pages_.free_pages(); }
  int total_pages() const { return pages_.num_pages(); }
  const ReuseStats& reuse_stats() const { return pages_.reuse_stats(); }
  std::size_t memory_bytes()
      const;  // of the step buffers and histories; the pages are the caller's
  const DraftRunnerConfig& config() const { return config_; }
  void check_integrity() const { pages_.check_integrity(); }

 private:
  struct Sequence {
    bool open = false;
    DraftMode mode = DraftMode::kBest;
    SamplingLaw law;
    std::uint64_t seed = 0;
    std::string salt;
    bool begun = false;  // it has looked for published pages
    std::vector<TokenId> history;
    std::vector<DraftNode> nodes;
    std::vector<std::int32_t> expanded;  // trees: nodes that have a row, in row order
    std::vector<std::int32_t> frontier;  // trees: nodes that the next pass reads for the first time
    // Chains: contiguous tokens of history and nodes with K/V. Trees: of history alone.
    int cached = 0;
  };
  struct Planned {
    int slot, index;  // index: in the caller's list
    int rows;
    int first_logit, num_logits;
  };

  Sequence& sequence(int slot);
  int unread(const Sequence& s) const;
  void place(int slot, int index, int rows);
  void place_chain(const Sequence& s, int rows);
  void place_tree(Sequence& s);
  void begin(int slot);
  void publish(int slot);
  bool reserve(int slot, std::int64_t tokens);
  void settle(const Planned& planned);
  int keep_chain(Sequence& s, const std::vector<TokenId>& tokens,
                 std::vector<std::pair<float, bool>>* seen) const;
  int keep_tree(int slot, const std::vector<TokenId>& tokens,
                std::vector<std::pair<float, bool>>* seen);
  void move_rows(int slot, const std::vector<std::int32_t>& rows);
  DraftChoice choose(Sequence& s, int slot, const float* scores);
  TokenId target_id(std::int32_t column) const;
  bool is_tree(const Sequence& s) const { return !s.frontier.empty() || !s.expanded.empty(); }

  DraftRunnerConfig config_;
  KvCacheView cache_;
  const Backend& backend_;
  PageTable pages_;
  StepPlan plan_;
  std::vector<Sequence> sequences_;
  std::vector<Planned> planned_;
  std::vector<TokenId> statuses_;
  std::vector<float> confidences_;
  DraftChooser chooser_;
  std::vector<DraftChoice> choices_;
  float* probs_ = nullptr;
  int probs_drafts_ = 0;
  std::vector<std::int32_t> path_;  // [kMaxStepTokens] of a compaction
  KvMoves moves_;                   // that wait, if they are deferred
};

}  // namespace specdec
