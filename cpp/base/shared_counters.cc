#include "base/shared_counters.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <ctime>

#include "base/check.h"
#include "base/cpu_relax.h"

namespace specdec {
namespace {

// About 50 us. Ranks of one step arrive within that where each has a core; where they share one,
// the other has to get it, and a rank that sleeps is woken sooner than one that yields.
constexpr int kSpins = 2000;

}  // namespace

struct SharedCounters::Counter {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "processes share it");

SharedCounters::Counter& SharedCounters::at(int index) const {
  SPECDEC_REQUIRE(index >= 0 && index < count_, "counter ", index, ": counters are 0..",
                  count_ - 1);
  return *reinterpret_cast<Counter*>(static_cast<std::byte*>(memory_) +
                                     static_cast<std::size_t>(index) * kBytes);
}

std::uint32_t SharedCounters::value(int index) const { return at(index).value.load(); }

void SharedCounters::add(int index) const {
  Counter& counter = at(index);
  counter.value.fetch_add(1);
  if (counter.sleepers.load() == 0) return;
  ::syscall(SYS_futex, &counter.value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

bool SharedCounters::wait(int index, std::uint32_t target, double seconds) const {
  Counter& counter = at(index);
  const auto reached = [&](std::uint32_t value) {
    return static_cast<std::int32_t>(value - target) >= 0;
  };
  for (int i = 0; i < kSpins; ++i) {
    if (reached(counter.value.load(std::memory_order_acquire))) return true;
    cpu_relax();
  }
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                   std::chrono::duration<double>(seconds));
  for (;;) {
    counter.sleepers.fetch_add(1);
    const std::uint32_t seen = counter.value.load();
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    if (!reached(seen) && left > 0.0) {
      const double whole = std::floor(left);
      const timespec limit{static_cast<std::time_t>(whole),
                           static_cast<long>((left - whole) * 1e9)};  // NOLINT(google-runtime-int)
      // Returns at once if the counter is no longer what was seen.
      ::syscall(SYS_futex, &counter.value, FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
    counter.sleepers.fetch_sub(1);
    if (reached(counter.value.load())) return true;
    if (left <= 0.0) return false;
  }
}

}  // namespace specdec
