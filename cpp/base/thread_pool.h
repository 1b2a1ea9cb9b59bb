// A small team of threads for the CPU backend.
//
// run(n, body) calls body(piece, rank) for each piece 0..n-1 and returns when all are done. Ranks
// are threads, the caller being rank 0. Each rank owns a run of neighbouring pieces: it takes them
// from the front and, when it has none left, takes those of others from the back. So on an idle
// machine a thread reads the same part of a matrix in every pass, and on a busy one whoever has a
// core does the work.
//
// The caller waits for nothing but pieces that a worker has taken and not finished. A worker that
// has no core takes no piece: the caller then does all of them itself.
//
// Late workers do no harm. A run is one word, {first piece left, end}, and taking a piece is one
// compare-and-swap of it. A phase cannot end while a piece is taken and not finished, so the phase
// that a piece belongs to is the phase in which the swap succeeded, and only then does the thread
// look at what there is to do. A worker that read the word in an earlier phase either fails, or
// finds the same word again and has taken a piece of the phase that runs.
//
// A thread that waits, for pieces or for the others to finish theirs, spins for some tens of
// microseconds and then sleeps: it leaves its core to others, perhaps to the thread that it waits
// for. Before it spins it fetches what it is said to read next (expect_reads).
//
// One run at a time: a caller that finds the threads busy, from a second host thread or inside a
// body, does its pieces alone. Results must not depend on which rank did a piece.
// Who has memory for each rank holds the pool's size meanwhile (Hold): a resize waits.
// The pool is not usable after fork() in the child: run() then throws.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/expected_reads.h"

namespace specdec {

struct Range {
  std::int64_t begin, end;
};

// Part `part` of `parts` contiguous, nearly equal parts of [0, n).
constexpr Range share(std::int64_t n, std::int64_t part, std::int64_t parts) {
  return {n * part / parts, n * (part + 1) / parts};
}

class ThreadPool {
 public:
  explicit ThreadPool(int size);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The process-wide pool. Its size is SPECDEC_NUM_THREADS if set, else the number of CPUs this
  // process may run on, until resize() is called.
  static ThreadPool& global();

  int size() const { return size_; }
  // Waits until nobody runs or holds the size.
  void resize(int size);

  // size() stays what it is while one of these lives. They may be nested. Nothing that may call
  // resize() runs within.
  class Hold {
   public:
    explicit Hold(ThreadPool& pool) : pool_(pool) { pool.hold(); }
    ~Hold() { pool_.holds_.fetch_sub(1, std::memory_order_release); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    ThreadPool& pool_;
  };

  // How many pieces to cut `items` items into that take about `item_ns` nanoseconds each: 1 if a
  // second thread would not be worth its call, else enough of them that threads end together.
  int pieces(std::int64_t items, std::int64_t item_ns) const;

  // What this rank is going to read in a later run, see ExpectedReads; rank < size(), which the
  // caller holds.
  void expect_reads(int rank, const std::byte* first, const std::byte* second, std::size_t bytes) {
    expected_[rank].set(first, second, bytes);
  }
  // Bytes of each place that the rank has fetched so far.
  std::size_t fetched(int rank) const { return expected_[rank].fetched(); }

  // An exception of a body is rethrown, one of them if there are several, when all pieces are done.
  template <typename F>
  void run(int pieces, F&& body) {
    using Body = std::remove_reference_t<F>;
    run_raw(
        pieces,
        [](void* context, int piece, int rank) { (*static_cast<Body*>(context))(piece, rank); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

  // body(range, rank) over [0, items) in pieces(items, item_ns) ranges.
  template <typename F>
  void run_items(std::int64_t items, std::int64_t item_ns, F&& body) {
    const int count = pieces(items, item_ns);
    run(count, [&](int piece, int rank) { body(share(items, piece, count), rank); });
  }

  // Tests stop a thread here: behind its look at a run that has pieces, in front of its claim.
  using ClaimHook = void (*)(int rank);
  static std::atomic<ClaimHook> claim_hook;
  // And here: a worker in front of its announcement that it sleeps, the caller behind its look at
  // an announcement, in front of taking it back.
  using SleepHook = void (*)(int rank);
  static std::atomic<SleepHook> sleep_hook;

 private:
  using RawBody = void (*)(void* context, int piece, int rank);
  // The pieces [first, end) that are left of a rank's own: end << 32 | first.
  struct alignas(64) Run {
    std::atomic<std::uint64_t> left{0};
  };

  template <typename T, typename BeforeSleep>
  void wait_while(const std::atomic<T>& value, T old, int rank, BeforeSleep&& before_sleep);
  void run_raw(int pieces, RawBody body, void* context);
  int work(int rank);
  void do_piece(int piece, int rank);
  void worker(int rank);
  void start(int size);
  void stop();
  void hold();
  void take_for_resize();

  int size_ = 1;
  int forks_ = 0;  // of the process, as the threads were started
  std::vector<std::thread> threads_;
  std::unique_ptr<Run[]> runs_;                // [size]
  std::unique_ptr<ExpectedReads[]> expected_;  // [size]
  std::atomic<bool> busy_{false};
  std::atomic<int> holds_{0};
  std::atomic<bool> resizing_{false};
  std::atomic<bool> stopping_{false};
  std::exception_ptr error_;
  std::mutex error_mutex_;

  // Written per phase and read by all; a new epoch says that there are new pieces.
  alignas(64) std::atomic<std::uint32_t> epoch_{0};
  std::atomic<bool> asleep_{false};  // a worker may sleep until the next epoch
  RawBody body_ = nullptr;
  void* context_ = nullptr;
  // Pieces of this phase that workers have finished.
  alignas(64) std::atomic<int> finished_{0};
};

}  // namespace specdec
