#include "backend/cpu/decoder/row_ops_impl.h"

namespace specdec::cpu {

const RowOps& row_ops_avx2() {
  static constexpr RowOps ops = make_row_ops();
  return ops;
}

}  // namespace specdec::cpu
