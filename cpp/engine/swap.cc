// max_utilization: K/V of preempted requests in the host's pool.
//
// The record of such a request stays as it is: when its pages are copied back, under other numbers,
// it goes on as if it had sat out. A drafter's pages are copied with the target's, so drafters need
// not be told.
#include <algorithm>

#include "base/check.h"
#include "engine/request_book.h"

namespace specdec {

// The numbers of the parts that the slot sees of a block, by narrow window.
std::vector<std::int32_t> RequestBook::parts(int slot, std::size_t block) const {
  std::vector<std::int32_t> numbers;
  for (int window = 0; window < pages_.num_narrow(); ++window) {
    numbers.push_back(pages_.part(window, slot, static_cast<int>(block)));
  }
  return numbers;
}

// Orders copies of what only this request holds, if that is cheaper than to compute it again and
// the pool has room. Blocks that others hold as well are not copied: they are there, or are
// computed again, when the request comes back. `final_len`: tokens whose K/V is final.
bool RequestBook::swap_out(RequestRecord& request, std::int64_t final_len) {
  if (host_pages_.num_pages() == 0) return false;
  // Half of its pages hold what an earlier copy brought, or nothing: what is known is a prefix.
  if (request.begun() && request.in_prefill()) return false;
  const std::int64_t length = request.tokens_to_hold();
  const auto blocks = static_cast<std::ptrdiff_t>(pages_.pages_for(length));
  const auto& held = pages_.pages(request.slot);
  const std::vector<std::int32_t> run(held.begin(), held.begin() + blocks);
  const int first = std::min(pages_.held_by_others(request.slot), static_cast<int>(blocks));
  const auto count = std::count_if(run.begin() + first, run.end(),
                                   [](std::int32_t page) { return page != PageTable::kNoPage; });
  const int chunk = request.text_chunk > 0 ? request.text_chunk : config_.max_num_tokens;
  const std::int64_t start = std::int64_t{first} * pages_.page_size();
  if (count == 0 || !swapping_pays(*cost_, config_.host_link, count, start, length, chunk)) {
    return false;
  }
  if (!host_pages_.keep(request.slot, run, first)) {
    ++host_full_;
    return false;
  }
  const auto& copies = host_pages_.pages(request.slot);
  for (std::size_t block = first; block < run.size(); ++block) {
    if (copies[block] == HostPages::kNoPage) continue;
    orders_.push_back({.request = request.id,
                       .page = run[block],
                       .host_page = copies[block],
                       .to_host = true,
                       .parts = parts(request.slot, block)});
  }
  request.swapped = SwappedOut{first, pages_.kept_from(request.slot), length, final_len,
                               pages_.seen(request.slot)};
  ++swapped_out_;
  pages_out_ += count;
  return true;
}

// Lets a request whose K/V is in the host's pool run again if there is room for all its tokens and
// the next.
bool RequestBook::swap_in(RequestRecord& request) {
  const SwappedOut kept = *request.swapped;
  const std::string& salt = request.params.cache_salt;
  // Behind a window a text is restored as it was; else what is published of it need not be copied.
  const bool attaches = pages_.reuse() && pages_.span().window == 0;
  PageTable::Match match;
  if (attaches) match = pages_.match(salt, request.tokens(), kept.final_len);
  const bool lacks_prefix = match.blocks < kept.first;
  if (lacks_prefix && !request.begun()) {  // what was read of the prompt is no prefix any more
    host_pages_.drop(request.slot);
    read_again(request);
    return resume(request);
  }
  const std::int64_t tokens = request.tokens_to_hold_with(0) + request.in_prefill();
  const std::int64_t blocks = std::max(pages_.pages_for(kept.length),
                                       std::min(request.most_blocks, pages_.pages_for(tokens)));
  const auto sinks = pages_.pages_for(pages_.span().sink_tokens);
  const std::int64_t holes = std::max<std::int64_t>(0, kept.kept_from - sinks);
  const std::int64_t needed = headroom() + blocks - holes - match.blocks + match.unused;
  if (needed > pages_.free_pages() - claimed_) return false;
  pages_.open(request.slot, salt);
  const int attached = attaches ? pages_.attach(request.slot, request.tokens(), kept.final_len) : 0;
  const bool restored = pages_.restore(request.slot, kept.length, kept.kept_from, kept.seen);
  SPECDEC_ENSURE(restored, "request ", request.id, " was to get pages for ", kept.length,
                 " tokens back and did not");
  const auto& run = pages_.pages(request.slot);
  const auto& copies = host_pages_.pages(request.slot);
  for (std::size_t block = attached; block < copies.size(); ++block) {
    if (copies[block] == HostPages::kNoPage || run[block] == PageTable::kNoPage) continue;
    if (fault(Fault::kPageNotCopied) && block + 1 == copies.size()) break;
    const std::vector<std::int32_t> seen = parts(request.slot, block);
    orders_.push_back({.request = request.id,
                       .page = run[block],
                       .host_page = copies[block],
                       .to_host = false,
                       .parts = seen});
    // Where all layers of a page are copied, what no row sees takes no memory.
    for (std::size_t window = 0; !numbered_parts_ && window < seen.size(); ++window) {
      if (seen[window] != PageParts::kNone) continue;
      orders_.push_back({.page = run[block], .left = static_cast<int>(window)});
    }
    ++pages_in_;
  }
  host_pages_.drop(request.slot);
  if (lacks_prefix) {  // nobody holds it any more; what was copied follows it
    request.prefilled = attached * pages_.page_size();
    request.read_to = kept.first * pages_.page_size();
    request.restored = static_cast<int>(kept.length);
    recomputed_tokens_ += request.read_to - request.prefilled;
  }
  request.swapped.reset();
  request.preempted = false;
  ++swapped_in_;
  request.sits_out = !secure(request);
  return true;
}

void RequestBook::lose_copies(RequestRecord& request) {
  if (!request.swapped && (request.preempted || !request.shares.empty())) return;
  host_pages_.drop(request.slot);
  pages_.release(request.slot);
  request.preempted = true;
  read_again(request);
}

}  // namespace specdec
