#include "backend/cpu/decoder/row_ops.h"

namespace specdec::cpu {

const RowOps& row_ops() {
  switch (cpu_isa()) {
    case CpuIsa::kPlain:
      return row_ops_plain();
    case CpuIsa::kAvx2:
      return row_ops_avx2();
    case CpuIsa::kAvx512:
    case CpuIsa::kAvx512Bf16:
    case CpuIsa::kAmx:
      return row_ops_avx512();
  }
  return row_ops_plain();
}

}  // namespace specdec::cpu
