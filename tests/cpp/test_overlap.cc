// Run-ahead: random schedules of join, cancel and stop on a stub stream, at every depth. No token
// is lost or doubled, every page comes back; and each known mistake of the bookkeeping is noticed.
#include <algorithm>
#include <exception>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "algo/fault.h"
#include "check.h"
#include "overlap_world.h"

namespace specdec {
namespace {

using testing::continuation;
using testing::kHashVocab;
using testing::OverlapWorld;

struct Job {
  RequestParams params;
  int submit_step = 0;
  int cancel_step = -1;
  TokenId stop_string = -1;  // what the detokenizer waits for: two of this token in a row
  RequestId id = 0;
  std::vector<TokenId> expected, tokens;
  FinishReason expected_finish = FinishReason::kNone, finish = FinishReason::kNone;
  bool over = false, failed = false;
};

// What plain decoding delivers, by the stop rules' definition.
void expect(Job& job, int max_seq_len) {
  const RequestParams& p = job.params;
  const int room = std::min(p.max_tokens, max_seq_len - static_cast<int>(p.prompt.size()));
  const std::vector<TokenId> text = continuation(p.prompt, room);
  auto holds = [](const std::vector<TokenId>& ids, TokenId id) {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  };
  for (TokenId token : text) {
    job.expected.push_back(token);
    if (holds(p.eos_token_ids, token) || holds(p.stop_token_ids, token)) {
      job.expected_finish = FinishReason::kStop;
      return;
    }
    const std::size_t n = job.expected.size();
    if (n > 1 && token == job.stop_string && job.expected[n - 2] == token) return;
  }
  job.expected_finish = FinishReason::kLength;
}

ExecutorConfig random_config(std::mt19937& random, int depth) {
  auto pick = [&](std::initializer_list<int> values) {
    return *(values.begin() + random() % values.size());
  };
  ExecutorConfig c;
  c.vocab_size = kHashVocab;
  c.max_batch_size = pick({1, 2, 4, 6});
  c.max_seq_len = pick({24, 60, 90});
  c.max_num_tokens = std::max(c.max_batch_size, pick({5, 17, 60, 200}));
  c.page_size = pick({1, 2, 4, 16});
  switch (random() % 4) {
    case 0:
      break;
    case 2:
      c.method = DraftMethod::kProposed;
      c.proposed_max_draft_len = pick({1, 4, 9, 30});
      c.proposed_max_path = std::min(c.proposed_max_draft_len, pick({1, 3, 30}));
      break;
    case 1:
      c.method = DraftMethod::kLookahead;
      c.lookahead = random() % 2 == 0 ? LookaheadConfig{4, 3, 4} : LookaheadConfig{7, 5, 2};
      break;
    default:
      c.method = DraftMethod::kNgram;
      c.ngram.max_draft_len = pick({1, 4, 9});
  }
  c.overlap_depth = depth;
  c.pads_rows = random() % 2 == 0;
  c.enable_chunked_prefill = random() % 4 != 0;
  c.check_integrity = true;
  if (random() % 2 == 0) c.policy = SchedulerPolicy::kMaxUtilization;
  // One request of the largest kind always fits; more, or all.
  const int drafts =
      c.method == DraftMethod::kLookahead
          ? static_cast<int>(lookahead_max_draft_len(c.lookahead.w, c.lookahead.n, c.lookahead.g))
          : (c.method == DraftMethod::kNgram ? c.ngram.max_draft_len : c.proposed_max_draft_len);
  const int one = (c.max_seq_len - 1 + drafts) / c.page_size + 1;
  c.num_pages = one + static_cast<int>(random() % (one * c.max_batch_size));
  return c;
}

// A pool of one request and a page for many long ones.
void make_scarce(ExecutorConfig& c) {
  c.policy = SchedulerPolicy::kMaxUtilization;
  c.max_batch_size = 6;
  c.max_seq_len = 60;
  c.max_num_tokens = std::max(c.max_num_tokens, 17);
  c.page_size = std::min(c.page_size, 4);
  c.num_pages = (c.max_seq_len - 1 + max_drafts_of(c)) / c.page_size + 2;
}

void make_long(std::vector<Job>& jobs, const ExecutorConfig& config) {
  for (Job& job : jobs) {
    RequestParams& p = job.params;
    p.prompt.resize(std::min<std::size_t>(p.prompt.size(), 6));
    p.max_tokens = 54;
    p.eos_token_ids = p.stop_token_ids = {};
    Job fresh;
    fresh.params = p;
    job = fresh;
    expect(job, config.max_seq_len);
  }
}

std::vector<Job> random_jobs(std::mt19937& random, const ExecutorConfig& config, int count) {
  std::vector<Job> jobs(count);
  for (Job& job : jobs) {
    RequestParams& p = job.params;
    int most = config.max_seq_len - 1;
    if (!config.enable_chunked_prefill) most = std::min(most, config.max_num_tokens);
    const int prompt_len = 1 + static_cast<int>(random() % std::min(most, 30));
    for (int i = 0; i < prompt_len; ++i) {
      p.prompt.push_back(static_cast<TokenId>(random() % kHashVocab));
    }
    p.max_tokens = random() % 3 == 0 ? 1 + static_cast<int>(random() % 4)
                                     : 1 + static_cast<int>(random() % 60);
    p.seed = random();
    if (random() % 4 == 0) p.adaptive = false;
    p.speculative = random() % 6 != 0;
    if (random() % 4 == 0) p.priority = static_cast<int>(random() % 3) - 1;
    if (random() % 3 == 0) p.eos_token_ids = {static_cast<TokenId>(random() % kHashVocab)};
    if (random() % 3 == 0) p.stop_token_ids = {static_cast<TokenId>(5 + random() % 19)};
    if (config.method == DraftMethod::kLookahead && random() % 3 == 0) {
      p.lookahead = random() % 2 == 0 ? LookaheadConfig{2, 2, 1} : LookaheadConfig{1, 1, 0};
    }
    const bool bounded =
        config.method == DraftMethod::kNgram || config.method == DraftMethod::kProposed;
    if (bounded && random() % 3 == 0) p.max_draft_len = random() % 2;
    job.submit_step = static_cast<int>(random() % 25);
    if (random() % 4 == 0) job.cancel_step = static_cast<int>(random() % 40);
    if (random() % 4 == 0) job.stop_string = static_cast<TokenId>(random() % 5);
    expect(job, config.max_seq_len);
  }
  return jobs;
}

#define REFUSE_UNLESS(condition, text) \
  do {                                 \
    if (!(condition)) return text;     \
  } while (false)

// What schedules did.
struct Seen {
  std::int64_t tokens = 0;       // that were compared
  std::int64_t preemptions = 0;  // of requests that went on, or were cancelled
  std::int64_t swapped = 0, swapped_back = 0, found_no_room = 0, recomputed = 0;  // of these
  std::int64_t failed = 0;  // steps of which nothing was enqueued
};

// How little room schedules have: some, next to none, and besides that a pool of the host's.
enum class Room { kSome, kScarce, kHost };

// Room for one preempted request, or for all; copies are cheap, dear, or somewhere between.
void give_host_pages(ExecutorConfig& c, std::mt19937& random) {
  c.num_host_pages = 1 + static_cast<int>(random() % (2 * c.num_pages));
  c.host_link.page_bytes = 1000;
  const double speeds[] = {0.0, 1.0, 300.0, 1e6};
  c.host_link.bytes_per_second = speeds[random() % 4];
}

// "" if all went well, else what did not.
std::string run_schedule(std::uint32_t seed, int depth, Seen* seen, Room room = Room::kSome) try {
  std::mt19937 random(seed);
  ExecutorConfig config = random_config(random, depth);
  if (room != Room::kSome) make_scarce(config);
  if (room == Room::kHost) give_host_pages(config, random);
  std::vector<Job> jobs = random_jobs(random, config, 3 + static_cast<int>(random() % 8));
  if (room != Room::kSome) make_long(jobs, config);
  const bool fails = room == Room::kHost && random() % 4 == 0;
  for (Job& job : jobs) {
    if (room == Room::kHost && random() % 4 == 0) job.cancel_step = static_cast<int>(random() % 90);
  }
  OverlapWorld world(config, seed + 1);
  // Rows are free, or dear, or their price is unknown and drafts keep their length.
  const double last = random() % 2 == 0 ? 1.0 : 30.0;
  if (random() % 3 != 0) world.executor.set_step_cost({1, 100}, {1.0, last});
  std::map<RequestId, Job*> by_id;
  std::int64_t rows_reported = 0;
  std::size_t submitted = 0;
  for (int step = 0;; ++step) {
    REFUSE_UNLESS(step < 3000, "the executor does not come to an end");
    for (Job& job : jobs) {
      if (job.id == 0 && job.submit_step <= step) {
        job.id = world.submit(job.params);
        by_id[job.id] = &job;
        ++submitted;
      }
      if (job.id != 0 && job.cancel_step == step && !job.over) {
        REFUSE_UNLESS(world.cancel(job.id), "a running request could not be cancelled");
        job.over = true;
      }
    }
    bool planned = false;
    if (world.executor.in_flight() <= depth && fails && random() % 30 == 0) {
      for (const StepOutput& out : world.plan_and_fail(&planned)) {
        by_id.at(out.request_id)->over = by_id.at(out.request_id)->failed = true;
      }
      seen->failed += planned;
    } else if (world.executor.in_flight() <= depth) {
      planned = world.plan();
    }
    const int waiting = world.executor.in_flight();
    if (waiting > depth || (!planned && waiting > 0)) {
      for (const StepOutput& out : world.deliver()) {
        Job& job = *by_id.at(out.request_id);
        REFUSE_UNLESS(!job.over, "output after the end of a request");
        rows_reported += out.num_rows;
        for (TokenId token : out.tokens) {
          job.tokens.push_back(token);
          const std::size_t n = job.tokens.size();
          const bool ended_before =
              n > 1 && out.finish_reason != FinishReason::kNone && &token == &out.tokens.back();
          if (n > 1 && token == job.stop_string && job.tokens[n - 2] == token && !ended_before) {
            // The text ends here: later tokens are dropped, not counted.
            if (out.finish_reason == FinishReason::kNone) world.cancel(job.id);
            job.over = true;
            break;
          }
        }
        if (!job.over && out.finish_reason != FinishReason::kNone) {
          job.finish = out.finish_reason;
          job.over = true;
        }
      }
    }
    if (submitted == jobs.size() && world.executor.num_unfinished() == 0 &&
        world.executor.in_flight() == 0) {
      break;
    }
  }
  for (const Job& job : jobs) {
    seen->tokens += static_cast<std::int64_t>(job.tokens.size());
    REFUSE_UNLESS(job.over, "a request never ended");
    const bool prefix = job.tokens.size() <= job.expected.size() &&
                        std::equal(job.tokens.begin(), job.tokens.end(), job.expected.begin());
    REFUSE_UNLESS(prefix, "tokens that plain decoding would not have");
    if (job.failed || (job.cancel_step >= 0 && job.finish == FinishReason::kNone)) continue;
    REFUSE_UNLESS(job.tokens.size() == job.expected.size(), "tokens were lost");
    REFUSE_UNLESS(job.finish == job.expected_finish || job.stop_string >= 0, "another reason");
  }
  const ExecutorStats s = world.executor.stats();
  REFUSE_UNLESS(s.free_pages == s.total_pages && s.promised_pages == 0, "pages did not come back");
  seen->preemptions += s.preemptions;
  REFUSE_UNLESS(s.preempted == 0, "a request waits for pages for ever");
  REFUSE_UNLESS(s.host_free_pages == s.host_total_pages, "host pages did not come back");
  seen->swapped += s.swapped_out;
  seen->swapped_back += s.swapped_in;
  seen->found_no_room += s.host_pool_full;
  seen->recomputed += s.recomputed_tokens;
  REFUSE_UNLESS(s.retiring == 0 && s.history_bytes == 0, "a request is kept");
  // Only what the host has ended, not the device, still runs in the steps in flight.
  const bool by_device = std::all_of(
      jobs.begin(), jobs.end(), [](const Job& job) { return job.finish != FinishReason::kNone; });
  REFUSE_UNLESS(!by_device || s.late_results == 0, "a slot that has ended went on");
  REFUSE_UNLESS(s.rows == world.rows_seen(), "rows are counted wrongly");
  REFUSE_UNLESS(rows_reported <= s.rows, "more rows reported than run");
  return "";
} catch (const std::exception& error) {
  return error.what();
}

constexpr int kSchedules = 10000;

TEST(overlap_schedules_lose_and_double_nothing) {
  Seen seen;
  for (int i = 0; i < kSchedules; ++i) {
    const std::string found = run_schedule(static_cast<std::uint32_t>(i), i % 3, &seen);
    CHECK_EQ(found, "");
    if (!found.empty()) {
      std::cerr << "schedule " << i << "\n";
      break;
    }
  }
  CHECK(seen.tokens > 50 * kSchedules);
}

TEST(overlap_preemptions_change_no_text) {
  Seen seen;
  for (std::uint32_t i = 0; i < 900; ++i) {
    const std::string found = run_schedule(i, static_cast<int>(i % 3), &seen, Room::kScarce);
    CHECK_EQ(found, "");
    if (!found.empty()) break;
  }
  CHECK(seen.preemptions > 10000);
}

TEST(overlap_swaps_change_no_text) {
  Seen seen;
  for (std::uint32_t i = 0; i < 900; ++i) {
    const std::string found = run_schedule(i, static_cast<int>(i % 3), &seen, Room::kHost);
    CHECK_EQ(found, "");
    if (!found.empty()) {
      std::cerr << "schedule " << i << "\n";
      break;
    }
  }
  CHECK(seen.swapped > 3000);
  CHECK(seen.swapped_back > 3000);
  CHECK(seen.found_no_room > 100);
  CHECK(seen.recomputed > 1000);
  CHECK(seen.failed > 100);
}

TEST(overlap_mistakes_are_noticed) {
  const std::vector<std::pair<Fault, const char*>> mistakes = {
      {Fault::kHoldWithoutDrafts, "pages without drafts"},
      {Fault::kHoldWithoutFlight, "pages without steps in flight"},
      {Fault::kPagesBackEarly, "pages back early"},
      {Fault::kExcessBackEarly, "excess back early"},
      {Fault::kStagingReused, "staging reused"},
      {Fault::kResultOfNewest, "result of the newest step"},
      {Fault::kLateResult, "late result"},
      {Fault::kCancelledRunsOn, "cancelled runs on"},
      {Fault::kAdmitWithoutBound, "admission without bound"},
      {Fault::kEntryLost, "entry lost"},
      {Fault::kFrozenDrafts, "frozen slots draft"},
      {Fault::kPreemptedInFlight, "preempted with a step in flight"},
      {Fault::kReadAgainTooLittle, "a preempted request reads a token too few"},
      {Fault::kOldestPreempted, "the oldest request is preempted"},
      {Fault::kPageNotCopied, "a page is not copied back"},
      {Fault::kHostPagesKept, "host pages of an ended request are kept"},
  };
  for (const auto& [mistake, name] : mistakes) {
    active_fault = mistake;
    Seen seen;
    int found = 0;
    for (std::uint32_t i = 0; i < 60; ++i) {
      const int depth = 1 + static_cast<int>(i % 2);
      const Room rooms[] = {Room::kScarce, Room::kSome, Room::kHost};
      found += !run_schedule(i, depth, &seen, rooms[i % 3]).empty();
    }
    active_fault = Fault::kNone;
    if (found == 0) std::cerr << name << "\n";
    CHECK(found > 0);
  }
}

}  // namespace
}  // namespace specdec
