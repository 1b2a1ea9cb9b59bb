// Text that the user expects as output, and where in it the output stands.
//
// While the output follows the prediction, the tokens behind the cursor are what comes next. After
// a mismatch there is nothing to propose until the end of the output is found in the prediction
// again: its longest suffix of at least kMinResync tokens, and of several places the first one from
// the cursor on, else the first of all.
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
  // What comes next, if the output goes on as predicted; empty: nothing is known.
  std::span<const TokenId> following() const {
    return lost_ ? std::span<const TokenId>() : std::span<const TokenId>(tokens_).subspan(cursor_);
  }
  // Tokens in a row that were as predicted, or that the cursor was found by.
  int run() const { return run_; }

 private:
  void resync(std::span<const TokenId> output);

  std::vector<TokenId> tokens_;
  std::size_t cursor_ = 0;  // behind the last token that was as predicted
  int run_ = 0;
  bool lost_ = false;
};

}  // namespace specdec
