// A spin loop's pause: the other hardware thread of the core gets on, and the loop uses less power.
#pragma once

namespace specdec {

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace specdec
