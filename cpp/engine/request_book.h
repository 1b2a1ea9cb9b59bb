// Who waits, who runs, who has ended while steps in flight still name it; and which pages each of
// them holds or was promised. No step, no slot, no device: only books.
//
// guaranteed_no_evict: a request is admitted when its worst case fits into the pages that are not
// promised to others, so a running request never waits for a page.
//
// max_utilization: a request is admitted when its prompt fits. Before each step make_room() gives
// pages to those that run, in order of priority and age; where they run out the last in that order
// is preempted: it gives its pages back and keeps its slot with everything that was decided. Its
// K/V is copied to the host's pool and back when there is room again (swap.cc), or, where that
// takes longer or the pool is full, computed again. The first in the order is never preempted and
// the pool holds any one request, so it ends, and then the next.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "engine/config.h"
#include "engine/executor_stats.h"
#include "engine/request_record.h"
#include "engine/step_cost.h"
#include "kv/host_pages.h"
#include "kv/page_table.h"

namespace specdec {

class RequestBook {
 public:
  explicit RequestBook(const ExecutorConfig& config);

  // Tokens that a page row of a step has room for, in pages: the longest sequence plus one step
  // whose rows are all drafts.
  static int pages_per_slot(const ExecutorConfig& config);

  // Sets what the request is promised; refuses one that the whole pool cannot hold.
  void promise(RequestRecord* request) const;
  // The id of a request that add() will bring: its caller knows it before it can be planned.
  RequestId reserve() { return next_id_++; }
  // params.id: as reserved, in this order, or 0. Throws std::invalid_argument.
  RequestId add(std::unique_ptr<RequestRecord> request);
  // The next waiting request, if a slot and what the policy asks for are free: it runs from here on
  // and has taken over what is published of its prompt. Null: none.
  RequestRecord* admit_next();

  bool preempts() const { return config_.policy == SchedulerPolicy::kMaxUtilization; }
  // Text of a request that has left its prompt behind may be read again.
  bool keeps_text() const { return preempts() || pages_.reuse(); }
  // max_utilization: pages for a step of everybody who runs, as far as there are, a row each;
  // preempts, and lets preempted requests run again. Returns those of them whose K/V is computed
  // again. `cost`: what weighs that against copies.
  const std::vector<RequestRecord*>& make_room(const StepCost& cost);
  // max_utilization: what is left goes to drafts.
  void make_room_for_drafts();
  // What is to be done with pages since the last call, in this order: before anything is written to
  // pages that were handed out since.
  std::vector<PageOrder> take_orders() { return std::exchange(orders_, {}); }
  // Layers with narrow windows hold their parts of pages only while they see them. `numbered`:
  // parts have numbers of their own; else who takes the orders is told what memory goes back.
  void narrow(bool numbered);
  // Copies of this request's pages failed: its K/V is lost, and computed again.
  void lose_copies(RequestRecord& request);

  // Takes over what is published of the prompt; may be called again until the first row is planned.
  void attach_prefix(RequestRecord& request);
  // True when the last row of a prompt in front of running()[index] is in flight, which has the
  // next block of its prompt too: once it is read the block is there to be attached. So the outputs
  // of one prompt compute it once.
  bool better_wait(std::size_t index) const;
  // Publishes the full pages among the first `count` tokens, whose K/V is final. Pages that a step
  // in flight names stay, even where an equal one is published.
  void publish(RequestRecord& request, std::int64_t count, bool in_flight);

  // Drops a waiting request; false: it does not wait.
  bool drop_waiting(RequestId id);
  RequestRecord* find_running(RequestId id) const;
  // Running, waiting or ended with steps in flight; null: unknown.
  RequestRecord* find(RequestId id) const;
  // Gives back pages that no row of the request sees any more; what is final was published.
  void trim(const RequestRecord& request);
  // The request takes part in no further step. Its slot and its pages stay until step `last_step`
  // of it is delivered.
  void end(RequestRecord& request, std::int64_t delivered);
  void release_retired(std::int64_t delivered);

  std::int64_t outstanding_pages() const;
  // Fills what the books know.
  void add_stats(ExecutorStats* stats) const;
  void check_integrity() const {
    if (!config_.check_integrity) return;
    pages_.check_integrity();
    host_pages_.check_integrity();
  }

  PageTable& pages() { return pages_; }
  const PageTable& pages() const { return pages_; }
  const std::vector<std::unique_ptr<RequestRecord>>& running() const { return running_; }
  int num_unfinished() const { return static_cast<int>(running_.size() + waiting_.size()); }

 private:
  std::int64_t pages_to_begin(const RequestRecord& request, std::int64_t reusable) const;
  std::int64_t pages_needed(const RequestRecord& request) const;
  std::int64_t owed_pages(const RequestRecord& request) const;
  std::int64_t headroom() const;
  bool secure(const RequestRecord& request);
  bool make_way(std::size_t index);
  void preempt(RequestRecord& request);
  static void read_again(RequestRecord& request);
  bool resume(RequestRecord& request);
  // swap.cc
  std::vector<std::int32_t> parts(int slot, std::size_t block) const;
  bool swap_out(RequestRecord& request, std::int64_t final_len);
  bool swap_in(RequestRecord& request);

  PageTable pages_;
  HostPages host_pages_;
  ExecutorConfig config_;
  RequestId next_id_ = 1, last_id_ = 0;  // last_id_: of the newest request
  std::deque<std::unique_ptr<RequestRecord>> waiting_;
  std::vector<std::unique_ptr<RequestRecord>> running_;   // in order of admission
  std::vector<std::unique_ptr<RequestRecord>> retiring_;  // ended, named by a step in flight
  std::vector<int> free_slots_;
  std::int64_t reuse_queries_ = 0, reuse_hits_ = 0, cached_tokens_ = 0;
  // max_utilization: running_ by priority and age; pages that prompts of this step will take
  std::vector<RequestRecord*> order_, resumed_;
  std::int64_t claimed_ = 0;
  std::int64_t preemptions_ = 0, recomputed_tokens_ = 0;
  const StepCost* cost_ = nullptr;  // of make_room()
  std::vector<PageOrder> orders_;
  bool numbered_parts_ = false;  // narrow()
  std::int64_t swapped_out_ = 0, swapped_in_ = 0, pages_out_ = 0, pages_in_ = 0, host_full_ = 0;
};

}  // namespace specdec
