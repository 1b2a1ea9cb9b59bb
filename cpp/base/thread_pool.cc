#include "base/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/cpu_relax.h"
#include "base/float_mode.h"

namespace specdec {
namespace {

// Spins before sleeping, of pause instructions: about 50 us. Long enough for a worker to bridge the
// host work between two steps of a small model, short enough to be invisible in an idle process.
constexpr int kSpinsBeforeSleep = 2000;

// More pieces than this per thread would not make threads end closer together.
constexpr std::int64_t kMostPiecesPerThread = 16;
// A piece takes at least this long: a claim and the start of a stream are small beside it.
constexpr std::int64_t kLeastPieceNs = 2000;

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

// How many forks this process is away from the first that started a pool.
int process_forks = 0;

void count_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { process_forks += 1; });  // in the child
  static_cast<void>(registered);
}

constexpr std::uint64_t run_of(std::uint64_t first, std::uint64_t end) { return end << 32 | first; }
constexpr int first_of(std::uint64_t run) { return static_cast<int>(run & 0xffffffff); }
constexpr int end_of(std::uint64_t run) { return static_cast<int>(run >> 32); }

// Takes a piece of a run, its owner from the front; -1 if there is none.
int take(std::atomic<std::uint64_t>& left, bool own, int rank) {
  std::uint64_t run = left.load(std::memory_order_acquire);
  while (first_of(run) < end_of(run)) {
    if (const auto hook = ThreadPool::claim_hook.load(std::memory_order_acquire)) hook(rank);
    const std::uint64_t rest =
        own ? run_of(first_of(run) + 1, end_of(run)) : run_of(first_of(run), end_of(run) - 1);
    if (left.compare_exchange_weak(run, rest, std::memory_order_acquire)) {
      return own ? first_of(run) : end_of(run) - 1;
    }
  }
  return -1;
}

}  // namespace

std::atomic<ThreadPool::ClaimHook> ThreadPool::claim_hook{nullptr};
std::atomic<ThreadPool::SleepHook> ThreadPool::sleep_hook{nullptr};

// Waits until `value` is no longer `old`, which a notify of its writer must follow.
template <typename T, typename BeforeSleep>
void ThreadPool::wait_while(const std::atomic<T>& value, T old, int rank,
                            BeforeSleep&& before_sleep) {
  for (int spins = 0; value.load(std::memory_order_acquire) == old;) {
    if (expected_[rank].fetch_some()) continue;
    if (++spins <= kSpinsBeforeSleep) {
      cpu_relax();
      continue;
    }
    before_sleep();
    value.wait(old, std::memory_order_seq_cst);
  }
}

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
  // In a forked child nobody is busy, whatever the parent was doing, and no thread is there.
  const bool forked = forks_ != process_forks;
  if (forked) {
    busy_.store(false, std::memory_order_relaxed);
    holds_.store(0, std::memory_order_relaxed);
    resizing_.store(false, std::memory_order_relaxed);
  }
  take_for_resize();
  if (size != size_ || forked) {
    stop();
    try {
      start(size);
    } catch (const std::system_error& error) {
      stop();
      start(1);
      resizing_.store(false, std::memory_order_release);
      busy_.store(false, std::memory_order_release);
      throw std::runtime_error(detail::join("num_threads = ", size, ": ", error.what(),
                                            "; work goes on with one thread, give fewer"));
    }
  }
  resizing_.store(false, std::memory_order_release);
  busy_.store(false, std::memory_order_release);
}

// Holds are seldom and short beside a resize. Each side announces itself and then looks for the
// other (seq_cst: at least one sees it), and gives way: so who holds may hold once more meanwhile.
void ThreadPool::take_for_resize() {
  for (;; std::this_thread::yield()) {
    // Who finds the pool busy works alone.
    if (holds_.load(std::memory_order_relaxed) != 0) continue;
    if (busy_.exchange(true, std::memory_order_acquire)) continue;
    resizing_.store(true, std::memory_order_seq_cst);
    if (holds_.load(std::memory_order_seq_cst) == 0) return;
    resizing_.store(false, std::memory_order_release);
    busy_.store(false, std::memory_order_release);
  }
}

void ThreadPool::hold() {
  for (;; std::this_thread::yield()) {
    holds_.fetch_add(1, std::memory_order_seq_cst);
    if (!resizing_.load(std::memory_order_seq_cst)) return;
    holds_.fetch_sub(1, std::memory_order_release);
  }
}

void ThreadPool::start(int size) {
  count_forks();
  forks_ = process_forks;
  size_ = size;
  stopping_.store(false, std::memory_order_relaxed);
  runs_ = std::make_unique<Run[]>(static_cast<std::size_t>(size));
  expected_ = std::make_unique<ExpectedReads[]>(static_cast<std::size_t>(size));
  for (int rank = 1; rank < size; ++rank) {
    threads_.emplace_back([this, rank] { worker(rank); });
  }
}

void ThreadPool::stop() {
  if (forks_ != process_forks) {
    // Forked child: the threads do not exist here, there is nothing to join.
    for (auto& thread : threads_) thread.detach();
    threads_.clear();
    return;
  }
  stopping_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  epoch_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

int ThreadPool::pieces(std::int64_t items, std::int64_t item_ns) const {
  const std::int64_t worth = items * item_ns / kLeastPieceNs;
  const std::int64_t count = std::min({items, worth, kMostPiecesPerThread * size_});
  if (size_ == 1 || count < 2) return 1;
  // The same number for every thread, so that they end together.
  return static_cast<int>(count < size_ ? count : count / size_ * size_);
}

void ThreadPool::run_raw(int pieces, RawBody body, void* context) {
  SPECDEC_REQUIRE(size_ == 1 || forks_ == process_forks,
                  "specdec_ext was used after fork(): its threads do not exist in the child. Start "
                  "worker processes with the 'spawn' method, or load the model in the child");
  const DefaultFloatMode mode;
  if (pieces <= 1 || size_ == 1 || busy_.exchange(true, std::memory_order_acquire)) {
    for (int piece = 0; piece < pieces; ++piece) body(context, piece, 0);
    return;
  }
  body_ = body;
  context_ = context;
  finished_.store(0, std::memory_order_relaxed);
  // From here on pieces may be taken.
  for (int rank = 0; rank < size_; ++rank) {
    const Range own = share(pieces, rank, size_);
    runs_[rank].left.store(run_of(own.begin, own.end), std::memory_order_release);
  }
  // We take announcements of sleep back ourselves: a worker that is awake but has no core yet must
  // not cost a system call in each phase. That comes before the new epoch, in which nobody can
  // sleep yet. Behind it we might lose our core, and take back what a worker has announced that did
  // this phase's pieces meanwhile and sleeps until the next: no notify of this phase wakes that
  // one.
  const bool wakes = asleep_.load(std::memory_order_seq_cst);
  if (wakes) {
    if (const auto hook = sleep_hook.load(std::memory_order_acquire)) hook(0);
    asleep_.store(false, std::memory_order_seq_cst);
  }
  // seq_cst on both sides: a worker announces that it sleeps and then looks at the epoch again, we
  // count the epoch up and then read the announcement, so at least one of us sees the other.
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (wakes || asleep_.load(std::memory_order_seq_cst)) epoch_.notify_all();
  const int mine = work(0);
  for (;;) {
    const int finished = finished_.load(std::memory_order_acquire);
    if (mine + finished == pieces) break;
    wait_while(finished_, finished, 0, [] {});
  }
  const std::exception_ptr error = std::exchange(error_, nullptr);
  busy_.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

// Does pieces, one's own first, until none is left to take; returns how many.
int ThreadPool::work(int rank) {
  int done = 0;
  for (int turn = 0; turn < size_; ++turn) {
    auto& left = runs_[(rank + turn) % size_].left;
    for (int piece; (piece = take(left, turn == 0, rank)) >= 0; ++done) do_piece(piece, rank);
  }
  return done;
}

void ThreadPool::do_piece(int piece, int rank) {
  try {
    body_(context_, piece, rank);
  } catch (...) {
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void ThreadPool::worker(int rank) {
  const DefaultFloatMode mode;  // it has its creator's
  for (;;) {
    const std::uint32_t epoch = epoch_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (const int done = work(rank); done > 0) {
      finished_.fetch_add(done, std::memory_order_release);
      finished_.notify_one();  // the caller alone waits for it
    }
    wait_while(epoch_, epoch, rank, [&] {
      if (const auto hook = sleep_hook.load(std::memory_order_acquire)) hook(rank);
      asleep_.store(true, std::memory_order_seq_cst);
    });
  }
}

}  // namespace specdec
