#include "base/cpu_features.h"

namespace specdec {

bool may_use_amx() { return false; }

}  // namespace specdec
