// Memory that a thread is going to read, which it fetches while it has to wait.
//
// Between two products over weights there are norms, rotations and the wait for the last piece. A
// thread that has nothing to do meanwhile can bring its next weights into its second-level cache.
// Nothing depends on it: an address that is out of date costs a few fetches and cannot fault.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace specdec {

class alignas(64) ExpectedReads {
 public:
  // `bytes` from each of two places, which are read in turns; one place: give it twice. Whoever
  // hands out the work says so, at any time.
  void set(const std::byte* first, const std::byte* second, std::size_t bytes) {
    bytes_.store(0, std::memory_order_relaxed);
    first_.store(reinterpret_cast<std::uintptr_t>(first), std::memory_order_relaxed);
    second_.store(reinterpret_cast<std::uintptr_t>(second), std::memory_order_relaxed);
    bytes_.store(bytes, std::memory_order_relaxed);
  }

  // A few lines more; false if all are fetched. For the thread that waits, between two looks.
  // Always inline: GCC takes a function that only prefetches for one without effect.
  __attribute__((always_inline)) bool fetch_some() {
    const std::uintptr_t first = first_.load(std::memory_order_relaxed);
    if (first != fetching_) {
      fetching_ = first;
      fetched_.store(0, std::memory_order_relaxed);
    }
    const std::size_t begin = fetched();
    if (begin >= bytes_.load(std::memory_order_relaxed)) return false;
    const std::uintptr_t second = second_.load(std::memory_order_relaxed);
    for (std::size_t at = begin; at < begin + kAtATime; at += kLine) {
      __builtin_prefetch(reinterpret_cast<const void*>(first + at), 0, 2);
      if (second != first) __builtin_prefetch(reinterpret_cast<const void*>(second + at), 0, 2);
    }
    fetched_.store(begin + kAtATime, std::memory_order_relaxed);
    return true;
  }

  // Bytes of each place that have been fetched.
  std::size_t fetched() const { return fetched_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kLine = 64;
  // A look at the pool comes late by no more than these lines take.
  static constexpr std::size_t kAtATime = 4 * kLine;

  // Numbers, not pointers: the last lines may lie behind the memory that is read.
  std::atomic<std::uintptr_t> first_{0}, second_{0};
  std::atomic<std::size_t> bytes_{0};
  // Written by the thread that fetches alone.
  std::uintptr_t fetching_ = 0;
  std::atomic<std::size_t> fetched_{0};
};

}  // namespace specdec
