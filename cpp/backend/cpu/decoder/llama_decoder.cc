// LlamaDecoder: one step.
//
// Between two barriers every rank works on its share of rows, of (row, head) pairs, or of the
// columns of a linear layer. `ranks` run in lockstep through the same list of phases.
#include "backend/cpu/decoder/llama_decoder.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "backend/cpu/attention/cpu_attention.h"
#include "backend/cpu/decoder/input_rows.h"
#include "backend/step_check.h"
#include "base/check.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

// Rows of scores kept at a time when the greedy id has to be taken behind a soft cap.
constexpr std::int64_t kCappedRows = 16;
constexpr std::int64_t kCacheLineBytes = 64;

std::uint16_t* as_bf16(std::byte* p) { return reinterpret_cast<std::uint16_t*>(p); }
float* as_f32(std::byte* p) { return reinterpret_cast<float*>(p); }
struct Share {
  std::int64_t begin, end;
};
Share share(std::int64_t n, int rank, int nranks) {
  return {n * rank / nranks, n * (rank + 1) / nranks};
}

}  // namespace

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
  const int nranks = ThreadPool::global().size();
  const std::size_t needed = spec_attention_scratch_bytes(
      max_keys, config_.num_heads, config_.num_kv_heads, config_.head_dim, nranks);
  if (attention_scratch_.size() < needed) attention_scratch_.resize(needed + needed / 2);
  const std::size_t best = static_cast<std::size_t>(nranks) * step.num_logit_rows;
  if (best_.size() < best) best_.resize(best);
  if (config_.final_softcap > 0.0f && head_scores_.empty()) {
    head_scores_.resize(kCappedRows * config_.head_size);
  }
}

void LlamaDecoder::embed(const StepView& step, Rows rows) {
  const std::int64_t n = config_.hidden_size;
  const float scale = config_.embedding_scale;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    float* out = residual_.data() + r * n;
    table().unpack_row(step.tokens[r], out);
    if (scale != 1.0f) {
      for (std::int64_t i = 0; i < n; ++i) out[i] *= scale;
    }
  }
}

void LlamaDecoder::embedding_rows(const TokenId* tokens, std::int64_t count, float* out) const {
  SPECDEC_REQUIRE(config_.tie_word_embeddings ? head_ != nullptr : table_ != nullptr,
                  "embed_tokens.weight: missing; call set_embedding first");
  for (std::int64_t i = 0; i < count; ++i) {
    SPECDEC_REQUIRE(tokens[i] >= 0 && tokens[i] < config_.vocab_size, "tokens[", i,
                    "] = ", tokens[i], ": the vocabulary is 0..", config_.vocab_size - 1);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    table().unpack_row(tokens[i], out + i * config_.hidden_size);
  }
}

// input_[r] = norm(x[r]) in the form that the next linear layer takes.
void LlamaDecoder::norm_rows(const float* x, const std::vector<float>& weight, InputForm form,
                             Rows rows) {
  const std::int64_t n = config_.hidden_size;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    norm_row(ops_, form, x + r * n, weight.data(), n, config_.rms_norm_eps,
             input_.data() + r * input_bytes_);
  }
}

// Items [begin, end) of R x (H + G): the query heads and key heads of every row.
void LlamaDecoder::qk_norm_and_rope(const StepView& step, const Layer& layer, const RopeTable* rope,
                                    std::int64_t begin, std::int64_t end) {
  const std::int64_t heads = config_.num_heads + config_.num_kv_heads;
  const std::int64_t width = layer.qkv->n();
  for (std::int64_t item = begin; item < end; ++item) {
    const std::int64_t row = item / heads, head = item % heads;
    // q and k lie one behind the other, so key heads simply continue the query heads.
    float* x = qkv_.data() + row * width + head * config_.head_dim;
    if (config_.has_qk_norm) {
      const std::vector<float>& weight = head < config_.num_heads ? layer.q_norm : layer.k_norm;
      ops_.rms_norm_f32(x, weight.data(), config_.head_dim, config_.rms_norm_eps, x);
    }
    if (rope != nullptr) {
      const std::int64_t offset = std::int64_t{step.positions[row]} * rope->half;
      ops_.rope(rope->cos.data() + offset, rope->sin.data() + offset, rope->half, x);
    }
  }
}

// From qkv_ to the input of the output projection; barriers inside, none behind.
void LlamaDecoder::attention(const StepView& step, int index, int rank, int nranks) {
  ThreadPool& pool = ThreadPool::global();
  const Layer& layer = layers_[index];
  const std::int64_t width = layer.qkv->n();
  const std::int64_t q_width = std::int64_t{config_.num_heads} * config_.head_dim;
  const std::int64_t kv_width = std::int64_t{config_.num_kv_heads} * config_.head_dim;
  const RopeTable* rope =
      config_.rope_index[index] < 0 ? nullptr : &ropes_[config_.rope_index[index]];
  if (rope != nullptr || config_.has_qk_norm) {
    const std::int64_t items =
        std::int64_t{step.num_rows} * (config_.num_heads + config_.num_kv_heads);
    const Share mine = share(items, rank, nranks);
    qk_norm_and_rope(step, layer, rope, mine.begin, mine.end);
    pool.barrier();
  }
  AppendKvParams append;
  append.step = step;
  append.cache = cache_;
  append.layer = index;
  append.k = qkv_.data() + q_width;
  append.v = qkv_.data() + q_width + kv_width;
  append.k_row_stride = append.v_row_stride = width;
  append.dtype = DType::kF32;
  append_kv_part(append, rank, nranks);
  pool.barrier();

  SpecAttentionParams params;
  params.step = step;
  params.cache = cache_;
  params.layer = index;
  params.q = qkv_.data();
  params.q_row_stride = width;
  params.num_heads = config_.num_heads;
  params.dtype = DType::kF32;
  params.scale = config_.attention_scale;
  params.sliding_window = config_.sliding_window[index];
  params.softcap = config_.attention_softcap;
  const InputForm form = layer.o->input_form();
  const bool direct = form == InputForm::kF32;
  params.out = direct ? as_f32(input_.data()) : attention_.data();
  params.out_row_stride = direct ? input_bytes_ / 4 : attention_stride_;
  spec_attention_part(params, attention_scratch_.data(), rank, nranks);
  if (direct) return;
  pool.barrier();
  const Share mine = share(step.num_rows, rank, nranks);
  for (std::int64_t r = mine.begin; r < mine.end; ++r) {
    convert_row(ops_, form, attention_.data() + r * attention_stride_, q_width,
                input_.data() + r * input_bytes_);
  }
}

// sum_ = down(act(gate(input_)) * up(input_)); barriers inside, none behind. A rank applies the
// activation to the columns of gate and up that it has computed itself.
void LlamaDecoder::feed_forward(const Layer& layer, std::int64_t rows, int rank, int nranks) {
  ThreadPool& pool = ThreadPool::global();
  const std::int64_t n = config_.intermediate_size;
  const InputForm form = layer.down->input_form();
  // Whole panels of 32 columns, so whole blocks of a quantised row as well.
  const PackedLinear::Columns columns = layer.gate->columns_of(rank, nranks);
  const std::int64_t count = columns.end - columns.begin;
  const bool silu = config_.activation == Activation::kSilu;
  for (std::int64_t first = 0; first < rows; first += ffn_rows_) {
    const std::int64_t height = std::min(ffn_rows_, rows - first);
    const std::byte* x = input_.data() + first * input_bytes_;
    if (first > 0) pool.barrier();  // act_ is still being read by the piece before
    layer.gate->run_part(x, input_bytes_, height, gate_.data(), n, rank, nranks);
    layer.up->run_part(x, input_bytes_, height, up_.data(), n, rank, nranks);
    for (std::int64_t r = 0; count > 0 && r < height; ++r) {
      const float* gate = gate_.data() + r * n + columns.begin;
      const float* up = up_.data() + r * n + columns.begin;
      activate_row(ops_, form, silu, gate, up, count,
                   act_.data() + r * act_bytes_ + input_row_bytes(form, columns.begin));
    }
    pool.barrier();
    layer.down->run_part(act_.data(), act_bytes_, height, sum_.data() + first * config_.hidden_size,
                         config_.hidden_size, rank, nranks);
  }
}

// residual_ += [norm of] sum_.
void LlamaDecoder::add_sum(const std::vector<float>& out_norm, Rows rows) {
  const std::int64_t n = config_.hidden_size;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    float* sum = sum_.data() + r * n;
    if (!out_norm.empty()) {
      ops_.rms_norm_f32(sum, out_norm.data(), n, config_.rms_norm_eps, sum);
    }
    ops_.add(sum, n, residual_.data() + r * n);
  }
}

void LlamaDecoder::run_layers(const StepView& step, int rank, int nranks) {
  ThreadPool& pool = ThreadPool::global();
  const std::int64_t rows = step.num_rows;
  const Share mine = share(rows, rank, nranks);
  const Rows my_rows{mine.begin, mine.end};
  embed(step, my_rows);
  for (int index = 0; index < config_.num_layers; ++index) {
    const Layer& layer = layers_[index];
    norm_rows(residual_.data(), layer.attention_norm, layer.qkv->input_form(), my_rows);
    pool.barrier();
    layer.qkv->run_part(input_.data(), input_bytes_, rows, qkv_.data(), layer.qkv->n(), rank,
                        nranks);
    pool.barrier();
    attention(step, index, rank, nranks);
    pool.barrier();
    layer.o->run_part(input_.data(), input_bytes_, rows, sum_.data(), config_.hidden_size, rank,
                      nranks);
    pool.barrier();
    add_sum(layer.attention_out_norm, my_rows);
    norm_rows(residual_.data(), layer.ffn_norm, layer.gate->input_form(), my_rows);
    pool.barrier();
    feed_forward(layer, rows, rank, nranks);
    pool.barrier();
    add_sum(layer.ffn_out_norm, my_rows);
  }
  pool.barrier();
}

// input_[i] = final norm of row logit_rows[i]; what the head makes of it, as float32, to `hidden`
// if that is given. Of a quantised input that is the norm itself: it has the same blocks again.
void LlamaDecoder::gather_and_norm(const StepView& step, Rows rows, float* hidden) {
  const std::int64_t n = config_.hidden_size;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    float* row = sum_.data() + i * n;
    std::memcpy(row, residual_.data() + step.logit_rows[i] * n, n * sizeof(float));
  }
  const InputForm form = head_->input_form();
  norm_rows(sum_.data(), final_norm_, form, rows);
  if (hidden == nullptr) return;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    if (form == InputForm::kBF16) {
      ops_.bf16_to_f32(as_bf16(input_.data() + i * input_bytes_), n, hidden + i * n);
    } else {
      ops_.rms_norm_f32(sum_.data() + i * n, final_norm_.data(), n, config_.rms_norm_eps,
                        hidden + i * n);
    }
  }
}

void LlamaDecoder::softcap_logits(float* logits, std::int64_t begin, std::int64_t end) const {
  const float cap = config_.final_softcap;
  for (std::int64_t i = begin; i < end; ++i) logits[i] = cap * std::tanh(logits[i] / cap);
}

void LlamaDecoder::run_head_ids(const StepView& step, TokenId* ids, int rank, int nranks) {
  ThreadPool& pool = ThreadPool::global();
  const std::int64_t rows = step.num_logit_rows, vocab = config_.head_size;
  if (config_.final_softcap == 0.0f) {
    head_->argmax_part(input_.data(), input_bytes_, rows, best_.data() + rank * rows, rank, nranks);
    pool.barrier();
    if (rank == 0) merge_argmax(best_.data(), nranks, rows, ids);
    return;
  }
  // The cap rounds large scores together: the first of those ties is the answer, so cap, then look.
  for (std::int64_t first = 0; first < rows; first += kCappedRows) {
    const std::int64_t count = std::min(kCappedRows, rows - first);
    head_->run_part(input_.data() + first * input_bytes_, input_bytes_, count, head_scores_.data(),
                    vocab, rank, nranks);
    pool.barrier();
    const Share mine = share(count * vocab, rank, nranks);
    softcap_logits(head_scores_.data(), mine.begin, mine.end);
    pool.barrier();
    ArgmaxParams params;
    params.scores = head_scores_.data();
    params.row_stride = vocab;
    params.rows = static_cast<std::int32_t>(count);
    params.vocab = static_cast<std::int32_t>(vocab);
    params.ids = ids + first;
    argmax_part(params, rank, nranks);
    pool.barrier();
  }
}

void LlamaDecoder::forward_ids(const StepView& step, TokenId* ids, float* hidden) {
  prepare(step);
  ThreadPool& pool = ThreadPool::global();
  pool.run([&](int rank) {
    const int nranks = pool.size();
    run_layers(step, rank, nranks);
    const Share mine = share(step.num_logit_rows, rank, nranks);
    gather_and_norm(step, {mine.begin, mine.end}, hidden);
    pool.barrier();
    run_head_ids(step, ids, rank, nranks);
  });
}

void LlamaDecoder::forward_logits(const StepView& step, float* logits, float* hidden) {
  prepare(step);
  ThreadPool& pool = ThreadPool::global();
  pool.run([&](int rank) {
    const int nranks = pool.size();
    run_layers(step, rank, nranks);
    const std::int64_t rows = step.num_logit_rows, vocab = config_.head_size;
    const Share mine = share(rows, rank, nranks);
    gather_and_norm(step, {mine.begin, mine.end}, hidden);
    pool.barrier();
    head_->run_part(input_.data(), input_bytes_, rows, logits, vocab, rank, nranks);
    if (config_.final_softcap == 0.0f) return;
    pool.barrier();
    const Share scores = share(rows * vocab, rank, nranks);
    softcap_logits(logits, scores.begin, scores.end);
  });
}

void LlamaDecoder::score_rows(const float* hidden, std::int64_t rows, float* scores) {
  SPECDEC_REQUIRE(head_ != nullptr, "head: missing; call set_embedding (tied) or set_head first");
  const std::int64_t n = config_.hidden_size, vocab = config_.head_size;
  const InputForm form = head_->input_form();
  const std::int64_t row_bytes = input_row_bytes(form, n) + kCacheLineBytes;
  const bool direct = form == InputForm::kF32;
  // New bytes are zero, and the pad of an odd row is never written.
  const auto needed = static_cast<std::size_t>(rows * row_bytes);
  if (!direct && head_input_.size() < needed) head_input_.resize(needed);
  ThreadPool& pool = ThreadPool::global();
  pool.run([&](int rank) {
    const int nranks = pool.size();
    if (!direct) {
      const Share mine = share(rows, rank, nranks);
      for (std::int64_t r = mine.begin; r < mine.end; ++r) {
        convert_row(ops_, form, hidden + r * n, n, head_input_.data() + r * row_bytes);
      }
      pool.barrier();
    }
    head_->run_part(direct ? static_cast<const void*>(hidden) : head_input_.data(),
                    direct ? n * 4 : row_bytes, rows, scores, vocab, rank, nranks);
    if (config_.final_softcap == 0.0f) return;
    pool.barrier();
    const Share capped = share(rows * vocab, rank, nranks);
    softcap_logits(scores, capped.begin, capped.end);
  });
}

void LlamaDecoder::unpack_head_rows(const TokenId* ids, std::int64_t n, float* out) const {
  SPECDEC_REQUIRE(head_ != nullptr, "head: missing; call set_embedding (tied) or set_head first");
  for (std::int64_t i = 0; i < n; ++i) {
    SPECDEC_REQUIRE(ids[i] >= 0 && ids[i] < config_.head_size, "ids[", i, "] = ", ids[i],
                    ": rows of the head are 0..", config_.head_size - 1);
    head_->unpack_row(ids[i], out + i * config_.hidden_size);
  }
}

}  // namespace specdec::cpu
