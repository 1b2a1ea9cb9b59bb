// max_utilization: which requests have pages for the next step, and which give theirs back.
#include <algorithm>

#include "engine/request_book.h"

namespace specdec {

// Pages that stay free besides what a request that may wait asks for: one for each request that
// runs, so that those do not preempt it with their next tokens.
std::int64_t RequestBook::headroom() const {
  return std::count_if(running_.begin(), running_.end(),
                       [](const auto& request) { return !request->preempted; });
}

// Pages for what the request has to read, or for one row. A request that has not begun gets its own
// when it is planned, because until then it may take over published ones.
bool RequestBook::secure(const RequestRecord& request) {
  const std::int64_t tokens = request.tokens_to_hold_with(0);
  const std::int64_t missing = pages_.missing(request.slot, tokens);
  if (missing > pages_.free_pages() - claimed_) return false;
  if (!request.untouched()) return pages_.reserve(request.slot, tokens);
  claimed_ += std::max<std::int64_t>(0, missing);
  return true;
}

// Takes the pages of the last request in the order that comes after order_[index] and has some.
// False: none has, or a step in flight still uses them; it sits out then until they are free.
bool RequestBook::make_way(std::size_t index) {
  for (std::size_t i = order_.size(); --i > index;) {
    RequestRecord& victim = *order_[fault(Fault::kOldestPreempted) ? order_.size() - 1 - i : i];
    if (victim.preempted || pages_.held(victim.slot) == 0) continue;
    victim.sits_out = true;
    if (!victim.shares.empty() && !fault(Fault::kPreemptedInFlight)) return false;
    preempt(victim);
    return true;
  }
  return false;
}

const std::vector<RequestRecord*>& RequestBook::make_room(const StepCost& cost) {
  cost_ = &cost;
  order_.clear();
  resumed_.clear();
  claimed_ = 0;
  for (const auto& request : running_) {
    request->sits_out = request->preempted;
    order_.push_back(request.get());
  }
  std::sort(order_.begin(), order_.end(), [](const RequestRecord* a, const RequestRecord* b) {
    return a->params.priority != b->params.priority ? a->params.priority < b->params.priority
                                                    : a->id < b->id;
  });
  bool short_of_pages = false;
  for (std::size_t i = 0; i < order_.size(); ++i) {
    RequestRecord& request = *order_[i];
    if (request.preempted) {
      // Those behind it do not overtake it.
      short_of_pages = short_of_pages || !resume(request);
      continue;
    }
    while (!request.sits_out && !secure(request)) {
      short_of_pages = true;
      if (!make_way(i)) request.sits_out = true;
    }
  }
  return resumed_;
}

void RequestBook::make_room_for_drafts() {
  std::int64_t left = pages_.free_pages() - claimed_;
  for (RequestRecord* request : order_) {
    if (request->sits_out || request->in_prefill()) continue;
    const std::int64_t least = request->tokens_to_hold_with(0);
    const auto held = static_cast<std::int64_t>(pages_.pages(request->slot).size());
    const int drafts =
        std::max(request->max_drafts, std::min(request->known_drafts, request->room()));
    const std::int64_t wanted = pages_.pages_for(request->tokens_to_hold_with(drafts));
    const std::int64_t pages = std::clamp(wanted, held, held + std::max<std::int64_t>(left, 0));
    pages_.reserve(request->slot, pages * pages_.page_size());
    left -= pages - held;
    request->page_room =
        static_cast<int>(std::min<std::int64_t>(kMaxDraftLen, pages * pages_.page_size() - least));
  }
}

// What was decided stays with the request and its slot; K/V that is final stays published.
void RequestBook::preempt(RequestRecord& request) {
  std::int64_t final_len = request.prefilled;
  if (!request.in_prefill()) {
    final_len = request.unmoved.empty() ? request.known_len - 1 : request.unmoved_at + 1;
  }
  if (pages_.reuse()) {
    pages_.commit(request.slot, std::max(final_len, pages_.shared_tokens(request.slot)));
    publish(request, final_len, /*in_flight=*/false);
  }
  if (!swap_out(request, final_len)) read_again(request);
  pages_.release(request.slot);
  request.preempted = true;
  ++preemptions_;
}

// A request without pages is to compute its K/V again.
void RequestBook::read_again(RequestRecord& request) {
  request.swapped.reset();
  request.read_to = request.begun() ? request.known_len - 1 : request.prompt_len;
  if (fault(Fault::kReadAgainTooLittle)) --request.read_to;
  request.prefilled = request.restored = 0;
  request.unmoved.clear();
  request.kept_row = -1;
}

// Lets a preempted request run again if there is room for all its tokens and the next.
bool RequestBook::resume(RequestRecord& request) {
  if (request.swapped) return swap_in(request);
  const std::int64_t reusable = request.begun() && request.reusable() > 0
                                    ? request.read_to
                                    : std::min(request.reusable(), request.read_to);
  const std::int64_t needed = headroom() + pages_to_begin(request, reusable);
  if (needed > pages_.free_pages() - claimed_) return false;
  pages_.open(request.slot, request.params.cache_salt);
  request.prefilled = pages_.attach(request.slot, request.tokens(), reusable) * pages_.page_size();
  recomputed_tokens_ += request.read_to - request.prefilled;
  request.preempted = false;
  request.sits_out = !secure(request);
  resumed_.push_back(&request);
  return true;
}

}  // namespace specdec
