// What a kernel choice may depend on, besides the problem: the device's fixed properties.
#pragma once

#include <cstdint>

namespace specdec {

struct DeviceLimits {
  std::int32_t major = 0, minor = 0;  // compute capability
  std::int32_t num_sms = 0;
  std::int32_t shared_bytes = 0;  // of one block, opted in
  std::int64_t l2_bytes = 0;
};

}  // namespace specdec
