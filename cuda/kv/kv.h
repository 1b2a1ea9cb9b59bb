// Launchers of the kernels that write the paged K/V. Params and semantics: backend/ops.h. Each
// enqueues on exec.stream and returns; docs/kernels/kv_append.md and kv_compact.md.
#pragma once

#include "backend/ops.h"

namespace specdec::cuda {

void append_kv(const AppendKvParams& params);
void rope_append_kv(const RopeAppendKvParams& params);
void compact_kv(const CompactKvParams& params);

}  // namespace specdec::cuda
