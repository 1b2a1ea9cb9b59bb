#include "engine/budget.h"

#include <algorithm>
#include <functional>

namespace specdec {
namespace {

constexpr int kSweeps = 2;  // over offers of options, after the joint choice

double checked(double gain) { return gain > 0.0 ? gain : 0.0; }  // what is no number is worth none

double speed(const Cut& cut) { return cut.tokens / cut.seconds; }

// How often a second that drafts add to the step counts, by who decodes.
double waits(const StepBase& step) {
  return 1.0 + static_cast<double>(step.prompts.readers) / step.prompts.decoding;
}

}  // namespace

double step_seconds(const StepBase& step, double rows, double most) {
  const double own = step.cost(step.rows - step.prompts.rows);
  double added = step.cost(step.rows + rows) - step.cost(step.rows);
  if (rows > 0.0) added += step.drafting.fixed + most * step.drafting.each;
  return own + step.spent + added * waits(step);
}

double second_worth(const StepBase& step) {
  return step.tokens * waits(step) / step_seconds(step, 0.0, 0.0);
}

// Appends the moves of an offer, none worth more per row than the one before it. Of options only
// those that no mixture of two others beats: refine() sees the rest.
void Budget::add_moves(const Offer& offer, int index, int max_rows) {
  if (offer.rows == nullptr) {
    sorted_.resize(static_cast<std::size_t>(offer.length));
    std::transform(offer.gains, offer.gains + offer.length, sorted_.begin(), checked);
    if (!std::is_sorted(sorted_.begin(), sorted_.end(), std::greater<>())) {
      std::sort(sorted_.begin(), sorted_.end(), std::greater<>());
    }
    for (int i = 0; i < std::min(offer.length, max_rows); ++i) {
      moves_.push_back({1.0, sorted_[i], index, i + 1});
    }
    return;
  }
  double rows = 0.0, gain = 0.0;
  while (true) {
    Move best{1.0, 0.0, index, 0};
    for (int k = 0; k < offer.length; ++k) {
      const Move move{offer.rows[k] - rows, checked(offer.gains[k]) - gain, index, k + 1};
      if (move.rows > 0.0 && offer.rows[k] <= max_rows &&
          move.gain * best.rows > best.gain * move.rows) {
        best = move;
      }
    }
    if (best.chosen == 0) return;
    moves_.push_back(best);
    rows += best.rows;
    gain += best.gain;
  }
}

Cut Budget::cut(std::span<Offer> offers, const StepBase& step) {
  const auto size = static_cast<int>(offers.size());
  moves_.clear();
  first_.assign(1, 0);
  bool options = false;
  for (int i = 0; i < size; ++i) {
    add_moves(offers[i], i, step.max_more_rows);
    first_.push_back(static_cast<int>(moves_.size()));
    offers[i].chosen = 0;
    options |= offers[i].rows != nullptr;
  }
  // All moves, those first that bring most for a row: what is best is a number of these, because
  // the step's time depends on nothing but the rows. (For nodes that is exact.)
  next_.assign(first_.begin(), first_.end() - 1);
  queue_.clear();
  taken_.clear();
  offer_rows_.assign(offers.size(), 0.0);
  const auto worse = [&](int a, int b) {
    const Move &left = moves_[next_[a]], &right = moves_[next_[b]];
    const double l = left.gain * right.rows, r = right.gain * left.rows;
    return l != r ? l < r : a > b;
  };
  const auto push = [&](int offer) {
    if (next_[offer] == first_[offer + 1]) return;
    queue_.push_back(offer);
    std::push_heap(queue_.begin(), queue_.end(), worse);
  };
  for (int i = 0; i < size; ++i) push(i);
  Cut now{step.tokens, step_seconds(step, 0.0, 0.0), 0.0, 0.0};
  now.plain_speed = step.tokens / now.seconds;
  Cut best = now;
  double most = 0.0;
  std::size_t count_taken = 0;
  while (!queue_.empty()) {
    std::pop_heap(queue_.begin(), queue_.end(), worse);
    const int offer = queue_.back();
    queue_.pop_back();
    const Move& move = moves_[next_[offer]];
    if (now.rows + move.rows > step.max_more_rows) continue;  // nor is there room for what follows
    taken_.push_back(next_[offer]++);
    push(offer);
    most = std::max(most, offer_rows_[offer] += move.rows);
    now.rows += move.rows;
    now.tokens += move.gain;
    now.seconds = step_seconds(step, now.rows, most);
    if (speed(now) > speed(best)) {
      best = now;
      count_taken = taken_.size();
    }
  }
  offer_rows_.assign(offers.size(), 0.0);
  for (std::size_t i = 0; i < count_taken; ++i) {
    const Move& move = moves_[taken_[i]];
    offers[move.offer].chosen = move.chosen;
    offer_rows_[move.offer] += move.rows;
  }
  if (options) refine(offers, step, &best);
  if (best.speedup() < kLeastSpeedup) {
    for (Offer& offer : offers) offer.chosen = 0;
    best = {step.tokens, step_seconds(step, 0.0, 0.0), 0.0, best.plain_speed};
  }
  count(offers, step);
  return best;
}

// Options are few and their rows many, so that the joint order may have jumped over what is best:
// each offer takes the option that suits what the others took.
void Budget::refine(std::span<Offer> offers, const StepBase& step, Cut* cut) {
  bool changed = true;
  for (int sweep = 0; sweep < kSweeps && changed; ++sweep) {
    changed = false;
    for (std::size_t i = 0; i < offers.size(); ++i) {
      Offer& offer = offers[i];
      if (offer.rows == nullptr) continue;
      const double own = offer_rows_[i];
      offer_rows_[i] = 0.0;
      const double most = *std::max_element(offer_rows_.begin(), offer_rows_.end());
      const double rows = cut->rows - own;
      const double tokens =
          cut->tokens - (offer.chosen == 0 ? 0.0 : checked(offer.gains[offer.chosen - 1]));
      for (int k = 0; k <= offer.length; ++k) {
        const double more = k == 0 ? 0.0 : offer.rows[k - 1];
        if (k > 0 && !(more > 0.0 && rows + more <= step.max_more_rows)) continue;
        Cut tried = *cut;
        tried.rows = rows + more;
        tried.tokens = tokens + (k == 0 ? 0.0 : checked(offer.gains[k - 1]));
        tried.seconds = step_seconds(step, tried.rows, std::max(most, more));
        if (k != offer.chosen && speed(tried) > speed(*cut)) {
          *cut = tried;
          offer.chosen = k;
          changed = true;
        }
      }
      offer_rows_[i] = offer.chosen == 0 ? 0.0 : offer.rows[offer.chosen - 1];
    }
  }
}

void Budget::count(std::span<const Offer> offers, const StepBase& step) {
  const double plain = step_seconds(step, 0.0, 0.0);
  for (std::size_t i = 0; i < offers.size(); ++i) {
    if (offers[i].length == 0) continue;
    ++stats.weighed;
    if (offers[i].chosen != 0) continue;
    const bool any = first_[i] < first_[i + 1];
    const Move move = any ? moves_[first_[i]] : Move{1.0, 0.0, 0, 0};
    ++stats.refused;
    stats.refused_tokens += move.gain;
    stats.refused_price += step_seconds(step, move.rows, move.rows) / plain;
  }
}

}  // namespace specdec
