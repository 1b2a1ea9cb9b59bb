// Prefix reuse in steps that run ahead. A page is published when the tokens in it were read, so no
// step in flight writes to it: such a step begins behind what is known.
#include <algorithm>

#include "engine/run_ahead.h"
#include "engine/run_ahead_request.h"

namespace specdec {

// Pages that an admission takes out of the free ones: its worst case, less published pages that
// somebody holds already. (Unused published pages are free pages until they are attached.)
std::int64_t RunAheadExecutor::pages_needed(const Request& request) const {
  if (!pages_.reuse()) return request.promised_pages;
  const PageTable::Match match =
      pages_.match(request.cache_salt, request.text.data(), request.reusable());
  return request.promised_pages - (match.pages - match.unused);
}

// Takes over what is published of the prompt; may be called again until the first row is planned.
void RunAheadExecutor::attach_prefix(Request& request) {
  if (!pages_.reuse()) return;
  ExecutorStats& totals = totals_.executor;
  const bool hit = request.num_cached > 0;
  const int pages = pages_.attach(request.slot, request.text.data(), request.reusable());
  if (pages == 0) return;
  request.num_cached += pages * pages_.page_size();
  request.prefilled = request.num_cached;
  totals.reuse_hits += !hit;
  totals.cached_tokens += static_cast<std::int64_t>(pages) * pages_.page_size();
}

// True when the last row of a prompt in front of this one is in flight, which has the next block of
// this prompt too: once it is read the block is there to be attached. So the outputs of one prompt
// compute it once.
bool RunAheadExecutor::better_wait(const Request& request, std::size_t index) const {
  if (!pages_.reuse() || !request.untouched()) return false;
  const int wanted = request.num_cached + pages_.page_size();
  if (wanted > request.reusable()) return false;
  return std::any_of(
      running_.begin(), running_.begin() + static_cast<std::ptrdiff_t>(index),
      [&](const auto& owner) {
        const Request& other = *owner;
        return !other.in_prefill() && other.known_len == other.prompt_len &&
               other.prompt_len >= wanted && other.cache_salt == request.cache_salt &&
               std::equal(request.text.begin(), request.text.begin() + wanted, other.text.begin());
      });
}

// Publishes the full pages among the first `count` tokens, whose K/V is final. A page that equals a
// published one is kept: steps in flight name it.
void RunAheadExecutor::publish(Request& request, std::int64_t count) {
  if (!pages_.reuse()) return;
  pages_.publish(request.slot, request.text.data(), count, /*swap=*/false);
}

int RunAheadExecutor::reset_prefix_cache() {
  std::lock_guard<std::mutex> lock(mutex_);
  return pages_.drop_unused();
}

}  // namespace specdec
