#include "backend/attention/table.h"

#include "backend/attention/instances.h"

namespace specdec::attention {

std::span<const AttentionInstance> instances() { return kInstances; }

const char* family_name(Family family) {
  switch (family) {
    case Family::kGeneric:
      return "generic";
    case Family::kAmpere:
      return "ampere";
    case Family::kHopper:
      return "hopper";
  }
  return "unknown";
}

}  // namespace specdec::attention
