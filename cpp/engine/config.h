// What an executor is made from: sizes, how drafts are made, how far steps overlap.
#pragma once

#include <vector>

#include "algo/lookahead_state.h"
#include "algo/suffix_draft.h"
#include "base/pages.h"
#include "base/types.h"
#include "engine/draft_len_schedule.h"
#include "engine/swap_law.h"

namespace specdec {

// Steps that may be enqueued while one is read.
inline constexpr int kMaxOverlapDepth = 2;

// kProposed: drafts come from outside, written into slots by operations in front of the step
// (algo/proposed_draft.h) or handed in by propose().
enum class DraftMethod : std::uint8_t { kNone, kLookahead, kNgram, kSuffix, kProposed };

// Who is admitted.
//   kGuaranteedNoEvict  whose worst case fits into the pages that are not promised to others
//   kMaxUtilization     whose prompt fits now; where pages run out the newest request gives its own
//                       back; its K/V is copied to the host meanwhile, or computed again when there
//                       is room
enum class SchedulerPolicy : std::uint8_t { kGuaranteedNoEvict, kMaxUtilization };

struct NgramParams {
  int max_draft_len = 4;
  int max_matching_ngram_size = 2;
  bool is_keep_all = true;
  bool is_use_oldest = true;
  bool is_public_pool = false;
};

struct ExecutorConfig {
  int vocab_size = 0;
  int max_batch_size = 32;
  int max_seq_len = 0;
  int max_num_tokens = 0;  // rows of one step
  int num_pages = 0, page_size = 0;
  DraftMethod method = DraftMethod::kNone;
  LookaheadConfig lookahead;
  NgramParams ngram;
  SuffixLookup suffix;
  // kProposed, kLookahead: drafts of `suffix` enter a step's tree beside the method's, which is
  // asked for some where they are not worth more.
  bool with_suffix = false;
  // Suffix decoding searches outputs of so many earlier requests with the same salt, too.
  int suffix_cached_requests = 0;
  // kProposed: draft nodes of one step, and the deepest of them.
  int proposed_max_draft_len = kMaxDraftLen, proposed_max_path = kMaxDraftLen;
  bool proposed_by_host = false;  // kProposed: all drafts come by propose()
  // Predictions draft no deeper: trees of a model whose arithmetic depends on the deepest draft.
  int max_draft_depth = kMaxDraftLen;
  int overlap_depth = 0;  // steps that are enqueued while one is read
  bool adaptive = true;   // draft budgets follow what was accepted, once set_step_cost() was called
  bool pads_rows = false;  // the model runs as many rows as were planned, not as were drafted
  bool enable_chunked_prefill = true;
  // With T(rows) known: rows of prompts beside requests that decode make the step at most this many
  // times as long as it is without them. 0: no limit.
  double max_prefill_slowdown = 0.0;
  SchedulerPolicy policy = SchedulerPolicy::kGuaranteedNoEvict;
  // What a row of the model sees at most, whatever its layer. Pages behind it are given back.
  AttentionSpan attention;
  // By layer, empty: none. Layers with these windows (0: a layer that has none) hold their part of
  // a page while it does not lie behind them, though the page stays (kv/page_parts.h). Where the
  // host runs the steps their memory is mapped when it is written, and goes back to the system
  // (engine/window_memory.h); on a device they have pools of their own, and tables of those.
  std::vector<int> narrow_windows;
  std::int64_t narrow_sink_tokens = 0;
  std::vector<int> narrow_pages;  // parts that there is room for, by narrow_groups(); empty: all
  // kMaxUtilization: pages of the host's pool, and the way there. 0: K/V is always computed again.
  int num_host_pages = 0;
  HostLink host_link;
  bool enable_block_reuse = false;  // requests start from published pages of equal text and salt
  bool check_integrity = false;
  DraftLenSchedule draft_len_schedule;
  // Not empty: requests with speculation keep drafts at these rates instead of what the target
  // says (algo/synthetic_acceptance.h). For measurements only; read where the host accepts.
  std::vector<double> synthetic_acceptance_rates;
};

// The distinct windows among narrow_windows, ascending. Layers of one window are a group.
std::vector<int> narrow_groups(const std::vector<int>& narrow_windows);

// With an attention window: rows of a prompt in one step, at most, and of a text that is read
// again; 0: any. And pages that one text holds at once, at most, if its first step that decides
// reads `prompt` tokens and later ones `step` rows.
int prompt_chunk(const ExecutorConfig& config);
int text_chunk(const ExecutorConfig& config, std::int64_t step);
std::int64_t pages_in_window(const ExecutorConfig& config, std::int64_t prompt, std::int64_t step);

// Draft nodes of one step, at most: of the method, and of all sources.
int max_drafts_of(const LookaheadConfig& triple);
int method_drafts_of(const ExecutorConfig& config);
int max_drafts_of(const ExecutorConfig& config);

// Drafts from outside that are no trees: as many as the longest path has.
inline bool proposes_chains(const ExecutorConfig& c) {
  return c.method == DraftMethod::kProposed && c.proposed_max_path == c.proposed_max_draft_len;
}

// Drafts can only be made by the host, wherever steps run.
inline bool drafts_on_host(const ExecutorConfig& c) {
  return c.method == DraftMethod::kProposed
             ? c.proposed_by_host
             : c.with_suffix || c.suffix_cached_requests > 0 ||
                   (c.method == DraftMethod::kNgram && c.ngram.is_public_pool);
}

// The configuration itself; throws std::invalid_argument naming field, value, limit and remedy.
const ExecutorConfig& checked_config(const ExecutorConfig& config);

}  // namespace specdec
