// An EAGLE-3 head: one decoder layer that goes on from the target's own states.
//
// A row reads token p of a text and the feature of position p - 1. Where the target has read that
// position, the feature is fc of three of its hidden states (keep()); behind a draft it is what
// this layer made of the row before. With e the embedding and f the feature:
//
//   x <- [norm(e), norm(f)]                       2H wide
//   r <- f (or norm(f)) + o(attention(q, k, v of x))
//   r <- r + down(silu(gate) * up) of norm(r)     the next row's feature
//   scores <- head(norm(r))
//
// K, V and features lie in pages with the ids of the target's, place p for token p, so that whoever
// shares a page of the target shares the head's. Position 0 has no feature in front of it, hence no
// row: attention begins at place 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "backend/cpu/decoder/row_ops.h"
#include "backend/cpu/linear/packed_linear.h"
#include "backend/slot_ops.h"
#include "backend/step_view.h"
#include "base/tensor_view.h"

namespace specdec::cpu {

struct EagleShape {
  std::int64_t hidden_size = 0;  // H of the head
  std::int64_t tap_size = 0;     // values of the target's states that fc reads, all of them
  std::int64_t num_scores = 0;
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float rms_norm_eps = 1e-6f;
  bool norm_before_residual = false;  // the residual is the normed feature
  int sliding_window = 0;             // tokens that attention sees; 0: all
};

// Layers that outlive the head, and weights of norms [H].
struct EagleLayers {
  const PackedLinear* fc = nullptr;       // [H, tap_size]
  const PackedLinear* qkv = nullptr;      // [(heads + 2 kv heads) * head_dim, 2H]
  const PackedLinear* o = nullptr;        // [H, heads * head_dim]
  const PackedLinear* gate_up = nullptr;  // [2 * intermediate, H]
  const PackedLinear* down = nullptr;     // [H, intermediate]
  const PackedLinear* head = nullptr;     // [num_scores, H]
  std::vector<float> input_norm, feature_norm, ffn_norm, final_norm;
  // float32 [positions, head_dim / 2] each
  std::vector<float> cos, sin;
};

class EagleHead {
 public:
  // out [count, H] = the embeddings of these tokens
  using EmbedRows = std::function<void(const TokenId* tokens, std::int64_t count, float* out)>;

  // Errors: std::invalid_argument naming the layer that does not fit.
  EagleHead(const EagleShape& shape, EagleLayers layers, EmbedRows embed);

  // k, v [1, P, G, S, K]; features float32 [P, S, H]. They outlive this object or the next bind.
  void bind_cache(const TensorView& k, const TensorView& v, const TensorView& features);

  // Behind the commit of a step that the target has run: the features of those rows that are part
  // of their texts now, `num_prompts` requests of prompts first.
  //
  // request_slots [B]  of the step's requests
  // taps               float32 [R, tap_size]
  void keep(const StepView& step, int num_prompts, const std::int32_t* request_slots,
            const SlotPoolView& slots, const float* taps);

  // Runs the rows and writes the scores [L, num_scores] of the logit rows; null: K/V alone.
  //
  // sources [R]  the row of the call before whose result is the row's feature; -1: that of the
  //              position in front of it, from the pages
  void forward(const StepView& step, const std::int32_t* sources, float* scores);

  const EagleShape& shape() const { return shape_; }
  std::int64_t num_kept() const { return num_kept_; }  // rows, by keep() so far
  std::size_t weight_bytes() const;

 private:
  float* feature_at(const StepView& step, std::int32_t request, std::int64_t position) const;
  void check_step(const StepView& step, const std::int32_t* sources) const;
  void clear(const StepView& step, std::int32_t request, std::int64_t first, std::int64_t last);
  void gather(const StepView& step, const std::int32_t* sources);
  void attend(const StepView& step);
  void norm_rows(const float* x, const std::vector<float>& weight, std::int64_t rows, float* out,
                 std::int64_t out_stride) const;

  EagleShape shape_;
  EagleLayers layers_;
  EmbedRows embed_;
  const RowOps& ops_;
  KvCacheView cache_;
  float* features_ = nullptr;
  std::int64_t num_kept_ = 0;
  // The buffers of a call, by row.
  std::vector<float> taken_, fused_, pair_, feature_, qkv_, attention_, sum_, gates_, act_;
  std::vector<float> result_, before_, final_;
  std::vector<float*> places_;
};

}  // namespace specdec::cpu
