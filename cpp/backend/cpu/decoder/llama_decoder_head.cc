// LlamaDecoder: from the last layer to scores, and the head on its own.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>

#include "backend/cpu/attention/attention_kernels.h"
#include "backend/cpu/attention/cpu_attention.h"
#include "backend/cpu/decoder/decoder_parts.h"
#include "backend/cpu/decoder/input_rows.h"
#include "backend/cpu/decoder/llama_decoder.h"
#include "base/check.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

constexpr std::int64_t kTanhNs = 8;

void cap_scores(float cap, float* scores, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) scores[i] = cap * std::tanh(scores[i] / cap);
}

}  // namespace

void LlamaDecoder::softcap_logits(float* logits, std::int64_t n) const {
  ThreadPool::global().run_items(n, kTanhNs, [&](Range some, int) {
    cap_scores(config_.final_softcap, logits + some.begin, some.end - some.begin);
  });
}

// The screen is made when it is first of use: sampled steps need all scores and never ask for it.
bool LlamaDecoder::find_best_by_screen(const InputRows& x, RowBest* best) {
  if (!has_screen_ || !HeadScreen::serves(*head_)) return false;
  if (screen_ == nullptr) {
    try {
      screen_ = std::make_unique<HeadScreen>(*head_);
    } catch (const std::bad_alloc&) {  // a copy is no more than faster
      has_screen_ = false;
      return false;
    }
  }
  return screen_->find(x, best);
}

void LlamaDecoder::run_head_best(const StepView& step, RowBest* best) {
  const std::int64_t rows = step.num_logit_rows, vocab = scores_.count;
  const InputRows input = input_rows(rows, form_of(*head_, rows));
  const auto first_id = static_cast<std::int32_t>(scores_.begin);
  if (config_.final_softcap == 0.0f) {
    if (!find_best_by_screen(input, best)) {
      const int parts = head_->num_parts(rows);
      const auto needed = static_cast<std::size_t>(parts * rows);
      if (best_.size() < needed) best_.resize(needed);
      ThreadPool::global().run(parts, [&](int part, int) {
        head_->argmax_part(input, best_.data() + part * rows, part, parts);
      });
      merge_best(best_.data(), parts, rows, best);
    }
    for (std::int64_t i = 0; i < rows; ++i) best[i].index += best[i].index >= 0 ? first_id : 0;
    return;
  }
  // The cap rounds large scores together: the first of those ties is the answer, so cap, then look.
  for (std::int64_t first = 0; first < rows; first += kCappedRows) {
    const std::int64_t count = std::min(kCappedRows, rows - first);
    head_->run(input.part(first, count), head_scores_.data(), vocab);
    softcap_logits(head_scores_.data(), count * vocab);
    TokenId ids[kCappedRows];
    ArgmaxParams params;
    params.scores = head_scores_.data();
    params.row_stride = vocab;
    params.rows = static_cast<std::int32_t>(count);
    params.vocab = static_cast<std::int32_t>(vocab);
    params.ids = ids;
    argmax(params);
    for (std::int64_t row = 0; row < count; ++row) {
      const TokenId id = ids[row];
      best[first + row] = {id < 0 ? 0.0f : head_scores_[row * vocab + id],
                           id < 0 ? RowBest::kNaN : id + first_id};
    }
  }
}

// best: as run_head_best() has it. A part's scores are looked at while they are near.
void LlamaDecoder::run_head_scores(const StepView& step, float* logits, RowBest* best) {
  const std::int64_t rows = step.num_logit_rows, vocab = scores_.count;
  const InputRows input = input_rows(rows, form_of(*head_, rows));
  const int parts = head_->num_parts(rows);
  if (best != nullptr) best_.resize(std::max(best_.size(), static_cast<std::size_t>(parts * rows)));
  const auto find_best = attention_kernels().argmax;
  const float cap = config_.final_softcap;
  ThreadPool::global().run(parts, [&](int part, int) {
    const Range columns = head_->columns_of(part, parts);
    float* scores = logits + columns.begin;
    head_->run_part(input, scores, vocab, part, parts);
    const auto width = static_cast<std::int32_t>(columns.end - columns.begin);
    for (std::int64_t row = 0; row < rows; ++row, scores += vocab) {
      if (cap != 0.0f) cap_scores(cap, scores, width);
      if (best == nullptr || width == 0) continue;
      const TokenId at = find_best(scores, width);
      const auto id = static_cast<std::int32_t>(columns.begin + at);
      best_[static_cast<std::size_t>(part * rows + row)] =
          at < 0 ? RowBest{0.0f, RowBest::kNaN} : RowBest{scores[at], id};
    }
  });
  if (best != nullptr) merge_best(best_.data(), parts, rows, best);
}

void LlamaDecoder::forward_ids(const StepView& step, TokenId* ids, float* hidden) {
  const ThreadPool::Hold threads(ThreadPool::global());
  prepare(step);
  best_rows_.resize(step.num_logit_rows);
  const StepView& left = run_layers(step);
  run_final_norm(left, hidden);
  run_head_best(left, best_rows_.data());
  for (std::int32_t i = 0; i < step.num_logit_rows; ++i) ids[i] = best_rows_[i].index;
}

void LlamaDecoder::forward_logits(const StepView& step, float* logits, float* hidden,
                                  TokenId* best) {
  const ThreadPool::Hold threads(ThreadPool::global());
  prepare(step);
  best_rows_.resize(step.num_logit_rows);
  const StepView& left = run_layers(step);
  run_final_norm(left, hidden);
  run_head_scores(left, logits, best == nullptr ? nullptr : best_rows_.data());
  for (std::int32_t i = 0; best != nullptr && i < step.num_logit_rows; ++i) {
    best[i] = best_rows_[i].index;
  }
}

// The head's input of the logit rows. Behind the head comes the next step.
void LlamaDecoder::run_final_norm(const StepView& step, float* hidden) {
  over_rows(step.num_logit_rows, 4, [&](Range some) { gather_and_norm(step, some, hidden); });
  expect_layer(step, 0);
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
  const InputForm form = form_of(*head_, rows);
  const std::int64_t row_bytes = odd_lines(input_row_bytes(form, n));
  const bool direct = form == InputForm::kF32;
  // New bytes are zero, and the pad of an odd row is never written.
  const auto needed = static_cast<std::size_t>(rows * row_bytes);
  if (!direct && head_input_.size() < needed) head_input_.resize(needed);
  if (!direct) {
    over_rows(rows, 1, [&](Range some) {
      for (std::int64_t r = some.begin; r < some.end; ++r) {
        convert_row(ops_, form, hidden + r * n, n, head_input_.data() + r * row_bytes);
      }
    });
  }
  const InputRows x{direct ? static_cast<const void*>(hidden) : head_input_.data(),
                    direct ? n * 4 : row_bytes, rows, form};
  head_->run(x, scores, vocab);
  if (other_head_) other_head_->run(x, scores + head_->n(), vocab);
  if (config_.final_softcap != 0.0f) softcap_logits(scores, rows * vocab);
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
