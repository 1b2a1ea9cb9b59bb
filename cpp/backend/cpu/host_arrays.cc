#include "backend/cpu/host_arrays.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>

#include "backend/cpu/half.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

// What an element of an array that streams from memory takes, rounded up.
constexpr std::int64_t kElementNs = 1;

float load(const float& value) { return value; }

struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

float load(Bf16 value) { return bf16_to_float(value.bits); }
float load(F16 value) { return f16_to_float(value.bits); }
void store(float value, float& to) { to = value; }
void store(float value, Bf16& to) { to.bits = float_to_bf16(value); }
void store(float value, F16& to) { to.bits = float_to_f16(value); }

// Calls body(typed null pointer) for the C++ type of a float dtype.
template <typename F>
void with_type(DType dtype, F&& body) {
  if (dtype == DType::kF32) {
    body(static_cast<const float*>(nullptr));
  } else if (dtype == DType::kBF16) {
    body(static_cast<const Bf16*>(nullptr));
  } else {
    body(static_cast<const F16*>(nullptr));
  }
}

// Bits of `Word` values whose exponent is all ones. Weights have none as a rule, so the blocks are
// searched for their largest magnitude, and counted only where that is one.
template <typename Word>
std::int64_t count_words(const Word* words, std::int64_t n, Word exponent) {
  constexpr std::int64_t kBlock = 4096;
  constexpr Word kMagnitude = std::numeric_limits<Word>::max();
  std::int64_t count = 0;
  for (std::int64_t first = 0; first < n; first += kBlock) {
    const std::int64_t last = std::min(first + kBlock, n);
    Word largest = 0;
    for (std::int64_t i = first; i < last; ++i) {
      largest = std::max<Word>(largest, static_cast<Word>(words[i] & kMagnitude));
    }
    if (largest < exponent) continue;
    for (std::int64_t i = first; i < last; ++i) {
      count += static_cast<Word>(words[i] & kMagnitude) >= exponent;
    }
  }
  return count;
}

}  // namespace

void convert_floats(const void* from, DType from_dtype, void* to, DType to_dtype, std::int64_t n) {
  with_type(from_dtype, [&](auto* source_type) {
    with_type(to_dtype, [&](auto* target_type) {
      using Source = std::remove_const_t<std::remove_pointer_t<decltype(source_type)>>;
      using Target = std::remove_const_t<std::remove_pointer_t<decltype(target_type)>>;
      ThreadPool::global().run_items(n, kElementNs, [&](Range range, int) {
        const auto* source = static_cast<const Source*>(from);
        auto* target = static_cast<Target*>(to);
        for (std::int64_t i = range.begin; i < range.end; ++i) store(load(source[i]), target[i]);
      });
    });
  });
}

std::int64_t count_not_finite(const void* data, DType dtype, std::int64_t n) {
  std::atomic<std::int64_t> count{0};
  ThreadPool::global().run_items(n, kElementNs, [&](Range range, int) {
    const std::int64_t size = range.end - range.begin;
    if (dtype == DType::kF32) {
      const auto* words = static_cast<const std::int32_t*>(data) + range.begin;
      count += count_words<std::int32_t>(words, size, 0x7f800000);
    } else {
      const auto* words = static_cast<const std::int16_t*>(data) + range.begin;
      count += count_words<std::int16_t>(words, size, dtype == DType::kBF16 ? 0x7f80 : 0x7c00);
    }
  });
  return count;
}

}  // namespace specdec::cpu
