// Launcher of the attention kernel that serves every shape: what has no fast instance lands here.
// Params and semantics: SpecAttentionParams in backend/ops.h; docs/kernels/generic_attention.md.
#pragma once

#include "backend/ops.h"

namespace specdec::cuda {

// Always exact, whatever params.exact says; params.max_depth does not matter. Needs no workspace.
void generic_attention(const SpecAttentionParams& params);

}  // namespace specdec::cuda
