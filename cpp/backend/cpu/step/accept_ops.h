// Drawing tokens and accepting drafts on the CPU, on the calling thread.
#pragma once

#include "backend/accept_ops.h"

namespace specdec::cpu {

void sample_rows(const SampleRowsParams& params);
void accept_step(const AcceptStepParams& params);

}  // namespace specdec::cpu
