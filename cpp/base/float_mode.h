// How the processor treats numbers that are too small: as IEEE 754 says, or, faster, as zero. A
// thread has a mode of its own, which others (torch.set_flush_denormal) may change. Results must
// not depend on who computes them, so all work of the pool is done in the same one.
#pragma once

#include <cstdint>

namespace specdec {

// The calling thread's mode, and that of IEEE 754 with rounding to the nearest.
std::uint32_t float_mode();
std::uint32_t default_float_mode();
void set_float_mode(std::uint32_t mode);

// The default mode for as long as it lives.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : before_(float_mode()) {
    if (before_ != default_float_mode()) set_float_mode(default_float_mode());
  }
  ~DefaultFloatMode() {
    if (before_ != default_float_mode()) set_float_mode(before_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  std::uint32_t before_;
};

}  // namespace specdec
