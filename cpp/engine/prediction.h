// Text that the user expects as output, and where in it the output stands.
//
// While the output follows the prediction, the tokens behind the cursor are what comes next. After
// a mismatch the end of the output is looked for in the prediction: its longest suffix, and of
// several places the first one from the cursor on, else the first of all. From kMinResync tokens on
// the cursor is set there. A shorter suffix makes a guess, for this step alone: the cursor stays
// where it was lost, so that the next search begins there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"

namespace specdec {

// Drafts of one step that a prediction or a grammar makes, at most.
inline constexpr int kKnownDrafts = 16;

class Prediction {
 public:
  static constexpr int kMinResync = 3;
  static constexpr int kMaxResync = 32;  // a longer suffix says nothing new

  explicit Prediction(std::vector<TokenId> tokens) : tokens_(std::move(tokens)) {}

  // The next `count` tokens were decided; `output`: all of them, those included.
  void advance(std::span<const TokenId> output, int count);
  // What comes next, if the output goes on as predicted; empty: nothing is known. With `guesses`
  // also where fewer than kMinResync tokens agree: worth a look where chances are weighed.
  std::span<const TokenId> following(bool guesses) const {
    if (lost_ && !(guesses && run_ > 0)) return {};
    return std::span<const TokenId>(tokens_).subspan(lost_ ? guess_ : cursor_);
  }
  // Tokens in a row that were as predicted, or that the place was found by.
  int run() const { return run_; }

 private:
  void find(std::span<const TokenId> output);

  std::vector<TokenId> tokens_;
  std::size_t cursor_ = 0;  // behind the last token that was as predicted
  std::size_t guess_ = 0;   // lost, run_ > 0: where the output may stand
  int run_ = 0;
  bool lost_ = false;
};

}  // namespace specdec
