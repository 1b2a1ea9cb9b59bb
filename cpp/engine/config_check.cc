// Contradictions of an executor's configuration.
#include <algorithm>
#include <cmath>
#include <set>

#include "algo/law_mass.h"
#include "algo/slot_host.h"
#include "base/check.h"
#include "engine/config.h"
#include "engine/prediction.h"
#include "engine/synthetic_rates.h"

namespace specdec {

int prompt_chunk(const ExecutorConfig& c) {
  // Fewer rows would not share a step's own work well.
  constexpr std::int64_t kLeast = 256;
  if (c.attention.window == 0 || !c.enable_chunked_prefill) return 0;
  return static_cast<int>(std::clamp<std::int64_t>(c.attention.window, kLeast, 1 << 30));
}

namespace {

std::int64_t pages_of_chunk(const ExecutorConfig& c, std::int64_t chunk, std::int64_t step) {
  const std::int64_t rows = (c.overlap_depth + 1) * std::max(step, chunk) + step;
  return pages_at_once(c.attention, rows, c.page_size);
}

}  // namespace

// The steps in flight and the next one write rows behind the first that is still to be computed;
// before that only what the window shows is held, and rows whose K/V the host has not moved yet.
// A prompt that is to be published keeps its pages until it is.
std::int64_t pages_in_window(const ExecutorConfig& c, std::int64_t prompt, std::int64_t step) {
  const std::int64_t steps = c.overlap_depth + 1;
  const int most = prompt_chunk(c);
  const std::int64_t chunk = std::min<std::int64_t>(prompt, most > 0 ? most : c.max_num_tokens);
  const std::int64_t pages = pages_of_chunk(c, chunk, step);
  if (!c.enable_block_reuse) return pages;
  return std::max(pages, pages_for(prompt + steps * step, c.page_size));
}

// Who is preempted may have to read far more than its prompt, and is promised no more pages for it.
int text_chunk(const ExecutorConfig& c, std::int64_t step) {
  if (c.attention.window == 0) return 0;
  std::int64_t chunk = c.enable_chunked_prefill ? prompt_chunk(c) : c.max_num_tokens;
  while (chunk > step && pages_of_chunk(c, chunk, step) > c.num_pages) {
    chunk = std::max(step, chunk / 2);
  }
  return static_cast<int>(chunk);
}

int max_drafts_of(const LookaheadConfig& triple) {
  return static_cast<int>(lookahead_max_draft_len(triple.w, triple.n, triple.g));
}

int max_drafts_of(const ExecutorConfig& config) {
  const int also = config.with_suffix ? config.suffix.max_draft_len : 0;
  return std::min(method_drafts_of(config) + also, kMaxDraftLen);
}

int method_drafts_of(const ExecutorConfig& config) {
  switch (config.method) {
    case DraftMethod::kNone:
      return 0;
    case DraftMethod::kLookahead:
      return max_drafts_of(config.lookahead);
    case DraftMethod::kNgram:
      return config.ngram.max_draft_len;
    case DraftMethod::kSuffix:
      return config.suffix.max_draft_len;
    case DraftMethod::kProposed:
      return config.proposed_max_draft_len;
  }
  return 0;
}

namespace {

void check_sizes(const ExecutorConfig& c) {
  SPECDEC_REQUIRE(c.vocab_size >= 1, "vocab_size = ", c.vocab_size, ": at least 1");
  SPECDEC_REQUIRE(c.vocab_size <= kMaxLawTokens, "vocab_size = ", c.vocab_size, ": at most ",
                  kMaxLawTokens, " tokens can be drawn from");
  SPECDEC_REQUIRE(c.max_batch_size >= 1 && c.max_batch_size <= 4096,
                  "max_batch_size = ", c.max_batch_size, ": give 1..4096");
  SPECDEC_REQUIRE(c.max_seq_len >= 2, "max_seq_len = ", c.max_seq_len, ": at least 2");
  SPECDEC_REQUIRE(c.max_num_tokens >= c.max_batch_size, "max_num_tokens = ", c.max_num_tokens,
                  ": a step needs at least one row per request, max_batch_size = ",
                  c.max_batch_size, "; raise max_num_tokens or lower max_batch_size");
  SPECDEC_REQUIRE(c.overlap_depth >= 0 && c.overlap_depth <= kMaxOverlapDepth,
                  "overlap_depth = ", c.overlap_depth, ": give 0..", kMaxOverlapDepth);
  SPECDEC_REQUIRE(c.max_draft_depth >= kKnownDrafts && c.max_draft_depth <= kMaxDraftLen,
                  "max_draft_depth = ", c.max_draft_depth, ": give ", kKnownDrafts, "..",
                  kMaxDraftLen);
}

void check_method(const ExecutorConfig& c) {
  if (c.method == DraftMethod::kLookahead) {
    check_lookahead_config(c.lookahead, "speculative_config");
  }
  if (c.method == DraftMethod::kProposed) {
    SPECDEC_REQUIRE(c.proposed_max_draft_len >= 1 && c.proposed_max_draft_len <= kMaxDraftLen,
                    "proposed_max_draft_len = ", c.proposed_max_draft_len, ": give 1..",
                    kMaxDraftLen);
    SPECDEC_REQUIRE(c.proposed_max_path >= 1 && c.proposed_max_path <= c.proposed_max_draft_len,
                    "proposed_max_path = ", c.proposed_max_path, ": give 1..",
                    c.proposed_max_draft_len, ", the drafts of a step");
  }
  const bool networks = c.method == DraftMethod::kProposed && !c.proposed_by_host;
  SPECDEC_REQUIRE(!c.with_suffix || networks || c.method == DraftMethod::kLookahead,
                  "with_suffix: suffix decoding goes with 'lookahead', or with 'proposed' drafts "
                  "that operations make");
  if (c.method == DraftMethod::kSuffix || c.with_suffix) {
    SPECDEC_REQUIRE(c.suffix.max_draft_len >= 1, "suffix.max_draft_len = ", c.suffix.max_draft_len,
                    ": give 1..", kMaxDraftLen);
    check_suffix_lookup(c.suffix, "suffix");
  }
  const bool suffix = c.method == DraftMethod::kSuffix || c.with_suffix;
  SPECDEC_REQUIRE(c.suffix_cached_requests >= 0 && (suffix || c.suffix_cached_requests == 0),
                  "suffix_cached_requests = ", c.suffix_cached_requests,
                  ": give 0, or with suffix decoding more");
  if (c.method == DraftMethod::kNgram) {
    SPECDEC_REQUIRE(c.ngram.max_draft_len >= 1 && c.ngram.max_draft_len <= kMaxDraftLen,
                    "max_draft_len = ", c.ngram.max_draft_len, ": give 1..", kMaxDraftLen);
    SPECDEC_REQUIRE(
        c.ngram.max_matching_ngram_size >= 1 && c.ngram.max_matching_ngram_size <= kMaxNgram,
        "max_matching_ngram_size = ", c.ngram.max_matching_ngram_size, ": give 1..", kMaxNgram);
  }
}

void check_schedule(const ExecutorConfig& c) {
  int before = 0;
  for (const auto& [batch, length] : c.draft_len_schedule) {
    SPECDEC_REQUIRE(batch > before, "draft_len_schedule: batch size ", batch,
                    " does not come after ", before, ": give ascending sizes from 1 on");
    SPECDEC_REQUIRE(length >= 0 && length <= max_drafts_of(c), "draft_len_schedule[", batch,
                    "] = ", length, ": give 0..", max_drafts_of(c),
                    ", the drafts that this engine can make");
    before = batch;
  }
}

void check_host_pages(const ExecutorConfig& c) {
  SPECDEC_REQUIRE(c.num_host_pages >= 0, "num_host_pages = ", c.num_host_pages,
                  ": give 0 (none) or more");
  if (c.num_host_pages == 0) return;
  SPECDEC_REQUIRE(c.policy == SchedulerPolicy::kMaxUtilization,
                  "num_host_pages = ", c.num_host_pages,
                  " with policy 'guaranteed_no_evict': nobody gives pages back under it; use "
                  "policy='max_utilization', or no host pages");
  SPECDEC_REQUIRE(c.host_link.page_bytes >= 1, "host_page_bytes = ", c.host_link.page_bytes,
                  ": the bytes of a page are needed to weigh copies against computing it again");
  const double speed = c.host_link.bytes_per_second;
  SPECDEC_REQUIRE(speed >= 0.0 && std::isfinite(speed), "host_bytes_per_second = ", speed,
                  ": give bytes copied in a second, or 0 where that is not known");
}

}  // namespace

std::vector<int> narrow_groups(const std::vector<int>& narrow_windows) {
  const std::set<int> distinct(narrow_windows.begin(), narrow_windows.end());
  std::vector<int> groups;
  for (const int window : distinct) {
    SPECDEC_REQUIRE(window >= 0, "narrow_windows holds ", window, ": give tokens, 0 for none");
    if (window > 0) groups.push_back(window);
  }
  return groups;
}

const ExecutorConfig& checked_config(const ExecutorConfig& config) {
  check_sizes(config);
  check_method(config);
  check_schedule(config);
  const double slowdown = config.max_prefill_slowdown;
  SPECDEC_REQUIRE(slowdown == 0.0 || (slowdown >= 1.0 && std::isfinite(slowdown)),
                  "max_prefill_slowdown = ", slowdown, ": give 1 or more, or 0 for no limit");
  SPECDEC_REQUIRE(config.attention.window >= 0, "attention_window = ", config.attention.window,
                  ": give tokens, or 0 for no window");
  SPECDEC_REQUIRE(config.attention.sink_tokens >= 0, "sink_tokens = ", config.attention.sink_tokens,
                  ": give 0 (none) or a positive number of tokens");
  const std::size_t groups = narrow_groups(config.narrow_windows).size();
  SPECDEC_REQUIRE(config.narrow_pages.empty() || config.narrow_pages.size() == groups,
                  "narrow_pages has ", config.narrow_pages.size(), " entries, narrow_windows ",
                  groups, " distinct windows: give one for each, ascending, or none");
  SPECDEC_REQUIRE(config.narrow_sink_tokens >= 0,
                  "narrow_sink_tokens = ", config.narrow_sink_tokens,
                  ": give 0 (none) or a positive number of tokens");
  check_host_pages(config);
  check_synthetic_rates(config.synthetic_acceptance_rates);
  return config;
}

}  // namespace specdec
