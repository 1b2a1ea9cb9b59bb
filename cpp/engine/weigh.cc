// How many drafts each decoding request may have in a step: what the one budget makes of the
// chances that are known in front of it, and of what such steps brought.
#include <algorithm>
#include <cstddef>
#include <utility>

#include "engine/executor.h"

namespace specdec {
namespace {

// Steps that verify a prediction take so many times as long for a token as the best of them would:
// of 1, 1.5 and 2 the best for predictions that begin right; the others do not feel it
// (benchmarks/edits_replay.py).
constexpr double kBehindBest = 1.5;

// Somebody drafts: what that costs a step whoever it is.
void spend(StepBase* step) { step->spent += std::exchange(step->drafting.fixed, 0.0); }

}  // namespace

// Are the request's drafts weighed before the step that verifies them, by chances of each?
bool Executor::weighs(const RequestRecord& request) const {
  return config_.method == DraftMethod::kNgram || request.knows_drafts() ||
         request.suffix_memory != nullptr ||
         (config_.method == DraftMethod::kSuffix && request.host_slot != nullptr);
}

// The step that is planned, with `rows` rows, prompts and drafts that are not weighed among them.
StepBase Executor::step_base(int rows, double tokens, int max_more_rows) const {
  return {.cost = cost_now_,
          .rows = rows,
          .tokens = tokens,
          .max_more_rows = max_more_rows,
          .prompts = prompts_};
}

// How many of a prediction's first tokens are verified with the prompt. One that is right saves
// what it takes in the steps behind, which verify many at a time; answers often begin otherwise.
void Executor::weigh_beginning(RequestRecord& request) {
  if (!request.prediction || !request.adaptive || !request.external || !step_cost_.known()) return;
  const int most = request.external_drafts();
  request.offer.clear();
  int node = DraftOffer::kGolden;
  for (int i = 0; i < most; ++i) {
    const DraftOffer::Estimate estimate{static_cast<std::int16_t>(i + 1), kBeginning, 1.0f};
    node = request.offer.add(node, request.params.external_drafts[i], DraftSource::kPrediction,
                             estimate, request.learnt(), request.shared_rates.get());
  }
  double token = step_cost_(1);
  for (int rows = 2; rows <= 1 + request.known_drafts; ++rows) {
    token = std::min(token, step_cost_(rows) / rows);
  }
  const int base = std::min(request.prompt_len, config_.max_num_tokens);
  const double row = step_cost_.more_rows(base, most) / most;
  int count = 0;
  while (count < most && request.offer.survival()[count] * kBehindBest * token > row) ++count;
  request.params.external_drafts.resize(count);
  request.external->tree.size = 1 + count;
  if (count == 0) request.external = nullptr;
}

// How many drafts each request may have in this step whose chances are known in front of it: those
// that the host has looked up, chains of prompt lookup on a device. `most_drafts`: rows left for
// drafts; `each`: of one request.
void Executor::weigh_lookups(int most_drafts, int each) {
  int rows = prompts_.rows + static_cast<int>(decoding_.size());
  bool any = false;
  chain_offers_.assign(decoding_.size(), {});
  for (std::size_t i = 0; i < decoding_.size(); ++i) {
    RequestRecord& request = *decoding_[i];
    request.weighed = weighs(request);
    if (!request.weighed) continue;
    any = true;
    const int looked_up = request.suffix_memory ? request.suffix_drafts() : request.method_drafts;
    const int known = cost_now_.known() ? kWeighedDrafts : kKnownDrafts;
    const int most =
        std::max(looked_up, request.knows_drafts() ? std::min(request.known_drafts, known) : 0);
    int length = std::max(0, std::min(most, most_drafts_of(request, each)));
    const bool on_host = request.host_slot != nullptr;
    if (request.knows_drafts()) request.proposal = nullptr;  // what is known comes first
    // Pages were promised for the text and the method's drafts behind it.
    length = std::min(length, std::max(request.max_drafts, request.room()));
    if (request.proposal) {
      length = std::min({length, request.room(), request.proposal->tree.num_drafts()});
    } else if (on_host) {
      look_up(request, most, request.room());
      length = std::min(length, request.offer.num_drafts());
    } else {
      length = std::max(0, std::min(length, request.room()));
    }
    if (request.adaptive && cost_now_.known() && !request.proposal) {
      ChainRates& shared = request.shared_rates->at(static_cast<std::size_t>(DraftSource::kLookup));
      const double* survival =
          on_host ? request.offer.survival() : request.lookup.survival(shared, length);
      chain_offers_[i] = {survival, length};
    } else {
      request.draft_limit = length = std::max(0, std::min(length, most_drafts));
      rows += length;
      most_drafts -= length;
    }
  }
  if (!any || !cost_now_.known()) return;
  StepBase step = step_base(rows, static_cast<double>(decoding_.size()), most_drafts);
  budget_.cut(chain_offers_, step);
  for (std::size_t i = 0; i < decoding_.size(); ++i) {
    RequestRecord& request = *decoding_[i];
    if (!request.weighed || !request.adaptive || request.proposal) continue;
    const Offer& offer = chain_offers_[i];
    // What was not drafted teaches on the host alone, where the match is known.
    const bool probe = request.host_slot == nullptr && offer.length > 0 &&
                       request.lookup.probes(step, offer.length, offer.chosen);
    request.draft_limit = probe ? offer.length : offer.chosen;
    budget_.stats.probes += probe;
    step.rows += request.draft_limit;
  }
}

// Which arm each request takes that learns by what steps brought. They are chosen together: what
// drafting costs a step is worth it, as a rule, if several share it.
void Executor::choose_arms(int most_drafts, int each) {
  arms_chosen_.assign(decoding_.size(), -1);
  const bool any = std::any_of(decoding_.begin(), decoding_.end(), [](RequestRecord* r) {
    return r->any_arms() != nullptr && (!r->weighed || r->asks());
  });
  if (!cost_now_.known() || !any) return;
  StepBase step =
      step_base(prompts_.rows + static_cast<int>(decoding_.size()), /*tokens=*/0.0, most_drafts);
  step.drafting = draft_cost_;
  chain_offers_.assign(decoding_.size(), {});
  for (std::size_t i = 0; i < decoding_.size(); ++i) {
    RequestRecord& request = *decoding_[i];
    BudgetBandit* arms = request.any_arms();
    const bool asks = !request.weighed || request.asks();
    const int most = std::min(request.method_drafts, most_drafts_of(request, each));
    const int known = request.weighed ? std::max(0, request.draft_limit) : 0;
    step.rows += known;
    step.max_more_rows = std::max(0, step.max_more_rows - known);
    const bool sees = request.weighed && request.host_slot != nullptr;
    const double worth = sees ? request.offer.expected(known) : 0.0;
    if (arms != nullptr && request.adaptive && !request.proposal && asks && most > 0) {
      // What the method brings where what is at hand fails.
      chain_offers_[i] = arms->offer(sees ? 1.0 - request.offer.first_chance(known) : 1.0);
      step.tokens += arms->tokens(0) + worth;
      continue;
    }
    step.tokens += 1.0 + worth;
    int fixed = asks ? most : 0;
    if (request.proposal) fixed = std::min(most, request.proposal->tree.num_drafts());
    fixed = std::max(0, fixed);
    step.rows += fixed;
    step.max_more_rows = std::max(0, step.max_more_rows - fixed);
    if (fixed > 0 && !request.proposal) spend(&step);
  }
  const Cut cut = budget_.cut(chain_offers_, step);
  step.rows += static_cast<int>(cut.rows + 0.5);
  if (cut.rows > 0.0) spend(&step);
  for (std::size_t i = 0; i < decoding_.size(); ++i) {
    if (chain_offers_[i].length == 0) continue;
    const int chosen = chain_offers_[i].chosen;
    arms_chosen_[i] = decoding_[i]->any_arms()->settle(chosen, step);
    if (arms_chosen_[i] == chosen) continue;
    ++budget_.stats.probes;
    spend(&step);  // others may try theirs in the same step
  }
}

// What the request may draft in this step. `most_drafts`: rows left for drafts; `arm`: -1: none was
// chosen.
DraftShare Executor::share_of(RequestRecord& request, int most_drafts, int arm) const {
  most_drafts = std::max(0, most_drafts);
  request.asked = 0;
  if (request.proposal) {
    const int drafts = std::min(request.proposal->tree.num_drafts(), request.max_drafts);
    return {.max_drafts = std::min(drafts, most_drafts)};
  }
  if (!request.weighed) return asked_of(request, most_drafts, arm);
  request.draft_limit = std::min(request.draft_limit, most_drafts);
  DraftShare share{.max_drafts = 0};
  // Pages were promised for the text and so many drafts behind it.
  const int room = std::max(request.max_drafts, request.room());
  const int most = std::min(most_drafts, room) - request.draft_limit;
  if (request.asks()) share = asked_of(request, std::max(0, most), arm);
  request.asked = share.max_drafts;
  share.max_drafts += request.draft_limit;
  return share;
}

// What its method may draft.
DraftShare Executor::asked_of(const RequestRecord& request, int most_drafts, int arm) const {
  DraftShare share;
  share.max_drafts = std::min(request.method_drafts, most_drafts);
  if (share.max_drafts <= 0) return share;
  if (arm >= 0 && request.sizes) {
    share.max_drafts = std::min(share.max_drafts, request.sizes->drafts(arm));
  } else if (arm >= 0) {
    const LookaheadBudget budget = request.arms->budget(arm);
    share.window_rows = budget.window_rows;
    share.guesses = budget.guesses;
    const LookaheadConfig& triple = request.params.lookahead.value_or(config_.lookahead);
    share.max_drafts = std::min(share.max_drafts, lookahead_draft_bound(triple, budget));
  }
  return share;
}

}  // namespace specdec
