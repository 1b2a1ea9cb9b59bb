#include <cpuid.h>

#include "backend/cpu/cpu_features.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specdec {
namespace {

#ifdef __linux__
// arch_prctl(2): a process has to ask for registers of this size, once for all its threads.
constexpr int kArchReqXcompPerm = 0x1023;
constexpr unsigned long kTileData = 18;

bool ask_for_tiles() { return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0; }
#else
bool ask_for_tiles() { return false; }
#endif

// Tiles of bf16, compiled here and given to this process.
bool may_use_amx() {
#ifdef SPECDEC_HAS_AMX
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  constexpr unsigned kAll = kBf16 | kTiles;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAll) == kAll && ask_for_tiles();
#else
  return false;
#endif
}

}  // namespace

CpuIsa detect_cpu_isa() {
  // The builtin also checks that the operating system saves the wide registers.
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c")) {
    return CpuIsa::kPlain;
  }
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return CpuIsa::kAvx2;
  }
  // All but the very first processors with bfloat16 products look bytes up in tables of 128, too.
  const bool has_bf16 =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  if (!has_bf16) return CpuIsa::kAvx512;
  return may_use_amx() ? CpuIsa::kAmx : CpuIsa::kAvx512Bf16;
}

}  // namespace specdec
