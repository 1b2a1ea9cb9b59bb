#include "ptx/ops.h"

namespace ptx {

const Opcode* find_opcode(const std::string& name) {
  static const Table table = [] {
    Table t;
    add_integers(t), add_floats(t), add_conversions(t), add_memory(t), add_control(t);
    add_warp_operations(t), add_async(t), add_matrices(t), add_warpgroup_products(t);
    return t;
  }();
  const auto found = table.find(name);
  return found == table.end() ? nullptr : &found->second;
}

}  // namespace ptx
