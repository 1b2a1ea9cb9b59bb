#include "backend/cpu/drafter/eagle_head.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "backend/cache_view.h"
#include "backend/cpu/attention/cpu_attention.h"
#include "backend/cpu/drafter/layer_shape.h"
#include "backend/cpu/linear/linear_call.h"
#include "backend/step_check.h"
#include "base/check.h"
#include "base/pages.h"

namespace specdec::cpu {
namespace {

// No model has more; it keeps the width of a projection far from the end of its integers.
constexpr int kMaxHeads = 1 << 16;

// x [rows, k] through the layer.
void run(const PackedLinear& layer, const float* x, std::int64_t rows, std::vector<float>* out) {
  out->resize(static_cast<std::size_t>(rows * layer.n()));
  run_linear(layer, rows_view(x, rows, layer.k()), rows_view(out->data(), rows, layer.n()));
}

// The row of request b that continues its row `above` with `token`; -1: there is none. A chain's
// rows name no parents.
std::int32_t child_row(const StepView& step, std::int32_t b, std::int32_t above, TokenId token) {
  const std::int32_t first = step.cu_rows[b], end = step.cu_rows[b + 1];
  const bool is_tree = step.is_tree[b] != 0;
  for (std::int32_t r = first + above + 1; r < end; ++r) {
    const std::int32_t parent = is_tree ? step.parents[r] : r - first - 1;
    if (parent == above && step.tokens[r] == token) return r - first;
  }
  return -1;
}

}  // namespace

EagleHead::EagleHead(const EagleShape& shape, EagleLayers layers, EmbedRows embed)
    : shape_(shape), layers_(std::move(layers)), embed_(std::move(embed)), ops_(row_ops()) {
  const std::int64_t hidden = shape.hidden_size, dim = shape.head_dim;
  SPECDEC_REQUIRE(shape.num_kv_heads >= 1 && shape.num_heads >= shape.num_kv_heads &&
                      shape.num_heads <= kMaxHeads && shape.num_heads % shape.num_kv_heads == 0,
                  "num_heads = ", shape.num_heads, ": give 1..", kMaxHeads,
                  ", a multiple of num_kv_heads = ", shape.num_kv_heads);
  SPECDEC_REQUIRE(dim >= 8 && dim <= 256 && dim % 8 == 0, "head_dim = ", dim,
                  ": a multiple of 8 up to 256");
  require_shape(layers_.fc, "fc", hidden, shape.tap_size);
  require_shape(layers_.qkv, "qkv", (shape.num_heads + 2 * shape.num_kv_heads) * dim, 2 * hidden);
  require_shape(layers_.o, "o", hidden, shape.num_heads * dim);
  require_shape(layers_.down, "down", hidden, layers_.down == nullptr ? 0 : layers_.down->k());
  require_shape(layers_.gate_up, "gate_up", 2 * layers_.down->k(), hidden);
  require_shape(layers_.head, "head", shape.num_scores, hidden);
  for (const std::vector<float>* norm :
       {&layers_.input_norm, &layers_.feature_norm, &layers_.ffn_norm, &layers_.final_norm}) {
    SPECDEC_REQUIRE(static_cast<std::int64_t>(norm->size()) == hidden, "a norm has ", norm->size(),
                    " weights, expected hidden_size = ", hidden);
  }
  SPECDEC_REQUIRE(!layers_.cos.empty() && layers_.cos.size() == layers_.sin.size() &&
                      static_cast<std::int64_t>(layers_.cos.size()) % (dim / 2) == 0,
                  "cos, sin: expected float32 [positions, ", dim / 2, "]");
}

void EagleHead::bind_cache(const TensorView& k, const TensorView& v, const TensorView& features) {
  const KvCacheView cache = cache_view(k, v);
  SPECDEC_REQUIRE(cache.num_layers == 1 && cache.num_kv_heads == shape_.num_kv_heads &&
                      cache.head_dim == shape_.head_dim,
                  "k, v: expected pages [1, P, ", shape_.num_kv_heads, ", S, ", shape_.head_dim,
                  "], got [", cache.num_layers, ", P, ", cache.num_kv_heads, ", S, ",
                  cache.head_dim, "]");
  SPECDEC_REQUIRE(
      features.device == DeviceType::kCpu && features.dtype == DType::kF32 && features.ndim == 3 &&
          features.is_contiguous() && features.shape[0] == cache.num_pages &&
          features.shape[1] == cache.page_size && features.shape[2] == shape_.hidden_size,
      "features: expected a contiguous float32 tensor [", cache.num_pages, ", ", cache.page_size,
      ", ", shape_.hidden_size, "]");
  cache_ = cache;
  features_ = static_cast<float*>(features.data);
}

float* EagleHead::feature_at(const StepView& step, std::int32_t request,
                             std::int64_t position) const {
  const std::int32_t* pages = step.page_table + std::int64_t{request} * step.page_table_stride;
  const std::int64_t place = pages[position / cache_.page_size] * std::int64_t{cache_.page_size} +
                             position % cache_.page_size;
  return features_ + place * shape_.hidden_size;
}

// Zeros the K/V of positions [first, last], whose features are new and which the head reads later.
// Until it does they may lie in a page that another request shares: that one must not attend to
// what a third one left there.
void EagleHead::clear(const StepView& step, std::int32_t request, std::int64_t first,
                      std::int64_t last) {
  const std::int32_t* pages = step.page_table + std::int64_t{request} * step.page_table_stride;
  const auto element = static_cast<std::int64_t>(dtype_bytes(cache_.dtype));
  const auto bytes = static_cast<std::size_t>(kv_row_bytes(cache_.dtype, cache_.head_dim));
  for (std::int64_t position = first; position <= last; ++position) {
    const std::int64_t index = position / cache_.page_size;
    // What follows the step may have no page yet.
    if (index >= step.page_table_stride || pages[index] < 0 || pages[index] >= cache_.num_pages) {
      return;
    }
    const std::int64_t place =
        pages[index] * cache_.stride_page + position % cache_.page_size * cache_.stride_token;
    for (std::int32_t head = 0; head < cache_.num_kv_heads; ++head) {
      for (void* pool : {cache_.k, cache_.v}) {
        std::memset(static_cast<std::byte*>(pool) + (place + head * cache_.stride_head) * element,
                    0, bytes);
      }
    }
  }
}

void EagleHead::keep(const StepView& step, int num_prompts, const std::int32_t* request_slots,
                     const SlotPoolView& slots, const float* taps) {
  SPECDEC_REQUIRE(features_ != nullptr, "keep: bind_cache() comes first");
  check_pages(step, cache_, "plan.");
  places_.clear();
  taken_.clear();
  const auto take = [&](std::int32_t b, std::int32_t row, std::int64_t position) {
    const float* from = taps + (std::int64_t{step.cu_rows[b]} + row) * shape_.tap_size;
    taken_.insert(taken_.end(), from, from + shape_.tap_size);
    places_.push_back(feature_at(step, b, position));
  };
  for (std::int32_t b = 0; b < step.num_requests; ++b) {
    const std::int32_t first = step.cu_rows[b], end = step.cu_rows[b + 1];
    if (b < num_prompts) {
      for (std::int32_t r = first; r < end; ++r) take(b, r - first, step.kv_len[b] + r - first);
      clear(step, b, step.kv_len[b], step.kv_len[b] + end - first);
      continue;
    }
    if (first == end || !slots.holds(request_slots[b])) continue;
    // The golden token, then the rows that say what the text says: its last token has none.
    Slot* const slot = slots.at(request_slots[b]);
    const TokenId* const text = slot->history();
    std::int64_t position = step.kv_len[b];
    for (std::int32_t row = 0; row >= 0; row = child_row(step, b, row, text[position])) {
      take(b, row, position);
      if (++position >= slot->len - 1) break;
    }
    clear(step, b, step.kv_len[b] + 1, position);
  }
  const auto rows = static_cast<std::int64_t>(places_.size());
  if (rows == 0) return;
  run(*layers_.fc, taken_.data(), rows, &fused_);
  for (std::int64_t r = 0; r < rows; ++r) {
    std::copy_n(fused_.data() + r * shape_.hidden_size, shape_.hidden_size, places_[r]);
  }
  num_kept_ += rows;
}

void EagleHead::check_step(const StepView& step, const std::int32_t* sources) const {
  SPECDEC_REQUIRE(features_ != nullptr, "forward: bind_cache() comes first");
  check_pages(step, cache_, "plan.");
  const auto positions = static_cast<std::int64_t>(layers_.cos.size()) / (shape_.head_dim / 2);
  const auto before = static_cast<std::int64_t>(result_.size()) / shape_.hidden_size;
  for (std::int32_t r = 0; r < step.num_rows; ++r) {
    SPECDEC_REQUIRE(step.positions[r] >= 1 && step.positions[r] <= positions, "plan.positions[", r,
                    "] = ", step.positions[r], ": a head's rows are at 1..", positions);
    SPECDEC_REQUIRE(sources[r] >= -1 && sources[r] < before, "sources[", r, "] = ", sources[r],
                    ": the call before had ", before, " rows");
  }
  for (std::int32_t i = 0; i < step.num_logit_rows; ++i) {
    SPECDEC_REQUIRE(step.logit_rows[i] >= 0 && step.logit_rows[i] < step.num_rows,
                    "plan.logit_rows[", i, "] = ", step.logit_rows[i], ": rows are 0..",
                    step.num_rows - 1);
  }
}

void EagleHead::norm_rows(const float* x, const std::vector<float>& weight, std::int64_t rows,
                          float* out, std::int64_t out_stride) const {
  const std::int64_t n = shape_.hidden_size;
  for (std::int64_t r = 0; r < rows; ++r) {
    ops_.rms_norm_f32(x + r * n, weight.data(), n, shape_.rms_norm_eps, out + r * out_stride);
  }
}

// Fills feature_ and pair_. result_ of the call before moves to before_, where sources find it: a
// row's feature is copied before this call's result_ is written.
void EagleHead::gather(const StepView& step, const std::int32_t* sources) {
  const std::int64_t rows = step.num_rows, n = shape_.hidden_size;
  before_.swap(result_);
  feature_.resize(static_cast<std::size_t>(rows * n));
  pair_.resize(static_cast<std::size_t>(rows * n) * 2);
  std::vector<float>& embedded = sum_;
  embedded.resize(static_cast<std::size_t>(rows * n));
  embed_(step.tokens, rows, embedded.data());
  for (std::int32_t b = 0; b < step.num_requests; ++b) {
    for (std::int32_t r = step.cu_rows[b]; r < step.cu_rows[b + 1]; ++r) {
      const float* from = sources[r] >= 0 ? before_.data() + sources[r] * n
                                          : feature_at(step, b, step.positions[r] - 1);
      std::copy_n(from, n, feature_.data() + r * n);
    }
  }
  norm_rows(embedded.data(), layers_.input_norm, rows, pair_.data(), 2 * n);
  norm_rows(feature_.data(), layers_.feature_norm, rows, pair_.data() + n, 2 * n);
  if (!shape_.norm_before_residual) return;
  for (std::int64_t r = 0; r < rows; ++r) {
    std::copy_n(pair_.data() + r * 2 * n + n, n, feature_.data() + r * n);
  }
}

// attention_ of qkv_, whose K/V goes into the pages.
void EagleHead::attend(const StepView& step) {
  const std::int64_t dim = shape_.head_dim, half = dim / 2, width = layers_.qkv->n();
  for (std::int64_t r = 0; r < step.num_rows; ++r) {
    // A row's position is that of its feature, as in training.
    const std::int64_t at = (std::int64_t{step.positions[r]} - 1) * half;
    for (int head = 0; head < shape_.num_heads + shape_.num_kv_heads; ++head) {
      ops_.rope(layers_.cos.data() + at, layers_.sin.data() + at, half,
                qkv_.data() + r * width + head * dim);
    }
  }
  AppendKvParams append;
  append.step = step;
  append.cache = cache_;
  append.k = qkv_.data() + shape_.num_heads * dim;
  append.v = qkv_.data() + (shape_.num_heads + shape_.num_kv_heads) * dim;
  append.k_row_stride = append.v_row_stride = width;
  append.dtype = DType::kF32;
  append_kv(append);
  attention_.resize(static_cast<std::size_t>(step.num_rows * shape_.num_heads * dim));
  SpecAttentionParams params;
  params.step = step;
  params.cache = cache_;
  params.q = qkv_.data();
  params.q_row_stride = width;
  params.num_heads = shape_.num_heads;
  params.dtype = DType::kF32;
  params.scale = 1.0f / std::sqrt(static_cast<float>(dim));
  params.sliding_window = shape_.sliding_window;
  params.first_key = 1;
  params.out = attention_.data();
  params.out_row_stride = shape_.num_heads * dim;
  spec_attention(params);
}

void EagleHead::forward(const StepView& step, const std::int32_t* sources, float* scores) {
  check_step(step, sources);
  const std::int64_t rows = step.num_rows, n = shape_.hidden_size, wide = layers_.down->k();
  if (rows == 0) return;
  gather(step, sources);
  run(*layers_.qkv, pair_.data(), rows, &qkv_);
  attend(step);
  run(*layers_.o, attention_.data(), rows, &sum_);
  result_.assign(feature_.begin(), feature_.end());
  ops_.add(sum_.data(), rows * n, result_.data());
  norm_rows(result_.data(), layers_.ffn_norm, rows, feature_.data(), n);
  run(*layers_.gate_up, feature_.data(), rows, &gates_);
  act_.resize(static_cast<std::size_t>(rows * wide));
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* const gate = gates_.data() + r * 2 * wide;
    ops_.silu_mul_f32(gate, gate + wide, wide, act_.data() + r * wide);
  }
  run(*layers_.down, act_.data(), rows, &sum_);
  ops_.add(sum_.data(), rows * n, result_.data());
  if (scores == nullptr || step.num_logit_rows == 0) return;
  final_.resize(static_cast<std::size_t>(step.num_logit_rows * n));
  for (std::int32_t i = 0; i < step.num_logit_rows; ++i) {
    norm_rows(result_.data() + step.logit_rows[i] * n, layers_.final_norm, 1, final_.data() + i * n,
              n);
  }
  run_linear(*layers_.head, rows_view(final_.data(), step.num_logit_rows, n),
             rows_view(scores, step.num_logit_rows, shape_.num_scores));
}

std::size_t EagleHead::weight_bytes() const {
  std::size_t bytes = 0;
  for (const PackedLinear* layer :
       {layers_.fc, layers_.qkv, layers_.o, layers_.gate_up, layers_.down, layers_.head}) {
    bytes += layer->bytes();
  }
  return bytes;
}

}  // namespace specdec::cpu
