#include "backend/cpu/cpu_features.h"

namespace specdec {

bool may_use_amx() { return false; }

}  // namespace specdec
