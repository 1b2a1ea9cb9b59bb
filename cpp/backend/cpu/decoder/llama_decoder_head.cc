// LlamaDecoder: from the last layer to scores, and the head on its own.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "backend/cpu/attention/cpu_attention.h"
#include "backend/cpu/decoder/decoder_parts.h"
#include "backend/cpu/decoder/input_rows.h"
#include "backend/cpu/decoder/llama_decoder.h"
#include "base/check.h"
#include "base/thread_pool.h"

namespace specdec::cpu {

void LlamaDecoder::softcap_logits(float* logits, std::int64_t begin, std::int64_t end) const {
  const float cap = config_.final_softcap;
  for (std::int64_t i = begin; i < end; ++i) logits[i] = cap * std::tanh(logits[i] / cap);
}

void LlamaDecoder::run_head_best(const StepView& step, RowBest* best, int rank, int nranks) {
  ThreadPool& pool = ThreadPool::global();
  const std::int64_t rows = step.num_logit_rows, vocab = scores_.count;
  const auto first_id = static_cast<std::int32_t>(scores_.begin);
  if (config_.final_softcap == 0.0f) {
    head_->argmax_part(input_.data(), input_bytes_, rows, best_.data() + rank * rows, rank, nranks);
    pool.barrier();
    if (rank > 0) return;
    merge_best(best_.data(), nranks, rows, best);
    for (std::int64_t i = 0; i < rows; ++i) best[i].index += best[i].index >= 0 ? first_id : 0;
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
    const Share some = share(count, rank, nranks);
    for (std::int64_t row = some.begin; row < some.end; ++row) {
      const float* scores = head_scores_.data() + row * vocab;
      TokenId id = RowBest::kNaN;
      ArgmaxParams params;
      params.scores = scores;
      params.row_stride = vocab;
      params.rows = 1;
      params.vocab = static_cast<std::int32_t>(vocab);
      params.ids = &id;
      argmax_part(params, 0, 1);
      best[first + row] = {id < 0 ? 0.0f : scores[id], id < 0 ? id : id + first_id};
    }
    pool.barrier();
  }
}

void LlamaDecoder::run_head_scores(const StepView& step, float* logits, int rank, int nranks) {
  const std::int64_t rows = step.num_logit_rows, vocab = scores_.count;
  head_->run_part(input_.data(), input_bytes_, rows, logits, vocab, rank, nranks);
  if (config_.final_softcap == 0.0f) return;
  ThreadPool::global().barrier();
  const Share mine = share(rows * vocab, rank, nranks);
  softcap_logits(logits, mine.begin, mine.end);
}

void LlamaDecoder::forward_ids(const StepView& step, TokenId* ids, float* hidden) {
  prepare(step);
  best_rows_.resize(step.num_logit_rows);
  ThreadPool& pool = ThreadPool::global();
  pool.run([&](int rank) {
    run_layers(step, rank, pool.size());
    run_final_norm(step, hidden, rank, pool.size());
    run_head_best(step, best_rows_.data(), rank, pool.size());
  });
  for (std::int32_t i = 0; i < step.num_logit_rows; ++i) ids[i] = best_rows_[i].index;
}

void LlamaDecoder::forward_logits(const StepView& step, float* logits, float* hidden) {
  prepare(step);
  ThreadPool& pool = ThreadPool::global();
  pool.run([&](int rank) {
    run_layers(step, rank, pool.size());
    run_final_norm(step, hidden, rank, pool.size());
    run_head_scores(step, logits, rank, pool.size());
  });
}

// The head's input of the logit rows; a barrier behind.
void LlamaDecoder::run_final_norm(const StepView& step, float* hidden, int rank, int nranks) {
  const Share mine = share(step.num_logit_rows, rank, nranks);
  gather_and_norm(step, {mine.begin, mine.end}, hidden);
  ThreadPool::global().barrier();
}

void LlamaDecoder::unpack_head(TokenId id, float* out) const {
  id < head_->n() ? head_->unpack_row(id, out) : other_head_->unpack_row(id - head_->n(), out);
}

// Outside a step the head is asked for as a whole: rank 0 of several has it, the others do not.
void LlamaDecoder::require_head() const {
  SPECDEC_REQUIRE(head_ != nullptr, "head: missing; call set_embedding (tied) or set_head first");
  SPECDEC_REQUIRE(config_.shard_rank == 0, "head: rank ", config_.shard_rank,
                  " holds a part of it; ask rank 0");
}

void LlamaDecoder::score_rows(const float* hidden, std::int64_t rows, float* scores) {
  require_head();
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
    const void* x = direct ? static_cast<const void*>(hidden) : head_input_.data();
    const std::int64_t x_bytes = direct ? n * 4 : row_bytes;
    head_->run_part(x, x_bytes, rows, scores, vocab, rank, nranks);
    if (other_head_) {
      other_head_->run_part(x, x_bytes, rows, scores + head_->n(), vocab, rank, nranks);
    }
    if (config_.final_softcap == 0.0f) return;
    pool.barrier();
    const Share capped = share(rows * vocab, rank, nranks);
    softcap_logits(scores, capped.begin, capped.end);
  });
}

void LlamaDecoder::unpack_head_rows(const TokenId* ids, std::int64_t n, float* out) const {
  require_head();
  for (std::int64_t i = 0; i < n; ++i) {
    SPECDEC_REQUIRE(ids[i] >= 0 && ids[i] < config_.head_size, "ids[", i, "] = ", ids[i],
                    ": rows of the head are 0..", config_.head_size - 1);
    unpack_head(ids[i], out + i * config_.hidden_size);
  }
}

}  // namespace specdec::cpu
