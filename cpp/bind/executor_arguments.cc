#include "bind/executor_arguments.h"

namespace py = pybind11;

namespace specdec {

DraftMethod parse_method(const std::string& name) {
  if (name == "none") return DraftMethod::kNone;
  if (name == "lookahead") return DraftMethod::kLookahead;
  if (name == "ngram") return DraftMethod::kNgram;
  if (name == "suffix") return DraftMethod::kSuffix;
  if (name == "proposed") return DraftMethod::kProposed;
  SPECDEC_REQUIRE(
      false, "method = '", name,
      "': give 'none', 'lookahead', 'ngram', 'suffix' or 'proposed' (drafts from outside)");
  return DraftMethod::kNone;
}

SchedulerPolicy parse_policy(const std::string& name) {
  if (name == "guaranteed_no_evict") return SchedulerPolicy::kGuaranteedNoEvict;
  SPECDEC_REQUIRE(name == "max_utilization", "policy = '", name,
                  "': give 'guaranteed_no_evict' or 'max_utilization'");
  return SchedulerPolicy::kMaxUtilization;
}

NgramParams parse_ngram(const py::dict& dict) {
  NgramParams p;
  for (const auto& [key, value] : dict) {
    const std::string name = py::cast<std::string>(key);
    if (name == "max_draft_len") {
      p.max_draft_len = py::cast<int>(value);
    } else if (name == "max_matching_ngram_size") {
      p.max_matching_ngram_size = py::cast<int>(value);
    } else if (name == "is_keep_all") {
      p.is_keep_all = py::cast<bool>(value);
    } else if (name == "is_use_oldest") {
      p.is_use_oldest = py::cast<bool>(value);
    } else if (name == "is_public_pool") {
      p.is_public_pool = py::cast<bool>(value);
    } else {
      SPECDEC_REQUIRE(false, "ngram['", name,
                      "']: unknown; the fields are max_draft_len, "
                      "max_matching_ngram_size, is_keep_all, is_use_oldest, is_public_pool");
    }
  }
  return p;
}

SuffixLookup parse_suffix(const py::dict& dict) {
  SuffixLookup how;
  const auto parts = [](const char* name, const py::handle& value, double most) {
    const auto number = py::cast<double>(value);
    SPECDEC_REQUIRE(number >= 0.0 && number <= most, "suffix['", name, "'] = ", number,
                    ": give 0..", most);
    return static_cast<std::uint32_t>(number * kSuffixOne);
  };
  for (const auto& [key, value] : dict) {
    const std::string name = py::cast<std::string>(key);
    if (name == "max_draft_len") {
      how.max_draft_len = py::cast<int>(value);
    } else if (name == "max_tree_depth") {
      how.max_tree_depth = py::cast<int>(value);
    } else if (name == "max_spec_factor") {
      how.spec_factor = value.is_none() ? 0 : parts("max_spec_factor", value, kMaxStepTokens);
    } else if (name == "min_token_prob") {
      how.min_prob = parts("min_token_prob", value, 1.0);
    } else {
      SPECDEC_REQUIRE(false, "suffix['", name,
                      "']: unknown; the fields are max_draft_len, max_tree_depth, "
                      "max_spec_factor, min_token_prob");
    }
  }
  return how;
}

LookaheadConfig to_lookahead(const LookaheadTriple& t) {
  return LookaheadConfig{std::get<0>(t), std::get<1>(t), std::get<2>(t)};
}

py::dict stats_dict(const ExecutorStats& s) {
  py::dict d;
  d["steps"] = s.steps;
  d["rows"] = s.rows;
  d["prefill_rows"] = s.prefill_rows;
  d["num_drafts"] = s.num_drafts;
  d["num_draft_tokens"] = s.num_draft_tokens;
  d["num_accepted_tokens"] = s.num_accepted_tokens;
  d["expected_accepted_tokens"] = s.expected_accepted_tokens;
  d["generated_tokens"] = s.generated_tokens;
  d["finished"] = s.finished;
  d["cancelled"] = s.cancelled;
  d["failed"] = s.failed;
  d["shortened_steps"] = s.shortened_steps;
  d["unspeculated_steps"] = s.unspeculated_steps;
  d["budget_weighed"] = s.budget.weighed;
  d["budget_refused"] = s.budget.refused;
  d["budget_probes"] = s.budget.probes;
  d["budget_refused_tokens"] = s.budget.refused_tokens;
  d["budget_refused_price"] = s.budget.refused_price;
  d["draft_len_limit"] = s.draft_len_limit;
  d["in_flight"] = s.in_flight;
  d["retiring"] = s.retiring;
  d["late_results"] = s.late_results;
  d["grammar_cut"] = s.grammar_cut;
  d["preemptions"] = s.preemptions;
  d["preempted"] = s.preempted;
  d["recomputed_tokens"] = s.recomputed_tokens;
  d["swapped_out"] = s.swapped_out;
  d["swapped_in"] = s.swapped_in;
  d["swapped_out_bytes"] = s.swapped_out_bytes;
  d["swapped_in_bytes"] = s.swapped_in_bytes;
  d["host_pool_full"] = s.host_pool_full;
  d["host_free_pages"] = s.host_free_pages;
  d["host_total_pages"] = s.host_total_pages;
  d["empty_steps"] = s.empty_steps;
  d["running"] = s.running;
  d["waiting"] = s.waiting;
  d["free_pages"] = s.free_pages;
  d["total_pages"] = s.total_pages;
  d["promised_pages"] = s.promised_pages;
  d["pool_bytes"] = s.pool_bytes;
  d["history_bytes"] = s.history_bytes;
  d["draft_prob_bytes"] = s.draft_prob_bytes;
  d["plan_bytes"] = s.plan_bytes;
  d["reuse_queries"] = s.reuse_queries;
  d["reuse_hits"] = s.reuse_hits;
  d["cached_tokens"] = s.cached_tokens;
  d["cached_pages"] = s.cached_pages;
  d["attached_pages"] = s.reuse.attached_pages;
  d["published_pages"] = s.reuse.published_pages;
  d["deduplicated_pages"] = s.reuse.deduplicated_pages;
  d["evicted_pages"] = s.reuse.evicted_pages;
  d["index_bytes"] = s.index_bytes;
  return d;
}

}  // namespace specdec
