#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/cpu_features.h"

namespace specdec {
namespace {

// arch_prctl(2): a process has to ask for registers of this size, once for all its threads.
constexpr int kArchReqXcompPerm = 0x1023;
constexpr unsigned long kTileData = 18;

}  // namespace

bool may_use_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  constexpr unsigned kBoth = kBf16 | kTiles;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBoth) != kBoth) return false;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

}  // namespace specdec
