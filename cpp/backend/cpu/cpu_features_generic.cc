#include "backend/cpu/cpu_features.h"

namespace specdec {

CpuIsa detect_cpu_isa() { return CpuIsa::kPlain; }

}  // namespace specdec
