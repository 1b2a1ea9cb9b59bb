// Page tensors as the view that the engine works with.
#pragma once

#include "backend/step_view.h"
#include "base/tensor_view.h"

namespace specdec {

// k, v: contiguous [layers, pages, kv_heads, page_size, head_dim], alike in shape and dtype
// (is_kv_dtype), on the CPU; std::invalid_argument otherwise.
KvCacheView cache_view(const TensorView& k, const TensorView& v);

}  // namespace specdec
