// Counters that processes share through mapped memory: one adds, the others wait until a counter
// has come so far. What was written before add() is seen behind wait().
#pragma once

#include <cstddef>
#include <cstdint>

namespace specdec {

class SharedCounters {
 public:
  static constexpr std::size_t kBytes = 64;  // of one counter: a cache line

  // `memory`: count * kBytes bytes at a cache line, zeros at first; outlives this object.
  SharedCounters(void* memory, int count) : memory_(memory), count_(count) {}

  int count() const { return count_; }
  std::uint32_t value(int index) const;
  void add(int index) const;
  // Until the counter is `target` or more (modulo 2^32); false: it was not in `seconds`.
  bool wait(int index, std::uint32_t target, double seconds) const;

 private:
  struct Counter;
  Counter& at(int index) const;

  void* memory_;
  int count_;
};

}  // namespace specdec
