// The pages of the K/V cache: which page holds which tokens of which request.
//
// Contract: PageTable is bookkeeping of the host and touches no K/V. reserve() makes room or
// changes nothing; commit() says how many tokens are final; rewind() gives back what is beyond
// them. The executor keeps one and shows each step its page_table. K and V of a cache are each
// [layers, pages, kv_heads, page_size, head_dim]; KvCacheView describes such memory, cache_view()
// makes one of two tensors and checks them, CpuPages (model.h) allocates them.
#pragma once

#include "backend/cache_view.h"
#include "backend/step_view.h"
#include "kv/page_table.h"
