#include "algo/law_loops_impl.h"
#include "base/cpu_features.h"

namespace specdec {
namespace {

SPECDEC_LAW_LOOPS(plain, 4, );
SPECDEC_LAW_LOOPS(avx2, 8, [[gnu::target("avx2")]]);
SPECDEC_LAW_LOOPS(avx512, 16, [[gnu::target("avx512f,avx512dq,avx512bw,avx512vl")]]);

constexpr const LawLoops* kAll[] = {&k_plain, &k_avx2, &k_avx512};

}  // namespace

int num_law_loops() {
  switch (cpu_isa()) {
    case CpuIsa::kPlain:
      return 1;
    case CpuIsa::kAvx2:
      return 2;
    case CpuIsa::kAvx512:
    case CpuIsa::kAvx512Bf16:
    case CpuIsa::kAmx:
      return 3;
  }
  return 1;
}

const LawLoops& law_loops_at(int index) { return *kAll[index]; }

}  // namespace specdec
