// Launchers of the kernels that draw tokens and accept drafts. Params and semantics:
// backend/accept_ops.h. Each enqueues on exec.stream and returns; docs/kernels/acceptance.md.
#pragma once

#include "backend/accept_ops.h"

namespace specdec::cuda {

void sample_rows(const SampleRowsParams& params);
void accept_step(const AcceptStepParams& params);
void synthetic_step(const SyntheticStepParams& params);

}  // namespace specdec::cuda
