#include "base/cpu_features.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "base/check.h"

namespace specdec {
namespace {

CpuIsa capped_isa() {
  const CpuIsa best = detect_cpu_isa();
  const char* text = std::getenv("SPECDEC_CPU_ISA");
  if (text == nullptr || *text == '\0') return best;
  for (CpuIsa isa :
       {CpuIsa::kPlain, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16, CpuIsa::kAmx}) {
    if (std::string(text) == cpu_isa_name(isa)) return std::min(isa, best);
  }
  SPECDEC_REQUIRE(false, "environment variable SPECDEC_CPU_ISA = '", text,
                  "': give plain, avx2, avx512, avx512_bf16 or amx, or unset it");
  return best;
}

}  // namespace

CpuIsa cpu_isa() {
  static const CpuIsa isa = capped_isa();
  return isa;
}

std::int64_t second_level_cache_bytes() {
  const std::string folder = "/sys/devices/system/cpu/cpu0/cache/";
  for (int index = 0; index < 8; ++index) {
    const std::string cache = folder + "index" + std::to_string(index) + "/";
    int level = 0;
    if (!(std::ifstream(cache + "level") >> level) || level != 2) continue;
    std::int64_t size = 0;
    char unit = 0;
    if (std::ifstream(cache + "size") >> size >> unit && unit == 'K' && size > 0) {
      return size * 1024;
    }
  }
  return 0;
}

const char* cpu_isa_name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPlain:
      return "plain";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
    case CpuIsa::kAvx512Bf16:
      return "avx512_bf16";
    case CpuIsa::kAmx:
      return "amx";
  }
  return "unknown";
}

}  // namespace specdec
