#include "backend/cpu/step/step_ops.h"

#include <algorithm>
#include <bit>

#include "tree/draft_tree.h"

namespace specdec::cpu {
namespace {

bool is_tree_within(const std::int32_t* parents, std::int32_t size, std::int32_t max_depth) {
  if (size > kMaxStepTokens || parents[0] != -1) return false;
  for (std::int32_t i = 1; i < size; ++i) {
    if (parents[i] < 0 || parents[i] >= i) return false;
  }
  std::int32_t depths[kMaxStepTokens];
  derive_depths(parents, size, depths);
  return std::all_of(depths, depths + size, [&](std::int32_t d) { return d <= max_depth; });
}

}  // namespace

void build_step(const BuildStepParams& p) {
  const StepView& step = p.step;
  const int shift = std::countr_zero(static_cast<unsigned>(p.page_size));
  for (std::int32_t b = 0; b < step.num_requests; ++b) {
    const std::int32_t first = step.cu_rows[b], size = step.cu_rows[b + 1] - first;
    p.is_tree[b] = 0;
    if (size == 0) continue;
    const std::int32_t* parents = step.parents + first;
    const bool chain = parents[0] == -1 && is_chain(parents, size);
    const bool tree = !chain && is_tree_within(parents, size, p.max_depth);
    if (!chain && !tree && p.exec.status != nullptr) p.exec.status[b] |= kStatusBadTree;
    p.is_tree[b] = tree;
    std::uint32_t* mask = p.mask + static_cast<std::int64_t>(first) * kMaskWords;
    if (tree) {
      derive_mask(parents, size, mask);
      derive_depths(parents, size, p.positions + first);
    }
    for (std::int32_t i = 0; i < size; ++i) {
      if (!tree) {
        p.positions[first + i] = i;
        for (std::int32_t w = 0; w < kMaskWords; ++w) {
          const std::int32_t bits = size > kMaxStepTokens ? 0 : std::clamp(i + 1 - 32 * w, 0, 32);
          mask[i * kMaskWords + w] = bits == 32 ? ~0u : (1u << bits) - 1u;
        }
      }
      p.positions[first + i] += step.kv_len[b];
      if (p.slots == nullptr) continue;
      const std::int32_t slot = step.kv_len[b] + i;
      const std::int64_t page =
          step.page_table[static_cast<std::int64_t>(b) * step.page_table_stride + (slot >> shift)];
      p.slots[first + i] = page * p.page_size + (slot & (p.page_size - 1));
    }
  }
  for (std::int32_t row = step.cu_rows[step.num_requests]; row < step.num_rows; ++row) {
    p.positions[row] = 0;
    std::fill_n(p.mask + static_cast<std::int64_t>(row) * kMaskWords, kMaskWords, 0u);
    if (p.slots != nullptr) p.slots[row] = -1;
  }
}

void pack_mask(const PackMaskParams& p) {
  for (std::int64_t i = 0; i < p.rows; ++i) {
    std::uint32_t* words = p.words + i * p.num_words;
    std::fill_n(words, p.num_words, 0u);
    for (std::int32_t j = 0; j < p.cols; ++j) {
      const bool bit = p.mask[i * p.row_stride + j * p.column_stride] != 0;
      words[j >> 5] |= std::uint32_t{bit} << (j & 31);
    }
  }
}

}  // namespace specdec::cpu
