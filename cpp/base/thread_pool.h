// A small team of threads for the CPU backend.
//
// run(f) calls f(rank) on every rank, the caller being rank 0, and returns when all have finished.
// barrier() may be called inside run() by every rank. Whoever waits, for a region, at a barrier or
// for the others to finish, spins for a few tens of microseconds and then sleeps: a pool that is
// idle costs nothing, and one whose other thread lost its core to another process leaves it this
// one. A decoding step reaches the workers while they still spin.
//
// A body must not throw between two barriers: the other ranks would wait for it for ever.
// One region at a time: run() calls from different host threads are serialised by a mutex.
// The pool is not usable after fork() in the child: run() then throws.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace specdec {

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
  void resize(int size);

  template <typename F>
  void run(F&& body) {
    using Body = std::remove_reference_t<F>;
    run_raw([](void* context, int rank) { (*static_cast<Body*>(context))(rank); },
            const_cast<void*>(static_cast<const void*>(&body)));
  }

  // Splits [0, n) into contiguous, near-equal parts, one per rank.
  struct Range {
    std::int64_t begin, end;
  };
  Range part(std::int64_t n, int rank) const {
    return Range{n * rank / size_, n * (rank + 1) / size_};
  }

  void barrier();

 private:
  using RawBody = void (*)(void* context, int rank);
  void run_raw(RawBody body, void* context);
  void worker(int rank, std::uint32_t seen_epoch);
  void start(int size);
  void stop();

  int size_ = 1;
  int owner_pid_ = 0;
  std::vector<std::thread> threads_;
  std::mutex region_mutex_;

  RawBody body_ = nullptr;
  void* context_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<std::uint32_t> epoch_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> barrier_count_{0};
  alignas(64) std::atomic<std::uint32_t> barrier_epoch_{0};
  std::atomic<int> sleepers_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::exception_ptr error_;
  std::mutex error_mutex_;
};

}  // namespace specdec
