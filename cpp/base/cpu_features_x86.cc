#include "base/cpu_features.h"

namespace specdec {

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
