#include "base/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>

#include "base/check.h"
#include "base/cpu_relax.h"

namespace specdec {
namespace {

// Spins before sleeping: about 50 us of pause instructions. Long enough to bridge the host work
// between two steps of a small model, short enough to be invisible when the process is idle.
constexpr int kSpinsBeforeSleep = 2000;

// Waits until `value` is no longer `old`, which a notify_all() of its writer must follow. On a busy
// machine the other thread may have lost its core: asleep, this one leaves its own core to it,
// which spinning or yielding does not.
template <typename T>
void wait_while(const std::atomic<T>& value, T old) {
  for (int spins = 0; value.load(std::memory_order_acquire) == old; ++spins) {
    if (spins < kSpinsBeforeSleep) {
      cpu_relax();
    } else {
      value.wait(old, std::memory_order_acquire);
    }
  }
}

int default_size() {
  if (const char* text = std::getenv("SPECDEC_NUM_THREADS")) {
    const int n = std::atoi(text);
    if (n >= 1) return std::min(n, 256);
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

ThreadPool& ThreadPool::global() {
  // Never destroyed: worker threads must not be joined from a static destructor, where the
  // interpreter may already be gone.
  static ThreadPool* pool = new ThreadPool(default_size());
  return *pool;
}

ThreadPool::ThreadPool(int size) { start(size); }

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::resize(int size) {
  SPECDEC_REQUIRE(size >= 1 && size <= 256, "num_threads = ", size, ": give 1..256");
  std::lock_guard<std::mutex> region(region_mutex_);
  if (size == size_) return;
  stop();
  start(size);
}

void ThreadPool::start(int size) {
  size_ = size;
  owner_pid_ = static_cast<int>(getpid());
  stopping_ = false;
  // The epoch is read here, not in the thread: a region may begin before the thread first runs.
  const std::uint32_t epoch = epoch_.load(std::memory_order_relaxed);
  for (int rank = 1; rank < size; ++rank) {
    threads_.emplace_back([this, rank, epoch] { worker(rank, epoch); });
  }
}

void ThreadPool::stop() {
  if (owner_pid_ != static_cast<int>(getpid())) {
    // Forked child: the threads do not exist here, there is nothing to join.
    for (auto& thread : threads_) thread.detach();
    threads_.clear();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    stopping_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

void ThreadPool::run_raw(RawBody body, void* context) {
  if (size_ == 1) {
    body(context, 0);
    return;
  }
  SPECDEC_REQUIRE(owner_pid_ == static_cast<int>(getpid()),
                  "specdec_ext was used after fork(): its threads do not exist in the child. Start "
                  "worker processes with the 'spawn' method, or load the model in the child");
  std::lock_guard<std::mutex> region(region_mutex_);
  body_ = body;
  context_ = context;
  error_ = nullptr;
  running_.store(size_ - 1, std::memory_order_relaxed);
  // seq_cst on both sides: a worker announces that it sleeps and then re-reads the epoch, we bump
  // the epoch and then read the announcement, so at least one of us sees the other.
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
    }
    wake_.notify_all();
  }
  try {
    body(context, 0);
  } catch (...) {
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
  for (int left = running_.load(std::memory_order_acquire); left != 0;
       left = running_.load(std::memory_order_acquire)) {
    wait_while(running_, left);
  }
  if (error_) std::rethrow_exception(error_);
}

void ThreadPool::worker(int rank, std::uint32_t seen) {
  for (;;) {
    for (int spins = 0; epoch_.load(std::memory_order_acquire) == seen; ++spins) {
      if (spins < kSpinsBeforeSleep) {
        cpu_relax();
        continue;
      }
      std::unique_lock<std::mutex> lock(sleep_mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
    seen = epoch_.load(std::memory_order_acquire);
    if (stopping_) return;
    try {
      body_(context_, rank);
    } catch (...) {
      std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
    running_.fetch_sub(1, std::memory_order_release);
    running_.notify_one();  // run_raw() alone waits for it
  }
}

void ThreadPool::barrier() {
  if (size_ == 1) return;
  const std::uint32_t epoch = barrier_epoch_.load(std::memory_order_relaxed);
  if (barrier_count_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    barrier_count_.store(0, std::memory_order_relaxed);
    barrier_epoch_.fetch_add(1, std::memory_order_release);
    barrier_epoch_.notify_all();
    return;
  }
  wait_while(barrier_epoch_, epoch);
}

}  // namespace specdec
