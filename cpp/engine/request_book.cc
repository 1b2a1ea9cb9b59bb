#include "engine/request_book.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/check.h"
#include "base/pages.h"

namespace specdec {

int RequestBook::pages_per_slot(const ExecutorConfig& c) {
  return pages_per_request(c.max_seq_len, c.page_size);
}

RequestBook::RequestBook(const ExecutorConfig& c)
    : pages_(c.num_pages, c.page_size, c.max_batch_size, pages_per_slot(c), c.enable_block_reuse,
             /*hash_bits=*/64, c.attention),
      host_pages_(c.num_host_pages, c.max_batch_size),
      config_(c) {
  for (int slot = c.max_batch_size - 1; slot >= 0; --slot) free_slots_.push_back(slot);
  running_.reserve(c.max_batch_size);
}

void RequestBook::promise(RequestRecord* request) const {
  RequestRecord& r = *request;
  // The largest that tokens_to_hold() can ever be.
  const std::int64_t prompt = std::int64_t{r.prompt_len} + r.external_drafts();
  r.most_blocks = pages_.pages_for(std::max(prompt, r.last_written()));
  r.promised_pages = r.most_blocks;
  if (pages_.span().window > 0) {
    r.publishes_prompt = pages_.reuse();
    const std::int64_t step = 1 + r.most_drafts();
    r.prompt_chunk = prompt_chunk(config_);
    r.text_chunk = text_chunk(config_, step);
    r.promised_pages = std::min(r.most_blocks, pages_in_window(config_, prompt, step));
  }
  SPECDEC_REQUIRE(r.promised_pages <= pages_.num_pages(), "the request needs ", r.promised_pages,
                  " KV pages of ", pages_.page_size(), " tokens (prompt ", r.prompt_len,
                  " + max_tokens ", r.params.max_tokens, " + drafts), the whole pool has ",
                  pages_.num_pages(), ": lower max_tokens or raise kv_cache_config.max_tokens");
}

void RequestBook::narrow(bool numbered) {
  NarrowWindows narrow;
  narrow.windows = narrow_groups(config_.narrow_windows);
  if (narrow.windows.empty()) return;
  narrow.most = config_.narrow_pages;
  if (narrow.most.empty()) narrow.most.assign(narrow.windows.size(), config_.num_pages);
  narrow.sink_tokens = config_.narrow_sink_tokens;
  narrow.numbered = numbered_parts_ = numbered;
  std::function<void(int, std::int32_t)> gone;
  if (!numbered) {
    gone = [this](int window, std::int32_t page) {
      orders_.push_back({.page = page, .left = window});
    };
  }
  pages_.narrow(narrow, gone);
}

void RequestBook::trim(const RequestRecord& request) {
  std::int64_t position = request.first_row();
  if (!request.unmoved.empty()) {
    position = std::min(position, request.unmoved_at + pages_.narrowest() - 1);
  }
  pages_.trim(request.slot, position, request.sheds_pages());
}

RequestId RequestBook::add(std::unique_ptr<RequestRecord> request) {
  const RequestId reserved = request->params.id;
  SPECDEC_REQUIRE(reserved == 0 || (reserved > last_id_ && reserved < next_id_), "id = ", reserved,
                  ": expected one that reserve() gave behind request ", last_id_, ", or 0");
  const RequestId id = request->id = last_id_ = reserved > 0 ? reserved : next_id_++;
  const auto behind = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& other) {
    return other->params.priority > request->params.priority;
  });
  waiting_.insert(behind, std::move(request));
  return id;
}

// Where requests are preempted: pages that a running one has a right to and lacks, those of its
// next step.
std::int64_t RequestBook::owed_pages(const RequestRecord& request) const {
  return request.preempted ? 0 : pages_.missing(request.slot, request.tokens_to_hold_with(0));
}

// Where requests are preempted: pages that one which holds none takes out of the free ones to
// begin, or to begin again, at what is published of its text. The row behind what it reads, too.
std::int64_t RequestBook::pages_to_begin(const RequestRecord& request,
                                         std::int64_t reusable) const {
  const PageTable::Match match =
      pages_.match(request.params.cache_salt, request.tokens(), reusable);
  const std::int64_t tokens =
      request.in_prefill() || request.preempted
          ? request.tokens_to_read(std::int64_t{match.blocks} * pages_.page_size())
          : request.tokens_to_hold_with(0);
  const std::int64_t blocks = std::min(request.most_blocks, pages_.pages_for(tokens + 1));
  return blocks - match.blocks + match.unused;
}

// Pages that running requests may still ask for.
std::int64_t RequestBook::outstanding_pages() const {
  std::int64_t pages = 0;
  if (pages_.span().window > 0 && pages_.reuse() && !preempts()) {
    // Who leaves a shared page behind the window takes one of its own later, so nobody's promise
    // counts on another's pages: all are kept if the sum of them fits.
    for (const auto& request : running_) pages += request->promised_pages;
    std::int64_t used = pages_.num_pages() - pages_.free_pages();
    for (const auto& request : retiring_) used -= pages_.held(request->slot);
    return std::max<std::int64_t>(0, pages - std::max<std::int64_t>(0, used));
  }
  for (const auto& request : running_) {
    const std::int64_t more =
        preempts() ? owed_pages(*request) : request->promised_pages - pages_.held(request->slot);
    pages += std::max<std::int64_t>(0, more);
  }
  return pages;
}

// Pages that an admission takes out of the free ones: those that it has a right to, less published
// pages that somebody holds already. (Unused published pages are free pages until they are
// attached.)
std::int64_t RequestBook::pages_needed(const RequestRecord& request) const {
  if (preempts()) return headroom() + pages_to_begin(request, request.reusable());
  const std::int64_t wanted = request.promised_pages;
  if (!pages_.reuse() || pages_.span().window > 0) return wanted;
  const PageTable::Match match =
      pages_.match(request.params.cache_salt, request.tokens(), request.reusable());
  return wanted - (match.pages - match.unused);
}

RequestRecord* RequestBook::admit_next() {
  if (waiting_.empty() || free_slots_.empty()) return nullptr;
  RequestRecord& request = *waiting_.front();
  // Who was preempted goes first, unless it is less urgent.
  const bool overtakes = std::any_of(running_.begin(), running_.end(), [&](const auto& other) {
    return other->preempted && other->params.priority <= request.params.priority;
  });
  if (overtakes) return nullptr;
  std::int64_t needed = outstanding_pages() + pages_needed(request);
  if (fault(Fault::kAdmitWithoutBound)) needed = pages_.pages_for(request.prompt_len);
  // First come, first served: a big request at the head is not overtaken for ever.
  if (needed > pages_.free_pages()) return nullptr;
  request.slot = free_slots_.back();
  free_slots_.pop_back();
  // Held from here on, or what was counted on could be evicted.
  pages_.open(request.slot, request.params.cache_salt);
  attach_prefix(request);
  reuse_queries_ += pages_.reuse();
  running_.push_back(std::move(waiting_.front()));
  waiting_.pop_front();
  if (preempts()) secure(*running_.back());
  return running_.back().get();
}

void RequestBook::attach_prefix(RequestRecord& request) {
  if (!pages_.reuse()) return;
  // With pages of its own it has begun.
  if (static_cast<std::int64_t>(pages_.pages(request.slot).size()) * pages_.page_size() >
      pages_.shared_tokens(request.slot)) {
    return;
  }
  const bool hit = request.num_cached > 0;
  const int blocks = pages_.attach(request.slot, request.tokens(), request.reusable());
  if (blocks == 0) return;
  request.num_cached += blocks * pages_.page_size();
  request.prefilled = request.num_cached;
  reuse_hits_ += !hit;
  cached_tokens_ += static_cast<std::int64_t>(blocks) * pages_.page_size();
}

bool RequestBook::better_wait(std::size_t index) const {
  const RequestRecord& request = *running_[index];
  if (!pages_.reuse() || !request.untouched()) return false;
  const int wanted = request.num_cached + pages_.page_size();
  if (wanted > request.reusable()) return false;
  return std::any_of(
      running_.begin(), running_.begin() + static_cast<std::ptrdiff_t>(index),
      [&](const auto& owner) {
        const RequestRecord& other = *owner;
        return !other.in_prefill() && other.known_len == other.prompt_len &&
               other.prompt_len >= wanted && other.params.cache_salt == request.params.cache_salt &&
               std::equal(request.tokens(), request.tokens() + wanted, other.tokens());
      });
}

void RequestBook::publish(RequestRecord& request, std::int64_t count, bool in_flight) {
  if (!pages_.reuse()) return;
  pages_.publish(request.slot, request.tokens(), count, /*swap=*/!in_flight);
}

bool RequestBook::drop_waiting(RequestId id) {
  return std::erase_if(waiting_, [&](const auto& request) { return request->id == id; }) > 0;
}

RequestRecord* RequestBook::find_running(RequestId id) const {
  const auto it = std::find_if(running_.begin(), running_.end(),
                               [&](const auto& request) { return request->id == id; });
  return it == running_.end() ? nullptr : it->get();
}

RequestRecord* RequestBook::find(RequestId id) const {
  if (RequestRecord* request = find_running(id)) return request;
  for (const auto& request : waiting_) {
    if (request->id == id) return request.get();
  }
  for (const auto& request : retiring_) {
    if (request->id == id) return request.get();
  }
  return nullptr;
}

void RequestBook::end(RequestRecord& request, std::int64_t delivered) {
  request.ended = true;
  const auto it = std::find_if(running_.begin(), running_.end(),
                               [&](const auto& owner) { return owner.get() == &request; });
  if (fault(Fault::kPagesBackEarly)) pages_.release(request.slot);
  retiring_.push_back(std::move(*it));
  running_.erase(it);
  release_retired(delivered);
}

void RequestBook::release_retired(std::int64_t delivered) {
  std::erase_if(retiring_, [&](std::unique_ptr<RequestRecord>& request) {
    if (request->last_step > delivered) return false;
    pages_.release(request->slot);
    if (!fault(Fault::kHostPagesKept)) host_pages_.drop(request->slot);
    free_slots_.push_back(request->slot);
    return true;
  });
}

void RequestBook::add_stats(ExecutorStats* stats) const {
  ExecutorStats& s = *stats;
  s.running = static_cast<int>(running_.size());
  s.waiting = static_cast<int>(waiting_.size());
  s.retiring = static_cast<int>(retiring_.size());
  s.free_pages = pages_.free_pages();
  s.total_pages = pages_.num_pages();
  s.preemptions = preemptions_;
  s.recomputed_tokens = recomputed_tokens_;
  s.swapped_out = swapped_out_;
  s.swapped_in = swapped_in_;
  s.swapped_out_bytes = pages_out_ * config_.host_link.page_bytes;
  s.swapped_in_bytes = pages_in_ * config_.host_link.page_bytes;
  s.host_pool_full = host_full_;
  s.host_free_pages = host_pages_.free_pages();
  s.host_total_pages = host_pages_.num_pages();
  s.preempted = static_cast<int>(std::count_if(
      running_.begin(), running_.end(), [](const auto& request) { return request->preempted; }));
  s.promised_pages = s.total_pages - s.free_pages + outstanding_pages();
  s.reuse_queries = reuse_queries_;
  s.reuse_hits = reuse_hits_;
  s.cached_tokens = cached_tokens_;
  s.cached_pages = pages_.cached_pages();
  s.reuse = pages_.reuse_stats();
  s.index_bytes = static_cast<std::int64_t>(pages_.index_bytes());
  const auto add_request = [&](const RequestRecord& r) {
    s.history_bytes += static_cast<std::int64_t>(r.text.capacity() * sizeof(TokenId));
    if (r.host_slot) s.history_bytes += std::int64_t{r.max_len} * sizeof(TokenId);
    for (const auto* proposal : {r.external.get(), r.proposal.get(), r.step_proposal.get()}) {
      if (proposal == nullptr) continue;
      s.draft_prob_bytes += static_cast<std::int64_t>(proposal->probs.memory_bytes());
    }
  };
  for (const auto& request : running_) add_request(*request);
  for (const auto& request : retiring_) add_request(*request);
  for (const auto& request : waiting_) add_request(*request);
}

}  // namespace specdec
