#include "engine/chain_history.h"

#include <algorithm>

#include "algo/suffix_draft.h"

namespace specdec {
namespace {

// Rates are kept by match length where that is known; ChainHistory has one for all.
constexpr int kAnyMatch = 2;
// Tries that the start counts for beside all requests'.
constexpr double kStartWeight = 4.0;

// And these beside a request's own. The likeliest of many drafts are taken, and by chance a few
// tries can look likely: with 4 for all sources the drafts that are taken are right less often than
// expected. Only the request itself shows how good its prediction is.
double shared_weight(DraftSource source) {
  const bool of_request = source == DraftSource::kRequest || source == DraftSource::kPrediction ||
                          source == DraftSource::kGrammar || source == DraftSource::kEdits;
  return of_request ? 4.0 : 12.0;
}

}  // namespace

int ChainRates::match_bucket(int match_len) {
  if (match_len <= 3) return std::max(match_len, 1) - 1;
  if (match_len <= 5) return 3;
  return match_len < kLongMatch ? 4 : 5;
}

int ChainRates::depth_bucket(int depth) {
  if (depth <= 3) return depth - 1;
  if (depth <= 5) return 3;
  return depth <= 9 ? 4 : 5;
}

// Soon outweighed by what is observed.
double start_rate(DraftSource source, int match_len, int depth) {
  if (source == DraftSource::kSuffix) {
    return static_cast<double>(suffix_agreement(match_len)) / kSuffixOne;
  }
  if (source == DraftSource::kGrammar) return 1.0;  // nothing else may follow
  if (source == DraftSource::kModel) return 1.0;    // it says itself how sure it is
  const int match = ChainRates::match_bucket(match_len);
  if (source == DraftSource::kPrediction || source == DraftSource::kEdits) {
    // What the default model's answers to benchmarks/code_edit_cases.py showed.
    static constexpr double kPredicted[ChainRates::kMatchBuckets] = {0.35, 0.55, 0.60,
                                                                     0.75, 0.85, 0.94};
    if (depth != kBeginning) return kPredicted[match];
    // An output that begins as predicted goes on like that.
    return match_len == 1 ? 0.5 : kPredicted[ChainRates::kMatchBuckets - 1];
  }
  // Rough: longer matches are right more often, and so is what follows a right token.
  static constexpr double kFirst[ChainRates::kMatchBuckets] = {0.25, 0.40, 0.55, 0.70, 0.80, 0.90};
  return depth == 1 ? kFirst[match] : std::min(0.92, kFirst[match] + 0.25);
}

double ChainRates::rate(const ChainRates& shared, DraftSource source, int match_len,
                        int depth) const {
  const int m = match_bucket(match_len), d = depth_bucket(depth);
  const Count &all = shared.counts_[m][d], &own = counts_[m][d];
  const double start = start_rate(source, match_len, depth), lean = shared_weight(source);
  const double base = (all.hits + kStartWeight * start) / (all.tries + kStartWeight);
  return (own.hits + lean * base) / (own.tries + lean);
}

void ChainRates::observe(int match_len, int depth, bool accepted, double decay, double offered) {
  Count& c = counts_[match_bucket(match_len)][depth_bucket(depth)];
  c.hits = c.hits * decay + (accepted ? 1.0 : 0.0);
  c.tries = c.tries * decay + offered;
}

const double* ChainHistory::survival(const ChainRates& shared, int length) {
  survival_.resize(static_cast<std::size_t>(length));
  double alive = 1.0;
  for (int i = 0; i < length; ++i) {
    alive *= rates_.rate(shared, DraftSource::kLookup, kAnyMatch, i + 1);
    survival_[i] = alive;
  }
  return survival_.data();
}

bool ChainHistory::probes(const StepBase& step, int length, int chosen) {
  ++step_;
  const double price = step_seconds(step, length, length) / step_seconds(step, 0.0, 0.0);
  const bool due = static_cast<double>(step_ - last_full_) * kProbeShare > price;
  if (due || chosen == length) last_full_ = step_;
  return due && chosen < length;
}

void ChainHistory::observe(ChainRates& shared, int allowed, int accepted) {
  for (int i = 0; i < allowed && i <= accepted; ++i) {
    const bool right = i < accepted;
    rates_.observe(kAnyMatch, i + 1, right, kOwnDecay);
    shared.observe(kAnyMatch, i + 1, right, kSharedDecay);
  }
}

}  // namespace specdec
