#include "backend/cpu/decoder/needed_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace specdec::cpu {

bool NeededRows::find(const StepView& step) {
  if (step.num_logit_rows > step.num_rows / 2) return false;  // as in every step of decoding
  const std::int32_t requests = step.num_requests;
  // First from the first to the last row with scores.
  runs_.assign(static_cast<std::size_t>(requests), {0, 0});
  const auto request_of = [&](std::int32_t row) {
    const std::int32_t* behind = std::upper_bound(step.cu_rows, step.cu_rows + requests + 1, row);
    return static_cast<std::size_t>(behind - step.cu_rows - 1);
  };
  for (std::int32_t i = 0; i < step.num_logit_rows; ++i) {
    const std::int32_t row = step.logit_rows[i];
    Run& run = runs_[request_of(row)];
    const bool is_new = run.begin == run.end;
    run = is_new ? Run{row, row + 1} : Run{std::min(run.begin, row), std::max(run.end, row + 1)};
  }
  cu_rows_.assign(1, 0);
  for (std::int32_t b = 0; b < requests; ++b) {
    Run& run = runs_[b];
    if (step.is_tree[b] != 0 && run.begin < run.end) run = {step.cu_rows[b], step.cu_rows[b + 1]};
    cu_rows_.push_back(cu_rows_.back() + run.end - run.begin);
  }
  if (cu_rows_.back() > step.num_rows / 2) return false;

  kv_len_.assign(step.kv_len, step.kv_len + requests);
  mask_.resize(static_cast<std::size_t>(cu_rows_.back()) * kMaskWords);
  for (std::int32_t b = 0; b < requests; ++b) {
    const Run& run = runs_[b];
    // Rows of the chain in front of these are tokens of the cache by now.
    if (run.begin < run.end) kv_len_[b] += run.begin - step.cu_rows[b];
    if (step.is_tree[b] == 0) continue;
    std::copy_n(step.mask + std::int64_t{run.begin} * kMaskWords,
                std::int64_t{run.end - run.begin} * kMaskWords,
                mask_.data() + std::int64_t{cu_rows_[b]} * kMaskWords);
  }
  logit_rows_.clear();
  for (std::int32_t i = 0; i < step.num_logit_rows; ++i) {
    const std::int32_t row = step.logit_rows[i];
    const std::size_t b = request_of(row);
    logit_rows_.push_back(cu_rows_[b] + row - runs_[b].begin);
  }
  step_ = step;
  step_.num_rows = cu_rows_.back();
  step_.tokens = step_.positions = step_.parents = nullptr;
  step_.mask = mask_.data();
  step_.cu_rows = cu_rows_.data();
  step_.kv_len = kv_len_.data();
  step_.logit_rows = logit_rows_.data();
  return true;
}

void NeededRows::move_to_front(std::byte* rows, std::int64_t row_bytes, std::int64_t bytes) const {
  std::byte* to = rows;
  for (const Run& run : runs_) {
    for (std::int64_t row = run.begin; row < run.end; ++row, to += row_bytes) {
      if (to != rows + row * row_bytes) std::memcpy(to, rows + row * row_bytes, bytes);
    }
  }
}

}  // namespace specdec::cpu
