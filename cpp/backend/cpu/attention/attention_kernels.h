// The three phases of attention for one block, as each instruction set provides them.
//
// A block is a run of (row, query head) pairs, "row-heads", of one request that share a K/V head:
//   scores   S[i, j] = scale * q_i . k_j           a tile of keys at a time, all row-heads
//   softmax  S[i, :] = exp(S[i, :] - max), l_i = sum     one row-head at a time
//   values   out[i, d] = sum_j S[i, j] v_j[d] / l_i      any range of head dims
// The phases can be shared out over threads by keys, row-heads and head dims: no sum is split, so
// sharing changes no bit.
//
// Exactness. Column j of S is a position, not a slot: a tree row's ancestors are gathered to
// kv_len + depth before the softmax. Every score is chains of 32 head dims, added in order. The sum
// keeps one chain per residue of the absolute position modulo the vector width (columns outside the
// row's range hold exp(-inf) = +0, which changes nothing), folded by a fixed tree. Every out[i, d]
// is one chain over the positions. Nothing refers to block, tile or thread borders.
#pragma once

#include <cstdint>

#include "backend/ops.h"

namespace specdec::cpu {

// Scores and columns are laid out for the widest instruction set.
inline constexpr int kColumnAlign = 64;
inline constexpr int kMaxBlockRowHeads = 64;
inline constexpr int kNarrowRowHeads = 16;  // that products in bf16 take together
inline constexpr int kDimChunk = 16;        // head dims are shared out in cache lines of floats

struct AttentionBlock {
  const SpecAttentionParams* params;
  std::int32_t request, kv_head;
  std::int32_t first, count;  // row-heads of the request: i = row * (H / G) + head in group
  std::int32_t kv_len, num_rows;
  bool is_tree;
  // What is read: positions below `sink` and from `low` on. Columns [0, head) are the positions
  // [0, head), later ones those from `base` on; both are multiples of kColumnAlign.
  std::int32_t sink, low, head, base;
  std::int32_t shared;  // positions below it lie in slots of the same number
  std::int64_t stride;  // columns of a row of `scores`, a multiple of kColumnAlign
  float* scores;        // [count, stride]
  float* slot_scores;   // [count, kMaxStepTokens] of a tree's own rows, by slot
  float* sums;          // [count] denominators
};

// Memory of one rank, for the duration of one block. Sizes: rank_scratch_floats().
struct RankScratch {
  float* q;       // [kMaxBlockRowHeads, K]
  float* k_tile;  // [K, tile_keys] transposed keys
  float* v_tile;  // [kMaxStepTokens, K rounded up to kDimChunk] converted keys, values
  float* acc;     // [kMaxBlockRowHeads, K rounded up to kDimChunk]
};

struct AttentionKernels {
  int tile_keys;  // keys of a score tile; divides kColumnAlign
  // Score tiles [begin, end): first those of the shared positions, then those of the tree's slots.
  void (*scores)(const AttentionBlock&, const RankScratch&, int tile_begin, int tile_end);
  // Row-heads [begin, end) of the block.
  void (*softmax)(const AttentionBlock&, int begin, int end);
  // Head dims [begin, end), multiples of kDimChunk (or K); writes that part of `out`.
  void (*values)(const AttentionBlock&, const RankScratch&, int dim_begin, int dim_end);
  // First index of the largest, -1 if there is a NaN.
  TokenId (*argmax)(const float* scores, std::int32_t n);
};

const AttentionKernels& attention_kernels();  // of cpu_isa()
const AttentionKernels& attention_kernels_plain();
const AttentionKernels& attention_kernels_avx2();
const AttentionKernels& attention_kernels_avx512();
// For calls that need not be exact: products in bf16 where there are instructions for them, else
// the same.
const AttentionKernels& fast_attention_kernels();
const AttentionKernels& attention_kernels_avx512_bf16();
const AttentionKernels& attention_kernels_amx();
// Whether those multiply such K/V in bf16: pairs of head dims fill whole registers.
constexpr bool multiplies_in_bf16(DType kv_dtype, std::int64_t head_dim) {
  return kv_dtype == DType::kBF16 && head_dim % 32 == 0;
}

// The column of a position is so much less; not of those in columns [0, head).
inline std::int32_t column_shift(const AttentionBlock& block) { return block.base - block.head; }

inline int num_shared_tiles(const AttentionBlock& block, int tile_keys) {
  const int keys = block.head + (block.shared > block.base ? block.shared - block.base : 0);
  return (keys + tile_keys - 1) / tile_keys;
}
inline int num_tiles(const AttentionBlock& block, int tile_keys) {
  const int own = block.is_tree ? (block.num_rows + tile_keys - 1) / tile_keys : 0;
  return num_shared_tiles(block, tile_keys) + own;
}

}  // namespace specdec::cpu
