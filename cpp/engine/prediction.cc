#include "engine/prediction.h"

#include <algorithm>
#include <utility>

namespace specdec {

Prediction::Prediction(std::vector<TokenId> tokens) : tokens_(std::move(tokens)) { fill_next(); }

void Prediction::advance(std::span<const TokenId> output, int count) {
  const std::size_t decided = output.size() - static_cast<std::size_t>(count);
  for (std::size_t i = decided; i < output.size(); ++i) {
    if (!lost_) {
      const std::size_t written = edit_ != kNone ? written_ : 0;
      if (follows(output[i])) {
        ++run_;
        continue;
      }
      lost_ = true;
      whole_ = false;
      lost_at_ = i - written;  // an edit that was left is another one from its first token on
      edit_ = kNone;
    }
    find(output.first(i + 1));
  }
  fill_next();
}

// Whether the token is as predicted; then the cursor, or the place in an edit, goes on.
bool Prediction::follows(TokenId token) {
  const bool inside = edit_ != kNone;
  const int number = inside ? edit_ : edit_at(cursor_);
  if (number != kNone) {
    Edit& edit = edits_[static_cast<std::size_t>(number)];
    if (!inside) written_ = 0;
    if (edit.after[written_] == token) {
      edit_ = number;
      if (++written_ < edit.after.size()) return true;
      cursor_ += edit.before.size();
      edit.trust = std::min(edit.trust + 1, kMaxTrust);
      edit_ = kNone;
      return true;
    }
    --edit.trust;
  }
  if (inside || cursor_ == tokens_.size() || tokens_[cursor_] != token) return false;
  ++cursor_;
  return true;
}

// The first place of the token in [begin, end), else `end`. A stretch at a time without a branch
// inside, which compilers make vectors of: a prompt may have many thousands of tokens.
std::int64_t Prediction::next_place(TokenId token, std::int64_t begin, std::int64_t end) const {
  constexpr std::int64_t kStretch = 64;
  for (; begin + kStretch <= end; begin += kStretch) {
    int any = 0;
    for (std::int64_t i = 0; i < kStretch; ++i) any |= tokens_[begin + i] == token;
    if (any != 0) break;
  }
  while (begin < end && tokens_[begin] != token) ++begin;
  return begin;
}

// Places behind which nothing follows are found, too: there the output is where the prediction
// ends.
void Prediction::find(std::span<const TokenId> output) {
  const auto size = static_cast<std::int64_t>(tokens_.size());
  const auto len = static_cast<std::int64_t>(output.size());
  std::int64_t longest = 0, best = -1;
  const auto from = static_cast<std::int64_t>(cursor_);
  for (const auto& [begin, end] : {std::pair(from, size), std::pair(std::int64_t{0}, from)}) {
    for (std::int64_t last = begin; (last = next_place(output[len - 1], last, end)) < end; ++last) {
      const std::int64_t most = std::min<std::int64_t>({last + 1, len, kMaxResync});
      if (most <= longest) continue;
      std::int64_t equal = 1;
      while (equal < most && tokens_[last - equal] == output[len - 1 - equal]) ++equal;
      if (equal <= longest) continue;
      longest = equal;
      best = last;
    }
  }
  run_ = static_cast<int>(longest);
  lost_ = longest < kMinResync;
  const auto place = static_cast<std::size_t>(best + 1);
  if (!lost_) learn(output, place, longest);
  (lost_ ? guess_ : cursor_) = place;
}

// The output, which left the prediction at cursor_, is back in front of `found`: its last `equal`
// tokens are those of the prediction there.
void Prediction::learn(std::span<const TokenId> output, std::size_t found, std::int64_t equal) {
  // What was written before it was lost is no part of the edit.
  const std::size_t agree = std::min(static_cast<std::size_t>(equal), output.size() - lost_at_);
  // In front of the first token there may be anything, and going back is no edit.
  if (lost_at_ == 0 || found < cursor_ + agree) return;
  std::size_t before = found - agree - cursor_, after = output.size() - agree - lost_at_;
  if (before == 0 || after == 0) {  // put in, or left out: in front of the token behind it
    ++before;
    ++after;
  }
  if (std::max(before, after) > kMaxEdit) return;
  const auto was = tokens_.begin() + static_cast<std::ptrdiff_t>(cursor_);
  const auto is = output.begin() + static_cast<std::ptrdiff_t>(lost_at_);
  Edit edit{{was, was + static_cast<std::ptrdiff_t>(before)},
            {is, is + static_cast<std::ptrdiff_t>(after)},
            1};
  std::erase_if(edits_, [&](const Edit& old) { return old.before == edit.before; });
  if (edits_.size() == kMaxEdits) edits_.erase(edits_.begin());
  edits_.push_back(std::move(edit));
}

// The edit that is expected of the prediction's tokens from `place` on: the longest.
int Prediction::edit_at(std::size_t place) const {
  int found = kNone;
  std::size_t longest = 0;
  const std::span<const TokenId> rest = std::span<const TokenId>(tokens_).subspan(place);
  for (std::size_t i = 0; i < edits_.size(); ++i) {
    const std::vector<TokenId>& before = edits_[i].before;
    if (edits_[i].trust <= 0 || before.size() <= longest || before.size() > rest.size()) continue;
    if (!std::equal(before.begin(), before.end(), rest.begin())) continue;
    longest = before.size();
    found = static_cast<int>(i);
  }
  return found;
}

void Prediction::fill_next() {
  next_.clear();
  std::size_t place = lost_ ? guess_ : cursor_;
  std::size_t written = written_;
  int number = edit_;
  edits_ahead_ = false;
  while (next_.size() < kWeighedDrafts && place < tokens_.size()) {
    if (number == kNone) {
      number = edit_at(place);
      written = 0;
    }
    if (number == kNone) {
      next_.push_back(tokens_[place++]);
      continue;
    }
    edits_ahead_ = true;
    const Edit& edit = edits_[static_cast<std::size_t>(number)];
    next_.insert(next_.end(), edit.after.begin() + static_cast<std::ptrdiff_t>(written),
                 edit.after.end());
    place += edit.before.size();
    number = kNone;
  }
  next_.resize(std::min<std::size_t>(next_.size(), kWeighedDrafts));
}

}  // namespace specdec
