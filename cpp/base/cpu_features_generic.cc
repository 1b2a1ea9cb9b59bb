#include "base/cpu_features.h"

namespace specdec {

CpuIsa detect_cpu_isa() { return CpuIsa::kPlain; }

}  // namespace specdec
