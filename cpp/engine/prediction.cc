#include "engine/prediction.h"

#include <algorithm>

namespace specdec {

void Prediction::advance(std::span<const TokenId> output, int count) {
  const auto fresh = output.last(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < fresh.size(); ++i) {
    if (!lost_ && cursor_ < tokens_.size() && tokens_[cursor_] == fresh[i]) {
      ++cursor_;
      ++run_;
      continue;
    }
    lost_ = true;
    find(output.first(output.size() - fresh.size() + i + 1));
  }
}

// Places behind which nothing follows are found, too: there the output is where the prediction
// ends.
void Prediction::find(std::span<const TokenId> output) {
  const auto size = static_cast<std::int64_t>(tokens_.size());
  const auto len = static_cast<std::int64_t>(output.size());
  std::int64_t longest = 0, best = -1;
  const auto from = static_cast<std::int64_t>(cursor_);
  for (std::int64_t turn = 0; turn < size; ++turn) {
    const std::int64_t last = (from + turn) % size;  // of the prediction's tokens
    const std::int64_t most = std::min<std::int64_t>({last + 1, len, kMaxResync});
    if (most <= longest || tokens_[last] != output[len - 1]) continue;
    std::int64_t equal = 1;
    while (equal < most && tokens_[last - equal] == output[len - 1 - equal]) ++equal;
    if (equal <= longest) continue;
    longest = equal;
    best = last;
  }
  run_ = static_cast<int>(longest);
  lost_ = longest < kMinResync;
  (lost_ ? guess_ : cursor_) = static_cast<std::size_t>(best + 1);
}

}  // namespace specdec
