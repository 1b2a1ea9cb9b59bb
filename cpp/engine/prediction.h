// Text that the output is expected to follow, and where in it the output stands: what the user
// predicts, or else the prompt, which some outputs are an edited copy of.
//
// While the output follows the prediction, the tokens behind the cursor are what comes next. After
// a mismatch the end of the output is looked for in the prediction: its longest suffix, and of
// several places the first one from the cursor on, else the first of all. From kMinResync tokens on
// the cursor is set there. A shorter suffix makes a guess, for this step alone: the cursor stays
// where it was lost, so that the next search begins there.
//
// What the output had in the place of the prediction's tokens in between is remembered as an edit,
// and expected wherever those tokens come again: who renames a variable renames it everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"

namespace specdec {

// Drafts of one step, at most: of a prediction where they are weighed against the time of rows;
// beside the prompt and where nothing is weighed, and of a grammar.
inline constexpr int kWeighedDrafts = 64, kKnownDrafts = 16;

class Prediction {
 public:
  static constexpr int kMinResync = 3;
  static constexpr int kMaxResync = 32;  // a longer suffix says nothing new
  static constexpr int kMaxEdit = 8;     // tokens of an edit; more are not written again
  static constexpr int kMaxEdits = 16;   // the latest ones

  explicit Prediction(std::vector<TokenId> tokens);

  // The next `count` tokens were decided; `output`: all of them, those included.
  void advance(std::span<const TokenId> output, int count);
  // What comes next, up to kWeighedDrafts tokens, if the output goes on as predicted and as it was
  // edited so far; empty: nothing is known. With `guesses` also where fewer than kMinResync tokens
  // agree: worth a look where chances are weighed.
  std::span<const TokenId> following(bool guesses) const {
    if (lost_ && !(guesses && run_ > 0)) return {};
    return next_;
  }
  // The same where an edit is among it; nothing else.
  std::span<const TokenId> edited() const {
    return lost_ || !edits_ahead_ ? std::span<const TokenId>() : std::span<const TokenId>(next_);
  }
  // Tokens in a row that were as predicted, or that the place was found by.
  int run() const { return run_; }
  // The output has always been as predicted. The two begin together, which says more than that some
  // tokens agree.
  bool is_whole() const { return whole_; }

 private:
  // `before`, tokens of the prediction, became `after` in the output; neither is empty.
  struct Edit {
    std::vector<TokenId> before, after;
    int trust;  // 1 when learnt; it is expected as long as this is positive
  };
  static constexpr int kMaxTrust = 3;
  static constexpr int kNone = -1;

  bool follows(TokenId token);
  std::int64_t next_place(TokenId token, std::int64_t begin, std::int64_t end) const;
  void find(std::span<const TokenId> output);
  void learn(std::span<const TokenId> output, std::size_t found, std::int64_t equal);
  int edit_at(std::size_t place) const;
  void fill_next();

  std::vector<TokenId> tokens_;
  std::vector<TokenId> next_;
  bool edits_ahead_ = false;  // an edit is among them
  std::vector<Edit> edits_;
  int edit_ = kNone;  // the output is inside of what it became: `written_` tokens of that are there
  std::size_t written_ = 0;
  std::size_t cursor_ = 0;   // behind the last token that was as predicted
  std::size_t lost_at_ = 0;  // lost: the output's first token that was not
  std::size_t guess_ = 0;    // lost, run_ > 0: where the output may stand
  int run_ = 0;
  bool lost_ = false, whole_ = true;
};

}  // namespace specdec
