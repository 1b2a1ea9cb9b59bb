#include "backend/cpu/decoder/row_ops.h"

namespace specdec::cpu {

const RowOps& row_ops() { return row_ops_plain(); }

}  // namespace specdec::cpu
