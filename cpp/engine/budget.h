// The one draft budget: which drafts a step verifies.
//
// A step of given rows and contexts takes T(rows) seconds, drafting included, and brings a token
// for each decoding request plus one for each draft that is accepted. The drafts of all requests
// are cut jointly so that expected tokens per second are as many as can be.
//
// Beside rows of prompts a draft costs what it adds to *that* step, T(all rows) - T(all others):
// prompts are read whatever is drafted, so their time is no reason to draft more. The requests that
// read prompts wait for what a draft adds, too, so it counts once more for each of them, in
// proportion to the requests that decode.
//
// What is on offer is one of two things. *Nodes*, where the chance of each is known: a chain and a
// tree are the same case, because a child is never likelier than its parent. *Options*, where only
// sums are known: each says how many rows it has and how many tokens it is expected to bring.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/step_cost.h"

namespace specdec {

// Seconds that drafting adds to a step: `fixed` if any request drafts, and `each` for each draft of
// the request that drafts most (all requests share a draft model's passes).
struct DraftCost {
  double fixed = 0.0, each = 0.0;
};

// The share of time, or of tokens, that choices may cost which do not look best, so that none is
// off for good.
inline constexpr double kProbeShare = 0.01;

// A step drafts if that is expected to make it at least this many times as fast. Probabilities and
// times are not known more precisely, so drafts that gain less lose as often; among many requests
// few gain more.
inline constexpr double kLeastSpeedup = 1.02;

// What one request has on offer.
struct Offer {
  // Nodes (`rows` is null): gains[i] is the chance that draft i is accepted. Parents come first and
  // are no less likely.
  // Options: gains[k] tokens for rows[k] > 0 rows, both beyond those of no draft at all; any order.
  const double* gains = nullptr;
  int length = 0;
  const double* rows = nullptr;
  // Out. Nodes: how many are kept, the likeliest ones (where the gains never rise, the first).
  // Options: 1 + the option that was taken, 0: none.
  int chosen = 0;
};

// Who reads prompts beside the requests that decode.
struct PromptShare {
  int rows = 0;      // of the step
  int readers = 0;   // requests whose prompts are not read yet
  int decoding = 1;  // requests that decode, at least 1
};

// The step without the drafts that are weighed.
struct StepBase {
  const StepCost& cost;  // for the contexts of this step
  int rows = 1;          // prompts, a row for each decoding request, drafts that are not weighed
  double tokens = 1.0;   // that these bring
  int max_more_rows = 1 << 30;
  DraftCost drafting = {};
  double spent = 0.0;  // seconds of drafting that are spent whatever is chosen
  PromptShare prompts = {};
};

struct Cut {
  double tokens = 0.0, seconds = 0.0;  // expected of the step, with what was chosen
  double rows = 0.0;
  double plain_speed = 0.0;  // tokens per second with no draft at all
  // Tokens per second over those without drafts; 1: nothing was worth it.
  double speedup() const { return tokens / seconds / plain_speed; }
};

// Why steps drafted what they did; sums over offers.
struct BudgetStats {
  std::int64_t weighed = 0;   // of a request's step: one, or more where its sources are several
  std::int64_t refused = 0;   // of these: not one draft was taken
  std::int64_t probes = 0;    // drafted to learn, against the expectation
  double refused_tokens = 0;  // sums over what was refused: tokens of the best alternative,
  double refused_price = 0;   // and its time over that of a step without drafts
};

// Seconds of the step with `rows` rows of drafts, `most` of them of one request: those without
// prompts, and what drafts add beside prompts, as often as somebody waits for it.
double step_seconds(const StepBase& step, double rows, double most);

// Tokens that a second of drafting has to bring to be worth it.
double second_worth(const StepBase& step);

class Budget {
 public:
  Cut cut(std::span<Offer> offers, const StepBase& step);

  BudgetStats stats;

 private:
  struct Move {  // of one offer: some rows more for some tokens more
    double rows, gain;
    int offer;
    int chosen;  // of the offer, once it is made
  };
  void add_moves(const Offer& offer, int index, int max_rows);
  void refine(std::span<Offer> offers, const StepBase& step, Cut* cut);
  void count(std::span<const Offer> offers, const StepBase& step);

  // Scratch of one call, kept to avoid allocation on the step's path.
  std::vector<Move> moves_;         // offer by offer
  std::vector<int> first_;          // [offers + 1] into moves_
  std::vector<int> next_, queue_;   // [offers] into moves_; a heap of those
  std::vector<int> taken_;          // into moves_, in the order in which they were taken
  std::vector<double> offer_rows_;  // [offers]
  std::vector<double> sorted_;
};

}  // namespace specdec
