// Where nothing is known of it: it is left as it is.
#include "base/float_mode.h"

namespace specdec {

std::uint32_t float_mode() { return 0; }
std::uint32_t default_float_mode() { return 0; }
void set_float_mode(std::uint32_t) {}

}  // namespace specdec
