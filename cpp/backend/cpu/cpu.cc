// The CPU's row of the backend table.
#include "backend/backend.h"
#include "backend/cpu/attention/cpu_attention.h"

namespace specdec {

const Backend& cpu_backend() {
  static const Backend backend{"cpu", cpu::append_kv, cpu::spec_attention, cpu::compact_kv,
                               cpu::argmax};
  return backend;
}

}  // namespace specdec
