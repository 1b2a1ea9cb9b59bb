#include "backend/cpu/decoder/row_ops_impl.h"

namespace specdec::cpu {

const RowOps& row_ops_plain() {
  static constexpr RowOps ops = make_row_ops();
  return ops;
}

}  // namespace specdec::cpu
