// ThreadPool: every piece once, whoever comes; nobody is waited for who holds no piece; a thread
// that claims late does no harm. Nothing here looks at a clock: a pool that waits for the wrong
// thread hangs.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/expected_reads.h"
#include "base/float_mode.h"
#include "base/thread_pool.h"
#include "check.h"

namespace specdec {
namespace {

void wait_until(const auto& condition) {
  while (!condition()) std::this_thread::yield();
}

// Stops the workers in front of their next claim until release(); the caller goes on.
class Parked {
 public:
  Parked() {
    count = 0;
    hold = true;
    ThreadPool::claim_hook = &park;
  }
  ~Parked() {
    release();
    ThreadPool::claim_hook = nullptr;
  }
  static void release() { hold = false; }
  static inline std::atomic<int> count{0};

 private:
  static void park(int rank) {
    if (rank == 0 || !hold) return;
    ++count;
    wait_until([] { return !hold.load(); });
  }
  static inline std::atomic<bool> hold{false};
};

// What ranks did what in a phase.
struct Phase {
  explicit Phase(int pieces) : times(static_cast<std::size_t>(pieces)) {}
  std::vector<std::atomic<int>> times;
  std::atomic<int> by_workers{0};

  void note(int piece, int rank) {
    ++times[static_cast<std::size_t>(piece)];
    if (rank > 0) ++by_workers;
  }
  bool complete() const {
    return std::all_of(times.begin(), times.end(), [](const auto& n) { return n == 1; });
  }
};

TEST(thread_pool_does_each_piece_once) {
  for (const int size : {1, 2, 3, 5}) {
    ThreadPool pool(size);
    for (int pieces = 0; pieces <= 40; ++pieces) {
      Phase phase(pieces);
      std::atomic<bool> ranks_fit{true};
      pool.run(pieces, [&](int piece, int rank) {
        phase.note(piece, rank);
        if (rank < 0 || rank >= size) ranks_fit = false;
      });
      CHECK(phase.complete());
      CHECK(ranks_fit);
    }
  }
}

TEST(thread_pool_cuts_items_by_their_time) {
  ThreadPool one(1), four(4);
  CHECK_EQ(one.pieces(1000, 1000000), 1);
  CHECK_EQ(four.pieces(0, 1000), 1);
  CHECK_EQ(four.pieces(1000, 1), 1);  // a microsecond in all
  CHECK_EQ(four.pieces(3, 1000000), 3);
  CHECK_EQ(four.pieces(7, 1000000), 4);
  CHECK_EQ(four.pieces(1000000, 1000), 64);
  std::vector<int> times(1000);
  four.run_items(1000, 1000, [&](Range range, int) {
    for (std::int64_t i = range.begin; i < range.end; ++i) ++times[static_cast<std::size_t>(i)];
  });
  CHECK(std::all_of(times.begin(), times.end(), [](int n) { return n == 1; }));
}

TEST(thread_pool_ends_without_workers_that_have_no_core) {
  constexpr int kWorkers = 2, kPieces = 12;
  ThreadPool pool(kWorkers + 1);
  const Parked parked;
  // The workers look at this phase's pieces and lose their cores.
  Phase first(kPieces);
  pool.run(kPieces, [&](int piece, int rank) {
    wait_until([] { return Parked::count == kWorkers; });
    first.note(piece, rank);
  });
  CHECK(first.complete());
  for (int i = 0; i < 1000; ++i) {
    Phase phase(kPieces);
    pool.run(kPieces, [&](int piece, int rank) { phase.note(piece, rank); });
    CHECK(phase.complete());
    CHECK_EQ(phase.by_workers.load(), 0);
  }
}

// A worker that looked at the pieces of one phase claims in a later one: with another number of
// pieces, and with the same, where its compare-and-swap meets the very word that it read.
TEST(thread_pool_late_claim_is_one_of_the_phase_that_runs) {
  for (const int later_pieces : {8, 6, 14}) {
    ThreadPool pool(2);
    const Parked parked;
    Phase early(8);
    pool.run(8, [&](int piece, int rank) {
      wait_until([] { return Parked::count == 1; });
      early.note(piece, rank);
    });
    CHECK(early.complete());
    CHECK_EQ(early.by_workers.load(), 0);
    Phase between(9);
    pool.run(9, [&](int piece, int rank) { between.note(piece, rank); });
    Phase later(later_pieces);
    pool.run(later_pieces, [&](int piece, int rank) {
      later.note(piece, rank);
      if (rank > 0) return;
      Parked::release();
      wait_until([&] { return later.by_workers > 0; });
    });
    CHECK(later.complete());
    CHECK(early.complete());
    CHECK(between.complete());
  }
}

TEST(thread_pool_wakes_who_sleeps) {
  ThreadPool pool(2);
  for (int i = 0; i < 50; ++i) {
    // Long enough for the worker to fall asleep; if it has not, the test is only easier.
    std::this_thread::sleep_for(std::chrono::milliseconds(i % 3));
    Phase phase(4);
    pool.run(4, [&](int piece, int rank) {
      if (rank == 0) wait_until([&] { return phase.by_workers > 0; });
      phase.note(piece, rank);
    });
    CHECK(phase.complete());
  }
}

// What a thread of this process does: 'S' sleeps, 'R' runs.
char state_of(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string text;
  std::getline(file, text);
  return text[text.rfind(')') + 2];
}

// Stops the worker in front of its first two announcements, and the caller where it takes one back.
class Announcements {
 public:
  Announcements() {
    count = 0;
    allowed = 0;
    ThreadPool::sleep_hook = &stop;
  }
  ~Announcements() { ThreadPool::sleep_hook = nullptr; }
  static inline std::atomic<int> count{0}, allowed{0};
  static bool worker_sleeps() { return state_of(worker) == 'S'; }

 private:
  static void stop(int rank) {
    if (rank > 0) {
      worker = gettid();
      if (const int mine = ++count; mine <= 2) wait_until([&] { return allowed >= mine; });
      return;
    }
    if (count != 2) return;
    allowed = 2;
    wait_until(worker_sleeps);
  }
  static inline std::atomic<pid_t> worker{0};
};

// A caller that loses its core between its look at an old announcement and taking it back must not
// take back one that holds until the next phase: nobody would wake that worker again.
TEST(thread_pool_keeps_the_announcement_of_who_sleeps_until_the_next_phase) {
  ThreadPool pool(2);
  const Announcements announcements;
  wait_until([] { return Announcements::count == 1; });
  Phase missed(4), late(4), last(4);
  pool.run(4, [&](int piece, int rank) { missed.note(piece, rank); });
  CHECK_EQ(missed.by_workers.load(), 0);
  Announcements::allowed = 1;  // of the phase before: it is awake at once, and this stays behind
  wait_until([] { return Announcements::count == 2; });
  pool.run(4, [&](int piece, int rank) { late.note(piece, rank); });
  wait_until(Announcements::worker_sleeps);
  pool.run(4, [&](int piece, int rank) {
    if (rank == 0) wait_until([&] { return last.by_workers > 0; });
    last.note(piece, rank);
  });
  CHECK(missed.complete() && late.complete() && last.complete());
}

TEST(thread_pool_fetches_what_a_rank_is_said_to_read) {
  // Any addresses: to fetch one is no access.
  ThreadPool pool(3);
  const auto place = [](std::uintptr_t at) { return reinterpret_cast<const std::byte*>(at); };
  for (unsigned turn = 0; turn < 200; ++turn) {
    for (int rank = 0; rank < pool.size(); ++rank) {
      pool.expect_reads(rank, place(turn % 3 == 0 ? 0 : 4096 * turn),
                        place(turn % 2 == 0 ? 64 : ~std::uintptr_t{0} - 8192), turn * 100);
    }
    Phase phase(7);
    pool.run(7, [&](int piece, int rank) { phase.note(piece, rank); });
    CHECK(phase.complete());
  }
}

TEST(thread_pool_threads_that_wait_fetch) {
  // Each thread has something to do until the other one, which waits, has fetched everything.
  ThreadPool pool(2);
  const std::vector<std::byte> memory(1 << 16);
  for (const int busy : {0, 1}) {
    const int waiting = 1 - busy;
    for (std::size_t turn = 1; turn <= 20; ++turn) {
      const std::size_t bytes = turn * 256;
      pool.expect_reads(waiting, memory.data() + 64 * turn, memory.data(), bytes);
      std::atomic<int> begun{0};
      pool.run(2, [&](int, int rank) {
        ++begun;
        wait_until([&] { return begun == 2; });
        if (rank == busy) wait_until([&] { return pool.fetched(waiting) == bytes; });
      });
    }
  }
}

TEST(expected_reads_are_fetched_once) {
  std::vector<std::byte> first(4096), second(4096);
  ExpectedReads reads;
  CHECK(!reads.fetch_some());
  const auto fetch_all = [&] {
    int times = 0;
    while (reads.fetch_some()) ++times;
    return times;
  };
  reads.set(first.data(), first.data(), 1024);
  CHECK(fetch_all() == 4 && reads.fetched() == 1024);
  CHECK(!reads.fetch_some());
  reads.set(second.data(), first.data(), 1000);  // another place: from its beginning
  CHECK(fetch_all() == 4 && reads.fetched() == 1024);
  reads.set(second.data(), first.data(), 2048);  // more of the same
  CHECK(fetch_all() == 4 && reads.fetched() == 2048);
  reads.set(first.data(), first.data(), 0);
  CHECK(!reads.fetch_some() && reads.fetched() == 0);
}

TEST(thread_pool_second_caller_works_alone) {
  ThreadPool pool(2);
  Phase outer(2), inner(6), other(6);
  pool.run(2, [&](int piece, int rank) {
    outer.note(piece, rank);
    if (piece > 0) return;
    pool.run(6, [&](int i, int r) {
      inner.note(i, r);
      CHECK_EQ(r, 0);
    });
    std::thread([&] { pool.run(6, [&](int i, int r) { other.note(i, r); }); }).join();
    CHECK_EQ(other.by_workers.load(), 0);
  });
  CHECK(outer.complete());
  CHECK(inner.complete());
  CHECK(other.complete());
}

TEST(thread_pool_rethrows_and_goes_on) {
  ThreadPool pool(3);
  for (int bad = 0; bad < 9; ++bad) {
    Phase phase(9);
    CHECK_THROWS(pool.run(9,
                          [&](int piece, int rank) {
                            phase.note(piece, rank);
                            if (piece == bad) throw std::runtime_error("piece is bad");
                          }),
                 std::runtime_error, "piece is bad");
    CHECK(phase.complete());
  }
  pool.resize(2);
  CHECK_EQ(pool.size(), 2);
  Phase phase(5);
  pool.run(5, [&](int piece, int rank) { phase.note(piece, rank); });
  CHECK(phase.complete());
}

// Who has memory for each rank may run several phases in it, and hold once more within.
TEST(thread_pool_keeps_its_size_while_it_is_held) {
  ThreadPool pool(2);
  std::atomic<bool> ends{false};
  std::thread resizer([&] {
    for (int turn = 0; !ends; ++turn) pool.resize(1 + turn % 4);
  });
  for (int turn = 0; turn < 2000; ++turn) {
    const ThreadPool::Hold held(pool);
    const int size = pool.size();
    std::vector<int> pieces_of(static_cast<std::size_t>(size));  // the sanitizer sees its end
    for (int phase = 0; phase < 3; ++phase) {
      const ThreadPool::Hold again(pool);
      std::this_thread::yield();
      pool.run(8, [&](int, int rank) { ++pieces_of[static_cast<std::size_t>(rank)]; });
    }
    CHECK_EQ(pool.size(), size);
    CHECK_EQ(std::accumulate(pieces_of.begin(), pieces_of.end(), 0), 3 * 8);
  }
  ends = true;
  resizer.join();
  pool.resize(3);
  CHECK_EQ(pool.size(), 3);
}

// Threads lose their cores anywhere in front of a claim. Each phase reads what all pieces of the
// one before have written: under ThreadSanitizer this shows that a phase's end orders them.
TEST(thread_pool_phases_follow_each_other) {
  ThreadPool pool(4);
  ThreadPool::claim_hook = [](int rank) {
    thread_local std::minstd_rand random(static_cast<unsigned>(rank) + 1);
    for (auto turns = random() % 8 == 0 ? random() % 64 : 0; turns > 0; --turns) {
      std::this_thread::yield();
    }
  };
  std::minstd_rand random(7);
  std::vector<std::uint64_t> before(64, 1), after(64);
  std::uint64_t expected = 64;
  for (int i = 0; i < 3000; ++i) {
    const int pieces = 2 + static_cast<int>(random() % 63);
    pool.run(pieces, [&](int piece, int) {
      const Range mine = share(64, piece, pieces);
      const std::uint64_t sum = std::accumulate(before.begin(), before.end(), std::uint64_t{0});
      for (auto at = mine.begin; at < mine.end; ++at) after[static_cast<std::size_t>(at)] = sum;
    });
    expected *= 64;
    before.swap(after);
    CHECK_EQ(std::accumulate(before.begin(), before.end(), std::uint64_t{0}), expected);
    if (expected == 0) {
      before.assign(64, 1);
      expected = 64;
    }
  }
  ThreadPool::claim_hook = nullptr;
}

TEST(thread_pool_is_not_for_forked_children) {
  ThreadPool pool(2);
  const pid_t child = fork();
  if (child == 0) {
    bool refused = false;
    try {
      pool.run(4, [](int, int) {});
    } catch (const std::invalid_argument& error) {
      refused = std::string(error.what()).find("after fork()") != std::string::npos;
    }
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  Phase phase(4);
  pool.run(4, [&](int piece, int rank) { phase.note(piece, rank); });
  CHECK(phase.complete());
}

// Whatever the caller's thread does to small numbers, and the thread that made the workers.
TEST(all_pieces_are_computed_in_one_float_mode) {
  const std::uint32_t before = float_mode(), flushing = default_float_mode() | 0x8040;
  set_float_mode(flushing);
  {
    ThreadPool pool(3);
    for (const int pieces : {1, 24}) {
      std::vector<std::atomic<int>> modes(static_cast<std::size_t>(pieces));
      pool.run(pieces, [&](int piece, int) {
        modes[static_cast<std::size_t>(piece)] = static_cast<int>(float_mode());
      });
      for (const auto& mode : modes) CHECK_EQ(mode.load(), static_cast<int>(default_float_mode()));
      CHECK_EQ(float_mode(), flushing == default_float_mode() ? default_float_mode() : flushing);
    }
  }
  set_float_mode(before);
}

// A process that was forked while the pool was at work, and one that wants as many threads.
TEST(a_forked_child_starts_threads_of_its_own) {
  for (const int size : {2, 3}) {
    ThreadPool pool(2);
    std::atomic<int> children{0}, good{0};
    pool.run(8, [&](int, int rank) {
      if (rank != 0 || children.exchange(1) != 0) return;
      const pid_t child = fork();
      if (child == 0) {
        alarm(30);  // a child that waits for the parent's threads would wait for ever
        pool.resize(size);
        std::atomic<int> done{0};
        pool.run(16, [&](int, int) { ++done; });
        _exit(done == 16 && pool.size() == size ? 0 : 1);
      }
      int status = -1;
      waitpid(child, &status, 0);
      good += WIFEXITED(status) && WEXITSTATUS(status) == 0;
    });
    CHECK_EQ(good.load(), 1);
  }
}

}  // namespace
}  // namespace specdec
