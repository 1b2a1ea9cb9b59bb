// A model without Python: the native CPU decoder over a folder that `specdec convert` has written
// (of a Hugging Face folder, or of a GGUF file, whose weights keep their width).
//
// Contract: CpuModel reads the folder once; its decoder runs the rows of a StepPlan and appends
// their K/V to the bound pages. A row's bits depend on its own path alone. Token ids go in and come
// out: tokenizers are the caller's.
#pragma once

#include "backend/cpu/decoder/llama_decoder.h"
#include "base/thread_pool.h"
#include "runtime/model_folder.h"
