// A decoder of the Llama shape: Llama, Vicuna, Mistral, Qwen2, Qwen3, SmolLM3, Gemma 2, Gemma 3
// text. One call runs all rows of a step, phase by phase; the threads of ThreadPool::global() deal
// out each phase among themselves.
//
// The residual stream, norms, attention and activations are float32 for every weight type; the
// input of a linear layer is rounded to bf16 for bf16 weights, and to 8 bits in blocks of 32 for
// weights in a block format. Every row is computed by the same code whatever else is in the step,
// so its bits depend on its own path alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/decoder/head_screen.h"
#include "backend/cpu/decoder/needed_rows.h"
#include "backend/cpu/decoder/row_ops.h"
#include "backend/cpu/linear/packed_linear.h"
#include "backend/cpu/linear/stacked_linear.h"
#include "backend/step_view.h"
#include "base/tensor_view.h"
#include "base/thread_pool.h"
#include "base/zeroed_memory.h"

namespace specdec::cpu {

enum class Activation { kSilu, kGeluTanh };

// Fields as in the model's config.json; lists have one entry per layer.
struct DecoderConfig {
  int vocab_size = 0, hidden_size = 0, intermediate_size = 0;
  int num_layers = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0;
  int head_size = 0;     // rows of the head, columns of the scores; 0: vocab_size
  int max_rows = 0;      // rows of the largest step; sizes the buffers
  int max_position = 0;  // positions 0..max_position-1
  float rms_norm_eps = 1e-6f;
  Activation activation = Activation::kSilu;
  float attention_scale = 1.0f;
  float attention_softcap = 0.0f;  // 0: none
  float final_softcap = 0.0f;      // 0: none
  float embedding_scale = 1.0f;
  float norm_offset = 0.0f;         // added to every norm weight: 1 for Gemma
  bool has_qk_norm = false;         // RMSNorm over each head of q and k, before the rotation
  bool has_sandwich_norms = false;  // norms behind attention and FFN too (Gemma)
  bool tie_word_embeddings = false;
  std::vector<int> rope_index;      // rotary table of each layer, -1: none
  std::vector<int> sliding_window;  // tokens, 0: none
  int sink_tokens = 0;  // layers with a window see that many tokens of a text's start, too
  // Tensor parallel: rank r of several decoders computes the output rows [bounds[r], bounds[r + 1])
  // of every projection. Empty: this decoder computes all of them.
  int shard_rank = 0;
  std::vector<int> kv_head_bounds;  // key heads, with the query heads that read them
  std::vector<int> hidden_bounds;   // columns of the output and the down projection
  std::vector<int> ffn_bounds;      // columns of gate and up, whole panels
  std::vector<int> head_bounds;     // rows of the head
  // The output and the down projection are split by input columns instead: each rank multiplies
  // what it has computed itself, and the ranks' sums are added up, rank by rank. Half as many
  // exchanges; the last bits are not those of one rank.
  bool adds_partial_sums = false;
  // Passes of many rows take PackedLinear::fast_form and attention that is not exact: their bits
  // depend on how many rows there are. Not for one of several ranks.
  bool has_fast_forms = false;
};

// `size` zeros that take memory as they are first touched.
template <typename T>
class LazyBuffer {
 public:
  void allocate(std::int64_t size) {
    size_ = static_cast<std::size_t>(size);
    memory_ = std::make_unique<ZeroedMemory>(size_ * sizeof(T));
  }
  T* data() { return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_->data()); }
  const T* data() const {
    return memory_ == nullptr ? nullptr : reinterpret_cast<const T*>(memory_->data());
  }
  std::size_t size() const { return size_; }

 private:
  std::unique_ptr<ZeroedMemory> memory_;
  std::size_t size_ = 0;
};

// A tensor of a layer by its name in the checkpoint, without "model.layers.<i>.".
struct NamedTensor {
  std::string name;
  WeightView weight;
};

// A weight of a decoder as it keeps it: a pack, or, with k = 0, n floats.
struct PackedPiece {
  std::string name;
  PackedView view;
};

class LlamaDecoder {
 public:
  // Errors here and in the set_ functions: std::invalid_argument naming field or tensor.
  explicit LlamaDecoder(DecoderConfig config);
  ~LlamaDecoder();
  LlamaDecoder(const LlamaDecoder&) = delete;
  LlamaDecoder& operator=(const LlamaDecoder&) = delete;

  // Weights are copied; the caller may drop its tensors at once.
  void set_embedding(const WeightView& weight);  // [V, hidden]; with tied embeddings the head too
  void set_head(const WeightView& weight);       // [head_size, hidden]
  void set_final_norm(const TensorView& weight);
  // cos, sin: float32 [max_position, rotary_dim / 2]; rotary_dim <= head_dim, "rotate_half" layout.
  void set_rope(int index, const TensorView& cos, const TensorView& sin);
  // All tensors of a layer at once; an unknown, missing or misshapen one is an error.
  void set_layer(int layer, const std::vector<NamedTensor>& tensors);

  // What the setters above but set_rope have made, by name, for as long as the decoder lives.
  // Biases are pieces of their own.
  std::vector<PackedPiece> packs() const;
  // In the place of those setters: packs are used where they lie, vectors are copied.
  void set_packs(const std::vector<PackedPiece>& pieces);

  // k_pages, v_pages [layers, P, G, S, kv_row_width], contiguous, outliving this object or the next
  // bind. k_scales, v_scales: of e4m3 pages, float32 [layers, G], contiguous, copied; null: 1.
  void bind_cache(const TensorView& k_pages, const TensorView& v_pages,
                  const TensorView* k_scales = nullptr, const TensorView* v_scales = nullptr);

  // From now on a step leaves the residual stream of its rows, as it enters each of these layers
  // (num_layers: as it leaves the last one), in rows [max_rows, layers.size() * hidden] of the
  // caller's, which outlive this object or the next call. No layers: nothing is left. A shard of
  // several has none.
  void set_taps(std::vector<int> layers, float* rows);

  // Runs the rows of the step and appends their K/V. For the logit rows of the step, writes either
  // the scores [L, V] or the greedy ids [L] (first on ties, -1 for a row with a NaN). One call at a
  // time per object.
  // `hidden`, if given: the head's input of each logit row [L, hidden].
  // best: null, or [num_logit_rows]; receives what forward_ids() would.
  void forward_logits(const StepView& step, float* logits, float* hidden = nullptr,
                      TokenId* best = nullptr);
  void forward_ids(const StepView& step, TokenId* ids, float* hidden = nullptr);

  // A step of a shard, part by part: before each one but the first the ranks' chunks are gathered.
  // Every rank's chunk has chunk_bytes(part) bytes, rank after rank in `gathered`. `embedded`, if
  // given: what embedded_rows() of rank 0 has; the other ranks hold no embeddings.
  // K/V that another rank has moved among its pages, from and to as page * page size + place: [n,
  // 2].
  void move_kv(const std::int32_t* pairs, std::int64_t n);
  int num_ranks() const {
    return is_shard() ? static_cast<int>(config_.kv_head_bounds.size()) - 1 : 1;
  }
  std::int64_t num_own_scores() const { return scores_.count; }
  int num_parts() const { return config_.num_layers * parts_of_layer(); }
  void begin_parts(const StepView& step, const float* embedded = nullptr);
  const float* embedded_rows() const;  // [R, hidden], right behind begin_parts()
  std::int64_t chunk_bytes(int part, std::int64_t rows);
  void run_part(const StepView& step, int part, const std::byte* gathered, std::byte* chunk);
  // Behind the last part: this rank's columns of the scores [L, its rows of the head], or the best
  // of them with their ids in the whole head [L].
  void finish_logits(const StepView& step, const std::byte* gathered, float* logits, float* hidden);
  void finish_best(const StepView& step, const std::byte* gathered, RowBest* best, float* hidden);

  // Rows of the input embedding table as stored, without embedding_scale: out [count, hidden].
  void embedding_rows(const TokenId* tokens, std::int64_t count, float* out) const;

  // scores[rows, V] of head inputs hidden[rows, hidden], with the soft cap: for rows that
  // forward_* has given, the same bits as its scores. Needs the head alone.
  void score_rows(const float* hidden, std::int64_t rows, float* scores);
  // out[n, hidden] = rows ids[n] of the head's weight.
  void unpack_head_rows(const TokenId* ids, std::int64_t n, float* out) const;

  const DecoderConfig& config() const { return config_; }
  // Bytes of packed weights a step reads, without an embedding table that is not the head.
  std::size_t weight_bytes() const;
  // Reads what a greedy step reads of them (of a head that has a screen, the screen) and does
  // nothing else, in the same order: its floor. Returns a checksum.
  std::uint64_t read_weights() const;
  // Whether linear layers of many rows differ: config().has_fast_forms and a weight that has one.
  bool has_fast_forms() const;
  // Bytes of the buffers between the layers.
  std::size_t buffer_bytes() const;

 private:
  struct Layer {
    std::unique_ptr<StackedLinear> qkv;
    std::unique_ptr<PackedLinear> o, gate, up, down;
    std::vector<float> attention_norm, ffn_norm;          // in front
    std::vector<float> attention_out_norm, ffn_out_norm;  // behind; sandwich norms only
    std::vector<float> q_norm, k_norm;
    bool defined() const { return qkv != nullptr; }
  };
  struct RopeTable {
    std::vector<float> cos, sin;
    int half = 0;
  };
  // The parts of a layer that end with an output which the next part reads as a whole.
  enum Part { kAttend, kProject, kGate, kDown, kPartsOfLayer };
  // Columns of an output that this decoder computes.
  struct Columns {
    std::int64_t begin, count;
  };
  // What the ranks exchange behind a part: each one's bytes of a row, and where rows lie here.
  struct Exchange {
    std::vector<std::int64_t> offsets;  // [ranks + 1]
    std::byte* base;
    std::int64_t row_bytes;
  };

  // Calls visit(matrix) for every matrix that a step reads and that is there, in its order. Of a
  // head, rank 0 reads its own rows.
  template <typename Visit>
  void each_matrix(Visit&& visit) const {
    for (const Layer& layer : layers_) {
      if (layer.defined()) {
        for (const PackedLinear& part : layer.qkv->parts()) visit(part);
      }
      for (const auto* matrix : {&layer.o, &layer.gate, &layer.up, &layer.down}) {
        if (*matrix) visit(**matrix);
      }
    }
    if (head_) visit(*head_);
  }
  std::vector<float> norm_weight(const TensorView& weight, const std::string& name, int size) const;
  bool is_shard() const { return !config_.kv_head_bounds.empty(); }
  // Where partial sums are added up, attention goes on into its projection, and gate into down.
  int parts_of_layer() const { return config_.adds_partial_sums ? 2 : kPartsOfLayer; }
  void take_shard();
  void check_complete() const;
  void allocate_buffers();
  // The matrix of the head; rank 0 of several keeps the other ranks' rows too, for those who ask
  // for the whole of it outside a step.
  void pack_head(const WeightView& weight);
  void require_head() const;
  // The form of `linear`'s input in a pass of so many rows, and these rows of input_.
  template <typename Linear>
  InputForm form_of(const Linear& linear, std::int64_t rows) const {
    return config_.has_fast_forms ? linear.fast_form(rows) : linear.input_form();
  }
  InputRows input_rows(std::int64_t rows, InputForm form) const {
    return {input_.data(), input_bytes_, rows, form};
  }
  // Attention may write what the output projection reads, where nothing has to be converted or
  // gathered in between.
  bool writes_input_directly(const Layer& layer) const {
    return layer.o->input_form() == InputForm::kF32 && !is_shard();
  }
  void check_step(const StepView& step) const;
  void prepare(const StepView& step);

  // Calls body(range of rows) in pieces; a row takes about `passes` passes over its hidden state,
  // of eight elements in a nanosecond.
  template <typename F>
  void over_rows(std::int64_t rows, int passes, F&& body) const {
    ThreadPool::global().run_items(rows, std::int64_t{config_.hidden_size} * passes / 8,
                                   [&](Range some, int) { body(some); });
  }
  void embed(const StepView& step, Range rows);
  void unpack_embedding(TokenId token, float* out) const;
  void unpack_head(TokenId id, float* out) const;
  void norm_rows(const float* x, const std::vector<float>& weight, InputForm form, Range rows);
  void qk_norm_and_rope(const StepView& step, const Layer& layer, const RopeTable* rope,
                        Range rows);
  // From now on threads that wait fetch what comes first in this layer. Behind the last layer that
  // is the head.
  void expect_layer(const StepView& step, int layer) const;
  // The scales of a layer's e4m3 pages, if it has some.
  template <typename Params>
  void take_scales(int layer, Params& params) const {
    if (k_scales_.empty()) return;
    params.k_scale = k_scales_.data() + std::int64_t{layer} * num_kv_heads_;
    params.v_scale = v_scales_.data() + std::int64_t{layer} * num_kv_heads_;
    params.scale_stride = 1;
  }
  void append_kv(const StepView& step, int layer);
  void attend(const StepView& step, int layer);
  void project(const StepView& step, int layer);
  void enter_feed_forward(const StepView& step, int layer);
  void gate(const StepView& step, const Layer& layer, std::int64_t first, std::int64_t height);
  void down(const StepView& step, const Layer& layer, std::int64_t first, std::int64_t height);
  void add_sum(const std::vector<float>& out_norm, Range rows);
  void tap(int layer, Range rows);
  // Returns the step of the rows that are left in the residual stream: those that scores depend on
  // or all, with logit_rows to match.
  const StepView& run_layers(const StepView& step);
  const StepView& leave_out_rows(const StepView& step);
  void run_final_norm(const StepView& step, float* hidden);
  void gather_and_norm(const StepView& step, Range rows, float* hidden);
  void run_head_scores(const StepView& step, float* logits, RowBest* best = nullptr);
  void run_head_best(const StepView& step, RowBest* best);
  bool find_best_by_screen(const InputRows& x, RowBest* best);
  void softcap_logits(float* logits, std::int64_t n) const;
  Exchange exchange_of(int part);
  void run_whole_part(const StepView& step, int part);
  void add_partial_sums(const std::byte* gathered, std::int64_t rows);
  void take_chunks(int part, const std::byte* gathered, std::int64_t rows);
  void give_chunk(int part, std::int64_t rows, std::byte* chunk);
  void end_layers(const StepView& step, const std::byte* gathered, float* hidden);

  DecoderConfig config_;
  std::vector<Layer> layers_;
  std::vector<RopeTable> ropes_;
  std::vector<float> final_norm_;
  std::unique_ptr<PackedLinear> head_;
  std::unique_ptr<PackedLinear> other_head_;  // rank 0 of several: the rows behind its own
  std::unique_ptr<HeadScreen> screen_;        // of head_, once a greedy step has had use for it
  bool has_screen_ = true;                    // false: there was no memory for it
  std::unique_ptr<PackedLinear> table_;       // the embeddings, where they are not the head
  const RowOps& ops_;
  KvCacheView cache_;
  NeededRows needed_;      // in the last layer
  std::vector<int> taps_;  // layers whose input is kept
  float* tapped_ = nullptr;
  // This decoder's share of each output, all of it unless it is a shard.
  int num_heads_ = 0, num_kv_heads_ = 0, first_head_ = 0;
  Columns hidden_{}, ffn_{}, scores_{};
  // What the output and the down projection read of the rows of heads and of gate.
  Columns read_heads_{}, read_ffn_{};
  std::vector<float> k_scales_, v_scales_;  // [layers, G], or empty

  // Buffers of a step; all rows. Rows are an odd number of cache lines apart (decoder_parts.h).
  bool buffers_ready_ = false;
  std::int64_t ffn_rows_ = 0;     // rows of the FFN buffers; more are done in pieces
  std::int64_t input_bytes_ = 0;  // from row to row of input_
  std::int64_t act_bytes_ = 0;    // and of act_
  std::int64_t attention_stride_ = 0, qkv_stride_ = 0;  // elements
  // Zeros at first (the pad element that an odd width needs is never written), and no memory until
  // a step has so many rows.
  LazyBuffer<float> residual_, qkv_, attention_, sum_;
  LazyBuffer<float> gated_;            // [threads, gate and up, rows of a run, columns of a part]
  LazyBuffer<std::byte> input_, act_;  // inputs of linear layers, in the form that they take
  std::vector<std::byte> attention_scratch_;  // for prepared_ranks_ threads
  int prepared_ranks_ = 0;
  std::vector<RowBest> best_;          // [parts of the head, L]
  std::vector<RowBest> best_rows_;     // [L]
  std::vector<float> head_scores_;     // final_softcap only: scores of a few rows
  std::vector<std::byte> head_input_;  // score_rows only: its rows as the head takes them
};

}  // namespace specdec::cpu
