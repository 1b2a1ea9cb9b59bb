// What is known about how far drafts from texts are right.
//
// The chance that the d-th draft token is accepted, given that the ones before it were, is learnt
// from what was observed: per request, leaning on all requests of the executor while a request is
// young. Drafts of longer matches are likelier, so the rates are kept per match length and depth.
// A draft that was cut short, or not verified at all, still teaches: the tokens that were emitted
// say whether it would have been right. So a length of zero recovers by itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/budget.h"

namespace specdec {

// A request forgets its own past faster than the executor forgets that of all requests. Behind a
// long match a step makes many drafts, and how far they go depends on how rarely one is wrong: what
// a few steps have shown does not say.
inline constexpr double kOwnDecay = 0.95, kLongMatchDecay = 0.98, kSharedDecay = 0.99;
inline constexpr int kLongMatch = 10;
constexpr double own_decay(int match_len) {
  return match_len >= kLongMatch ? kLongMatchDecay : kOwnDecay;
}

// Where drafts come from, in the order in which a token that several have proposed is said to be
// one's. kModel: a network, from outside of the executor; kRequest: they came with the request.
enum class DraftSource : std::uint8_t {
  kRequest,
  kPrediction,
  kGrammar,
  kSuffix,
  kEdits,  // of the prompt, learnt from the output
  kLookup,
  kModel,
  kLookahead
};
inline constexpr std::size_t kNumDraftSources = 8;
// Names of drafts' sources, as bits of what a node of a tree was proposed by.
using SourceBits = std::uint8_t;
constexpr SourceBits bit_of(DraftSource source) {
  return static_cast<SourceBits>(1u << static_cast<unsigned>(source));
}

// The depth that drafts of a prediction have in front of the output's first token.
inline constexpr std::int16_t kBeginning = 2;

// What a rate is taken for before anything was observed.
double start_rate(DraftSource source, int match_len, int depth);

class ChainRates {
 public:
  // Conditional acceptance rate of a source's drafts at `depth` (1-based) after a match of
  // `match_len` tokens.
  double rate(const ChainRates& shared, DraftSource source, int match_len, int depth) const;
  // `offered`: the part of all that might follow that was proposed, 1 for a chain. A rate is what
  // was accepted over what was offered.
  void observe(int match_len, int depth, bool accepted, double decay, double offered = 1.0);

 private:
  friend double start_rate(DraftSource source, int match_len, int depth);
  static constexpr int kMatchBuckets = 6;
  static constexpr int kDepthBuckets = 6;
  static int match_bucket(int match_len);
  static int depth_bucket(int depth);

  struct Count {
    double hits = 0.0, tries = 0.0;
  };
  std::array<std::array<Count, kDepthBuckets>, kMatchBuckets> counts_{};
};

// A request's own past of prompt lookup, where the host does not know the match that the device
// will find: the chance that a draft is accepted is kept by its depth alone. What was not drafted
// teaches nothing here, so now and then a step drafts its full length, in proportion to what that
// costs (about 1 % of the time). Results arrive late; they are told what their step was allowed.
class ChainHistory {
 public:
  // Chance of each of the next `length` drafts, where `shared` is what all requests showed. The
  // array is this object's.
  const double* survival(const ChainRates& shared, int length);
  // True when a step that drafts `length` is due although `chosen` would be best; `step`: as it is
  // without this request's drafts.
  bool probes(const StepBase& step, int length, int chosen);
  // A step was allowed `allowed` drafts and `accepted` were right.
  void observe(ChainRates& shared, int allowed, int accepted);

 private:
  ChainRates rates_;
  std::vector<double> survival_;
  std::int64_t step_ = 0, last_full_ = 0;
};

}  // namespace specdec
