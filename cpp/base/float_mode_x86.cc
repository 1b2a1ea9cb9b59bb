#include <xmmintrin.h>

#include "base/float_mode.h"

namespace specdec {

// Without the flags of what has happened, which any operation may set.
constexpr std::uint32_t kFlags = 0x3f;

std::uint32_t float_mode() { return _mm_getcsr() & ~kFlags; }
std::uint32_t default_float_mode() { return 0x1f80; }  // no exception traps
void set_float_mode(std::uint32_t mode) { _mm_setcsr((_mm_getcsr() & kFlags) | mode); }

}  // namespace specdec
