// What an executor counts.
#pragma once

#include <cstdint>

#include "engine/budget.h"
#include "kv/page_table.h"

namespace specdec {

struct ExecutorStats {
  std::int64_t steps = 0, rows = 0, prefill_rows = 0;
  std::int64_t num_drafts = 0, num_draft_tokens = 0, num_accepted_tokens = 0;
  std::int64_t generated_tokens = 0, finished = 0, cancelled = 0, failed = 0;
  // Decode steps in which draft_len_schedule allowed fewer drafts than the engine could make, and
  // how many of them it allowed none.
  std::int64_t shortened_steps = 0, unspeculated_steps = 0;
  std::int64_t grammar_cut = 0;  // drafts that a grammar did not allow, cut before the pass
  BudgetStats budget;            // of adaptive drafts
  // How many of the drafts whose chances the host knew were expected to be accepted.
  double expected_accepted_tokens = 0.0;
  int draft_len_limit = 0;  // drafts of one request that the schedule allows now
  int running = 0, waiting = 0;
  int in_flight = 0;  // steps that were planned and not delivered
  int retiring = 0;   // requests that have ended, whose pages a step in flight may touch
  // kMaxUtilization: how often a request gave its pages back, how many have none now, and tokens
  // whose K/V was, or will be, computed once more for it.
  std::int64_t preemptions = 0;
  int preempted = 0;
  std::int64_t recomputed_tokens = 0;
  // How many preemptions copied K/V to the host, and how many of these requests came back; bytes
  // each way; how many found no room there, though copying was cheaper.
  std::int64_t swapped_out = 0, swapped_in = 0;
  std::int64_t swapped_out_bytes = 0, swapped_in_bytes = 0;
  std::int64_t host_pool_full = 0;
  int host_free_pages = 0, host_total_pages = 0;
  std::int64_t late_results = 0;  // results of requests that had ended; dropped
  std::int64_t empty_steps = 0;   // steps in which the device found nothing to do
  int free_pages = 0, total_pages = 0;
  std::int64_t promised_pages = 0;  // held now, or to be given to running requests; shared once
  // Prefix reuse. Cached pages are published and unused; they count as free.
  std::int64_t reuse_queries = 0, reuse_hits = 0;  // requests that looked, and that found a block
  std::int64_t cached_tokens = 0;                  // prompt tokens that were not computed
  int cached_pages = 0;
  ReuseStats reuse;
  std::int64_t pool_bytes =
      0;  // drafters of running requests (on a device: all slots), public pools
  std::int64_t history_bytes = 0;     // token histories of running and waiting requests
  std::int64_t plan_bytes = 0;        // step buffers
  std::int64_t index_bytes = 0;       // which page holds which text
  std::int64_t draft_prob_bytes = 0;  // distributions that drafts of requests came with
};

}  // namespace specdec
