#include "backend/cache_view.h"

#include "base/check.h"
#include "base/pages.h"

namespace specdec {

KvCacheView cache_view(const TensorView& k, const TensorView& v) {
  auto check = [&](const char* name, const TensorView& t) {
    SPECDEC_REQUIRE(
        t.ndim == 5 && t.is_contiguous(), name,
        ": expected a contiguous [layers, pages, kv_heads, page_size, head_dim] tensor");
    SPECDEC_REQUIRE(
        t.device == DeviceType::kCpu, name,
        " is on a CUDA device, where steps are enqueued: leave the pages out, and bind_rings()");
    SPECDEC_REQUIRE(is_kv_dtype(t.dtype), name, " has dtype ", dtype_name(t.dtype),
                    ": float32, float16, bfloat16, float8_e4m3fn or int8 are supported");
  };
  check("k_pages", k);
  check("v_pages", v);
  for (int i = 0; i < 5; ++i) {
    SPECDEC_REQUIRE(k.shape[i] == v.shape[i], "k_pages and v_pages differ in axis ", i, ": ",
                    k.shape[i], " and ", v.shape[i]);
  }
  SPECDEC_REQUIRE(k.dtype == v.dtype, "k_pages is ", dtype_name(k.dtype), ", v_pages is ",
                  dtype_name(v.dtype));
  KvCacheView view;
  view.k = k.data;
  view.v = v.data;
  view.dtype = k.dtype;
  view.num_layers = static_cast<std::int32_t>(k.shape[0]);
  view.num_pages = static_cast<std::int32_t>(k.shape[1]);
  view.num_kv_heads = static_cast<std::int32_t>(k.shape[2]);
  view.page_size = static_cast<std::int32_t>(k.shape[3]);
  view.head_dim = static_cast<std::int32_t>(head_dim_of(k.dtype, k.shape[4]));
  view.stride_layer = k.strides[0];
  view.stride_page = k.strides[1];
  view.stride_head = k.strides[2];
  view.stride_token = k.strides[3];
  return view;
}

}  // namespace specdec
