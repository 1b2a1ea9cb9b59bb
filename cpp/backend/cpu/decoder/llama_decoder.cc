// LlamaDecoder: one step.
//
// The calling thread goes through a list of phases. A phase is dealt out in pieces, of rows or of
// the columns of a linear layer, unless it is so short that the calling thread does it by itself,
// as it does all that there is to do for a single row.
#include "backend/cpu/decoder/llama_decoder.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "backend/cpu/attention/cpu_attention.h"
#include "backend/cpu/decoder/decoder_parts.h"
#include "backend/cpu/decoder/input_rows.h"
#include "backend/step_check.h"
#include "base/check.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

// Rows of a prompt whose gate, up and activation a piece does one after the other, in memory of its
// thread: what the two products write stays in the second-level cache. Whole tiles of either kind
// of weights, 12 rows and 15 or 24. A pass of decoding has fewer rows than kOneRun.
constexpr std::int64_t kActivationRows = 120, kOneRun = 128;
// Fewer keep the bits of exact attention in fast numerics, too, as they do in the linear layers.
constexpr std::int64_t kFastAttentionRows = 16;

}  // namespace

void LlamaDecoder::set_taps(std::vector<int> layers, float* rows) {
  SPECDEC_REQUIRE(!is_shard(), "set_taps: a shard of several decoders has no taps");
  for (const int layer : layers) {
    SPECDEC_REQUIRE(layer >= 0 && layer <= config_.num_layers, "set_taps: layer ", layer,
                    ": layers are 0..", config_.num_layers - 1, ", and ", config_.num_layers,
                    " is what leaves the last one");
  }
  taps_ = std::move(layers);
  tapped_ = rows;
}

void LlamaDecoder::check_step(const StepView& step) const {
  SPECDEC_REQUIRE(cache_.k != nullptr, "LlamaDecoder: call bind_cache before forward");
  SPECDEC_REQUIRE(step.num_rows >= 1 && step.num_rows <= config_.max_rows, "step has ",
                  step.num_rows, " rows, the decoder was made for 1..", config_.max_rows,
                  " (max_rows)");
  for (std::int32_t r = 0; r < step.num_rows; ++r) {
    SPECDEC_REQUIRE(step.tokens[r] >= 0 && step.tokens[r] < config_.vocab_size, "step.tokens[", r,
                    "] = ", step.tokens[r], ": the vocabulary is 0..", config_.vocab_size - 1);
    SPECDEC_REQUIRE(step.positions[r] >= 0 && step.positions[r] < config_.max_position,
                    "step.positions[", r, "] = ", step.positions[r], ": positions are 0..",
                    config_.max_position - 1);
  }
  SPECDEC_REQUIRE(step.num_logit_rows <= config_.max_rows, "step has ", step.num_logit_rows,
                  " logit rows, at most max_rows = ", config_.max_rows);
  for (std::int32_t i = 0; i < step.num_logit_rows; ++i) {
    SPECDEC_REQUIRE(step.logit_rows[i] >= 0 && step.logit_rows[i] < step.num_rows,
                    "step.logit_rows[", i, "] = ", step.logit_rows[i], ": rows are 0..",
                    step.num_rows - 1);
  }
  check_pages(step, cache_, "step.");
}

// Grows what depends on the lengths of the step; a steady state allocates nothing.
void LlamaDecoder::prepare(const StepView& step) {
  check_step(step);
  std::int64_t max_keys = 0;
  for (std::int32_t b = 0; b < step.num_requests; ++b) {
    max_keys = std::max<std::int64_t>(
        max_keys, step.kv_len[b] + std::int64_t{step.cu_rows[b + 1] - step.cu_rows[b]});
  }
  prepared_ranks_ = ThreadPool::global().size();
  const std::size_t needed = spec_attention_scratch_bytes(max_keys, num_heads_, num_kv_heads_,
                                                          config_.head_dim, prepared_ranks_);
  if (attention_scratch_.size() < needed) attention_scratch_.resize(needed + needed / 2);
  if (config_.final_softcap > 0.0f && head_scores_.empty()) {
    head_scores_.resize(kCappedRows * scores_.count);
  }
}

void LlamaDecoder::embed(const StepView& step, Range rows) {
  const std::int64_t n = config_.hidden_size;
  const float scale = config_.embedding_scale;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    float* out = residual_.data() + r * n;
    unpack_embedding(step.tokens[r], out);
    if (scale != 1.0f) {
      for (std::int64_t i = 0; i < n; ++i) out[i] *= scale;
    }
  }
}

void LlamaDecoder::unpack_embedding(TokenId token, float* out) const {
  table_ ? table_->unpack_row(token, out) : unpack_head(token, out);
}

void LlamaDecoder::embedding_rows(const TokenId* tokens, std::int64_t count, float* out) const {
  SPECDEC_REQUIRE(config_.tie_word_embeddings ? head_ != nullptr : table_ != nullptr,
                  "embed_tokens.weight: missing; call set_embedding first");
  for (std::int64_t i = 0; i < count; ++i) {
    SPECDEC_REQUIRE(tokens[i] >= 0 && tokens[i] < config_.vocab_size, "tokens[", i,
                    "] = ", tokens[i], ": the vocabulary is 0..", config_.vocab_size - 1);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    unpack_embedding(tokens[i], out + i * config_.hidden_size);
  }
}

// input_[r] = norm(x[r]) in the form that the next linear layer takes.
void LlamaDecoder::norm_rows(const float* x, const std::vector<float>& weight, InputForm form,
                             Range rows) {
  const std::int64_t n = config_.hidden_size;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    norm_row(ops_, form, x + r * n, weight.data(), n, config_.rms_norm_eps,
             input_.data() + r * input_bytes_);
  }
}

// The query heads and key heads of these rows that are computed here.
void LlamaDecoder::qk_norm_and_rope(const StepView& step, const Layer& layer, const RopeTable* rope,
                                    Range rows) {
  const std::int64_t heads = num_heads_ + num_kv_heads_;
  for (std::int64_t item = rows.begin * heads; item < rows.end * heads; ++item) {
    const std::int64_t row = item / heads, head = item % heads;
    // q and k lie one behind the other, so key heads simply continue the query heads.
    float* x = qkv_.data() + row * qkv_stride_ + head * config_.head_dim;
    if (config_.has_qk_norm) {
      const std::vector<float>& weight = head < num_heads_ ? layer.q_norm : layer.k_norm;
      ops_.rms_norm_f32(x, weight.data(), config_.head_dim, config_.rms_norm_eps, x);
    }
    if (rope != nullptr) {
      const std::int64_t offset = std::int64_t{step.positions[row]} * rope->half;
      ops_.rope(rope->cos.data() + offset, rope->sin.data() + offset, rope->half, x);
    }
  }
}

// In front of the product before it, whose end some threads wait for, too.
void LlamaDecoder::expect_layer(const StepView& step, int index) const {
  if (index < config_.num_layers) {
    layers_[index].qkv->parts().front().expect(step.num_rows);
  } else if (screen_) {
    screen_->expect(step.num_logit_rows);
  } else if (head_) {
    head_->expect(step.num_logit_rows);
  }
}

// qkv_ = q, k and v of the residual stream; k and v go to the pages.
void LlamaDecoder::append_kv(const StepView& step, int index) {
  const Layer& layer = layers_[index];
  const std::int64_t rows = step.num_rows;
  const InputForm form = form_of(*layer.qkv, rows);
  over_rows(rows, 4, [&](Range some) {
    if (index > 0) add_sum(layers_[index - 1].ffn_out_norm, some);
    tap(index, some);
    norm_rows(residual_.data(), layer.attention_norm, form, some);
  });
  layer.o->expect(rows);
  layer.qkv->run(input_rows(rows, form), qkv_.data(), qkv_stride_);
  const std::int64_t q_width = std::int64_t{num_heads_} * config_.head_dim;
  const std::int64_t kv_width = std::int64_t{num_kv_heads_} * config_.head_dim;
  const RopeTable* rope =
      config_.rope_index[index] < 0 ? nullptr : &ropes_[config_.rope_index[index]];
  AppendKvParams append;
  append.step = step;
  append.cache = cache_;
  append.layer = index;
  append.k = qkv_.data() + q_width;
  append.v = qkv_.data() + q_width + kv_width;
  append.k_row_stride = append.v_row_stride = qkv_stride_;
  append.dtype = DType::kF32;
  take_scales(index, append);
  over_rows(rows, 4, [&](Range some) {
    qk_norm_and_rope(step, layer, rope, some);
    append_kv_part(append, some);
  });
}

// From q to the outputs of the heads that are computed here.
void LlamaDecoder::attend(const StepView& step, int index) {
  SpecAttentionParams params;
  params.step = step;
  params.cache = cache_;
  params.layer = index;
  params.q = qkv_.data();
  params.q_row_stride = qkv_stride_;
  params.num_heads = num_heads_;
  params.dtype = DType::kF32;
  params.scale = config_.attention_scale;
  params.exact = !config_.has_fast_forms || step.num_rows < kFastAttentionRows;
  params.sliding_window = config_.sliding_window[index];
  params.sink_tokens = config_.sink_tokens;
  params.softcap = config_.attention_softcap;
  take_scales(index, params);
  const bool direct = writes_input_directly(layers_[index]);
  params.out = direct ? as_f32(input_.data())
                      : attention_.data() + std::int64_t{first_head_} * config_.head_dim;
  params.out_row_stride = direct ? input_bytes_ / 4 : attention_stride_;
  spec_attention(params, attention_scratch_.data());
}

// sum_ = o(outputs of all heads).
void LlamaDecoder::project(const StepView& step, int index) {
  const Layer& layer = layers_[index];
  const InputForm form = form_of(*layer.o, step.num_rows);
  if (!writes_input_directly(layer)) {
    over_rows(step.num_rows, 1, [&](Range some) {
      for (std::int64_t r = some.begin; r < some.end; ++r) {
        convert_row(ops_, form, attention_.data() + r * attention_stride_ + read_heads_.begin,
                    read_heads_.count, input_.data() + r * input_bytes_);
      }
    });
  }
  layer.gate->expect(step.num_rows, layer.up.get());
  layer.o->run(input_rows(step.num_rows, form), sum_.data() + hidden_.begin, config_.hidden_size);
}

// input_ = norm(residual_ + [norm of] sum_).
void LlamaDecoder::enter_feed_forward(const StepView& step, int index) {
  const Layer& layer = layers_[index];
  const InputForm form = form_of(*layer.gate, step.num_rows);
  over_rows(step.num_rows, 4, [&](Range some) {
    add_sum(layer.attention_out_norm, some);
    norm_rows(residual_.data(), layer.ffn_norm, form, some);
  });
}

// act_ = act(gate(x)) * up(x) of `height` rows of input_. A piece is the same columns of all three:
// whole panels of 32, so whole blocks of a quantised row as well.
void LlamaDecoder::gate(const StepView& step, const Layer& layer, std::int64_t first,
                        std::int64_t height) {
  const InputForm form = form_of(*layer.down, step.num_rows);
  const bool silu = config_.activation == Activation::kSilu;
  const InputRows x =
      input_rows(step.num_rows, form_of(*layer.gate, step.num_rows)).part(first, height);
  const int parts = layer.gate->num_parts(height, 2);
  const std::int64_t stride = floats_of_odd_lines(layer.gate->most_columns(parts));
  const std::int64_t size = std::min(height, kOneRun) * stride;
  const std::int64_t needed = 2 * size * ThreadPool::global().size();
  if (static_cast<std::int64_t>(gated_.size()) < needed) gated_.allocate(needed);
  layer.down->expect(height);
  ThreadPool::global().run(parts, [&](int part, int rank) {
    float* gated = gated_.data() + 2 * rank * size;
    float* up = gated + size;
    const Range columns = layer.gate->columns_of(part, parts);
    const std::int64_t count = columns.end - columns.begin;
    for (std::int64_t from = 0, rows = 0; from < height; from += rows) {
      rows = height - from <= kOneRun ? height - from : kActivationRows;
      layer.gate->run_part(x.part(from, rows), gated, stride, part, parts);
      layer.up->run_part(x.part(from, rows), up, stride, part, parts);
      for (std::int64_t r = 0; count > 0 && r < rows; ++r) {
        activate_row(ops_, form, silu, gated + r * stride, up + r * stride, count,
                     act_.data() + (from + r) * act_bytes_ +
                         input_offset(form, ffn_.begin - read_ffn_.begin + columns.begin));
      }
    }
  });
}

// sum_ = down(act_) of these rows.
void LlamaDecoder::down(const StepView& step, const Layer& layer, std::int64_t first,
                        std::int64_t height) {
  const InputForm form = form_of(*layer.down, step.num_rows);
  if (form == InputForm::kE4M3) {
    over_rows(height, 1, [&](Range some) {
      for (std::int64_t r = some.begin; r < some.end; ++r) {
        round_row(ops_, form, read_ffn_.count, act_.data() + r * act_bytes_);
      }
    });
  }
  expect_layer(step, static_cast<int>(&layer - layers_.data()) + 1);
  layer.down->run({act_.data(), act_bytes_, height, form},
                  sum_.data() + first * config_.hidden_size + hidden_.begin, config_.hidden_size);
}

// residual_ += [norm of] sum_.
void LlamaDecoder::add_sum(const std::vector<float>& out_norm, Range rows) {
  const std::int64_t n = config_.hidden_size;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    float* sum = sum_.data() + r * n;
    if (!out_norm.empty()) {
      ops_.rms_norm_f32(sum, out_norm.data(), n, config_.rms_norm_eps, sum);
    }
    ops_.add(sum, n, residual_.data() + r * n);
  }
}

const StepView& LlamaDecoder::run_layers(const StepView& step) {
  over_rows(step.num_rows, 4, [&](Range some) { embed(step, some); });
  const StepView* left = &step;
  for (int index = 0; index < config_.num_layers; ++index) {
    append_kv(step, index);
    if (index + 1 == config_.num_layers) left = &leave_out_rows(step);
    const std::int64_t rows = left->num_rows;
    if (rows == 0) break;
    attend(*left, index);
    project(*left, index);
    enter_feed_forward(*left, index);
    for (std::int64_t first = 0; first < rows; first += ffn_rows_) {
      const std::int64_t height = std::min(ffn_rows_, rows - first);
      gate(*left, layers_[index], first, height);
      down(*left, layers_[index], first, height);
    }
  }
  over_rows(left->num_rows, 1, [&](Range some) {
    add_sum(layers_.back().ffn_out_norm, some);
    tap(config_.num_layers, some);
  });
  return *left;
}

// A tap of what leaves the last layer asks for all rows.
const StepView& LlamaDecoder::leave_out_rows(const StepView& step) {
  const bool tapped = std::find(taps_.begin(), taps_.end(), config_.num_layers) != taps_.end();
  if (tapped || !needed_.find(step)) return step;
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  const std::int64_t n = config_.hidden_size * kFloat;
  needed_.move_to_front(reinterpret_cast<std::byte*>(residual_.data()), n, n);
  needed_.move_to_front(reinterpret_cast<std::byte*>(qkv_.data()), qkv_stride_ * kFloat,
                        std::int64_t{num_heads_} * config_.head_dim * kFloat);
  return needed_.step();
}

// Copies the residual stream of these rows, as it enters the layer, for whoever asked for it.
void LlamaDecoder::tap(int layer, Range rows) {
  const std::int64_t n = config_.hidden_size, width = n * static_cast<std::int64_t>(taps_.size());
  for (std::size_t i = 0; i < taps_.size(); ++i) {
    if (taps_[i] != layer) continue;
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      std::memcpy(tapped_ + r * width + static_cast<std::int64_t>(i) * n, residual_.data() + r * n,
                  n * sizeof(float));
    }
  }
}

// input_[i] = final norm of row logit_rows[i]; what the head makes of it, as float32, to `hidden`
// if that is given. Of a quantised input that is the norm itself: it has the same blocks again.
void LlamaDecoder::gather_and_norm(const StepView& step, Range rows, float* hidden) {
  const std::int64_t n = config_.hidden_size;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    float* row = sum_.data() + i * n;
    std::memcpy(row, residual_.data() + step.logit_rows[i] * n, n * sizeof(float));
  }
  norm_rows(sum_.data(), final_norm_, form_of(*head_, step.num_logit_rows), rows);
  if (hidden == nullptr) return;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    if (head_->input_form() == InputForm::kBF16) {
      ops_.bf16_to_f32(as_bf16(input_.data() + i * input_bytes_), n, hidden + i * n);
    } else {
      ops_.rms_norm_f32(sum_.data() + i * n, final_norm_.data(), n, config_.rms_norm_eps,
                        hidden + i * n);
    }
  }
}

}  // namespace specdec::cpu
