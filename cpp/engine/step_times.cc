#include "engine/step_times.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace specdec {
namespace {

constexpr std::size_t kKept = 16, kEnough = 4;  // quotients
constexpr int kUpdateEvery = 16;                // steps, but for the first ones
constexpr std::int64_t kStale = 256;            // steps
// From so many tokens on beyond those of the table, a step says what context costs.
constexpr double kFarTokens = 256.0;
constexpr double kLeast = 1e-3, kMost = 1e3;  // a quotient beyond these is no measurement
// What a table may say, whatever the one it started from said.
constexpr double kShortest = 1e-12, kLongest = 1e9;

}  // namespace

StepTimes::StepTimes(StepCost start, StepCost guess)
    : start_(std::move(start)),
      guess_(std::move(guess)),
      cost_(start_),
      by_rows_(start_.rows().size()) {
  SPECDEC_REQUIRE(start_.known() && guess_.known(), "StepTimes: a table has no points");
}

void StepTimes::Recent::add(double value) {
  if (values.size() < kKept) {
    values.push_back(static_cast<float>(value));
  } else {
    values[next] = static_cast<float>(value);
    next = (next + 1) % kKept;
  }
}

bool StepTimes::Recent::known() const { return values.size() >= kEnough; }

double StepTimes::Recent::quartile() const {
  std::vector<float> sorted = values;
  const auto at = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 4);
  std::nth_element(sorted.begin(), at, sorted.end());
  return *at;
}

bool StepTimes::observe(const StepPlan& plan, double seconds) {
  if (plan.num_requests == 0) return false;
  if (plan.num_prefill_rows > 0) return observe_prefill(plan, seconds);
  const auto* end = plan.kv_len.data() + plan.num_requests;
  const double tokens = std::accumulate(plan.kv_len.data(), end, 0.0);
  return observe(plan.num_rows, plan.num_requests, tokens / plan.num_requests, seconds);
}

bool StepTimes::observe(int rows, int requests, double context_len, double seconds) {
  const std::vector<int>& counts = start_.rows();
  if (rows < 1 || rows > counts.back() || requests < 1 || !(seconds > 0.0)) return false;
  auto i = static_cast<std::size_t>(std::lower_bound(counts.begin(), counts.end(), rows) -
                                    counts.begin());
  if (i > 0 && rows - counts[i - 1] < counts[i] - rows) --i;
  const double more = std::max(0.0, context_len - start_.context_len());
  const double share = static_cast<double>(rows) / requests;
  const double added = requests * more * start_.growth_at(share);
  Recent& own = by_rows_[i];
  if (more >= kFarTokens && added > 0.0 && own.known()) {
    const double quotient = (seconds - start_(rows) * own.quartile()) / added;
    growth_.add(std::clamp(quotient, 0.0, kMost));
  } else {
    const double expected = requests * more * cost_.growth_at(share);
    own.add(std::clamp((seconds - expected) / start_(rows), kLeast, kMost));
  }
  own.last = ++observed_;
  const bool young = observed_ <= kUpdateEvery && (observed_ & (observed_ - 1)) == 0;
  if (!young && observed_ % kUpdateEvery != 0) return false;
  forget_stale();
  update();
  return true;
}

void StepTimes::forget_stale() {
  const std::vector<int>& rows = start_.rows();
  const auto is_stale = [&](std::size_t i) { return observed_ - by_rows_[i].last > kStale; };
  const auto dearness = [&](const StepCost& cost, std::size_t i) {
    return cost.seconds()[i] / guess_(rows[i]);
  };
  std::size_t served = rows.size();  // the dearest of those that are served
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!by_rows_[i].known() || is_stale(i)) continue;
    if (served == rows.size() || dearness(cost_, i) > dearness(cost_, served)) served = i;
  }
  if (served == rows.size()) return;
  std::vector<double> seconds = start_.seconds();
  // Fewer rows that are served take no less than was seen: what is forgotten stays above them.
  double least = 0.0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (by_rows_[i].known() && !is_stale(i)) least = seconds[i];
    if (!is_stale(i) || dearness(cost_, i) <= dearness(cost_, served)) continue;
    by_rows_[i] = {};
    const double guessed = guess_(rows[i]) * dearness(start_, served);
    seconds[i] = std::min(seconds[i], std::max(guessed, least));
  }
  start_.set(rows, std::move(seconds), start_.context_len(), start_.growth(),
             start_.prefill_scale());
}

// Drafts that came with a prompt are rows like those that decode.
bool StepTimes::observe_prefill(const StepPlan& plan, double seconds) {
  if (!(seconds > 0.0)) return false;
  const int prompts = plan.num_prompts, decoding = plan.num_requests - prompts;
  const int others = std::max(1, plan.num_rows - plan.num_prefill_rows);
  double context = 0.0, base = cost_(others);
  if (decoding > 0) {
    const auto* first = plan.kv_len.data() + prompts;
    const double tokens = std::accumulate(first, first + decoding, 0.0);
    StepCost now;
    cost_.at(decoding, tokens / decoding, &now);
    base = now(others);
  }
  for (int b = 0; b < prompts; ++b) {
    context += cost_.more_context(plan.cu_rows[b + 1] - plan.cu_rows[b], plan.kv_len[b]);
  }
  const double rows = cost_.more_rows(others, plan.num_rows - others);
  // Whichever is more of it learns; the other one is believed.
  const PrefillScale& scale = cost_.prefill_scale();
  const bool long_text = scale.context * context > scale.rows * rows;
  const double known = base + (long_text ? scale.rows * rows : scale.context * context);
  const double added = long_text ? context : rows;
  if (!(added > 0.0)) return false;
  (long_text ? prefill_context_ : prefill_rows_)
      .add(std::clamp((seconds - known) / added, kLeast, kMost));
  update();
  return true;
}

void StepTimes::update() {
  const std::size_t size = by_rows_.size();
  std::vector<double> seconds = start_.seconds(), growth = start_.growth();
  std::vector<std::size_t> known;
  for (std::size_t i = 0; i < size; ++i) {
    if (by_rows_[i].known()) known.push_back(i);
  }
  for (std::size_t i = 0; i < size && !known.empty(); ++i) {
    // Between two that are known in proportion, outside as the nearest.
    const auto after = std::lower_bound(known.begin(), known.end(), i);
    const std::size_t high = after == known.end() ? known.back() : *after;
    const std::size_t low = after == known.begin() || high == i ? high : *(after - 1);
    const double from = by_rows_[low].quartile(), to = by_rows_[high].quartile();
    const double part =
        high > low ? static_cast<double>(std::min(i, high) - low) / (high - low) : 0;
    seconds[i] = std::clamp(seconds[i] * (from + part * (to - from)), kShortest, kLongest);
  }
  if (growth_.known()) {
    const double quotient = growth_.quartile();
    for (double& value : growth) value = std::min(value * quotient, kLongest);
  }
  PrefillScale scale = start_.prefill_scale();
  if (!prefill_rows_.values.empty()) scale.rows = prefill_rows_.quartile();
  if (!prefill_context_.values.empty()) scale.context = prefill_context_.quartile();
  cost_.set(start_.rows(), std::move(seconds), start_.context_len(), std::move(growth), scale);
}

}  // namespace specdec
