// Cuts attention into blocks and shares them out over the threads.
//
// Many blocks, or few that the threads can share evenly: a piece is whole blocks, contiguous runs
// of about equal cost. Few blocks otherwise (one request, three heads, two threads): every block is
// cut, phase by phase; the scores then lie in common memory. Neither changes a bit
// (attention_kernels.h).
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "backend/cpu/attention/attention_kernels.h"
#include "backend/cpu/attention/cpu_attention.h"
#include "base/cpu_features.h"
#include "base/thread_pool.h"

namespace specdec::cpu {
namespace {

// Scores of one block, when a rank has them to itself, in floats: half of the second-level cache.
// Beside products in bf16 laying K and V out weighs more, so that more row-heads share it: all.
constexpr std::int64_t kLeastBlockFloats = 128 * 1024, kMostBlockFloats = 512 * 1024;
std::int64_t block_floats(bool narrow) {
  static const std::int64_t floats =
      std::clamp(second_level_cache_bytes() / 2 / std::int64_t{sizeof(float)}, kLeastBlockFloats,
                 kMostBlockFloats);
  return narrow ? 2 * floats : floats;
}
// At least this many row-heads share a read of K/V, however long the context.
constexpr int kMinBlockRowHeads = 8;
// Scores of all blocks, when they are shared.
constexpr std::int64_t kSharedFloats = 2 * 1024 * 1024;
constexpr int kSharedBlocksPerRank = 16;
// Items of a phase, for each thread, so that threads end together.
constexpr int kItemsPerRank = 3;
// Blocks are cut if a thread would otherwise have nothing to do for longer than this many
// multiply-adds of scores take: cutting costs two more calls of the threads, and reads of scores
// and values that another core holds.
constexpr std::int64_t kIdleWork = 120 * 1024;
// What one thread does in a nanosecond, roughly, and what the exponential of a score takes of it:
// sizes of pieces follow from it.
constexpr std::int64_t kMultiplyAddsPerNs = 32;
constexpr std::int64_t kExponential = 8;

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

struct Sizes {
  std::int64_t dims;     // head dim in whole chunks
  std::int64_t working;  // floats of a RankScratch
  std::int64_t rank;     // floats of one rank: working set and its own scores
};

// Floats of the scores of `count` row-heads, their tree part and denominators.
std::int64_t score_floats(std::int64_t count, std::int64_t stride) {
  return count * (stride + kMaxStepTokens) + round_up(count, 16);
}

Sizes sizes_of(std::int64_t max_keys, int head_dim) {
  Sizes s;
  s.dims = round_up(head_dim, kDimChunk);
  s.working = kMaxBlockRowHeads * s.dims * 2 + s.dims * kColumnAlign + kMaxStepTokens * s.dims;
  const std::int64_t stride = round_up(max_keys, kColumnAlign) + kColumnAlign;
  s.rank = s.working + kMaxBlockRowHeads * (kMaxStepTokens + 1) +
           std::max(block_floats(true), kMinBlockRowHeads * stride);
  return s;
}

RankScratch carve(float* at, std::int64_t dims) {
  RankScratch r;
  r.q = at;
  r.k_tile = r.q + kMaxBlockRowHeads * dims;
  r.v_tile = r.k_tile + dims * kColumnAlign;
  r.acc = r.v_tile + kMaxStepTokens * dims;
  return r;
}

std::int64_t longest(const StepView& step) {
  std::int64_t keys = 1;
  for (int b = 0; b < step.num_requests; ++b) {
    keys = std::max<std::int64_t>(keys, step.kv_len[b] + step.cu_rows[b + 1] - step.cu_rows[b]);
  }
  return keys;
}

// Calls visit(block) for every block, in an order that keeps equal K/V together. `own_scores`: a
// block's scores are one rank's, so their size is bounded.
template <typename Visit>
void for_each_block(const SpecAttentionParams& p, bool own_scores, Visit&& visit) {
  const StepView& step = p.step;
  const int group = p.num_heads / p.cache.num_kv_heads;
  const bool narrow = !p.exact && has_fast_attention(p.cache.dtype, p.cache.head_dim);
  for (int b = 0; b < step.num_requests; ++b) {
    AttentionBlock block{};
    block.params = &p;
    block.request = b;
    block.kv_len = step.kv_len[b];
    block.num_rows = step.cu_rows[b + 1] - step.cu_rows[b];
    block.is_tree = step.is_tree[b] != 0;
    const std::int64_t keys = block.kv_len + block.num_rows;
    int most = kMaxBlockRowHeads;
    if (own_scores) {
      most = static_cast<int>(std::clamp<std::int64_t>(
          block_floats(narrow) / (round_up(keys, kColumnAlign) + kColumnAlign), kMinBlockRowHeads,
          kMaxBlockRowHeads));
      if (narrow && most > kNarrowRowHeads) most = most / kNarrowRowHeads * kNarrowRowHeads;
    }
    const int row_heads = block.num_rows * group;
    for (int g = 0; g < p.cache.num_kv_heads; ++g) {
      block.kv_head = g;
      for (int first = 0; first < row_heads; first += most) {
        block.first = first;
        block.count = std::min(most, row_heads - first);
        // A tree's first row in the block may be the golden token again: depth 0 is the least.
        const std::int32_t lowest_pos = block.kv_len + (block.is_tree ? 0 : first / group);
        const std::int32_t low =
            std::max(p.first_key, p.sliding_window > 0 ? lowest_pos - p.sliding_window + 1 : 0);
        // Sink tokens that are far behind the window have columns of their own.
        const bool apart = low > p.sink_tokens;
        block.sink = apart ? p.sink_tokens : 0;
        block.low = apart ? low : 0;
        block.head = static_cast<std::int32_t>(round_up(block.sink, kColumnAlign));
        block.base = block.low / kColumnAlign * kColumnAlign;
        if (block.base <= block.head) block.base = block.head = 0;
        const std::int32_t last_row = (first + block.count - 1) / group;
        block.shared = block.kv_len + (block.is_tree ? 0 : last_row + 1);
        const std::int64_t columns =
            block.kv_len + (block.is_tree ? block.num_rows : last_row + 1) - column_shift(block);
        block.stride = round_up(columns, kColumnAlign);
        visit(block);
      }
    }
  }
}

// Cost of one block in multiply-adds per head dim; reading and converting a key is worth a few.
constexpr std::int64_t kKeyOverhead = 8;
std::int64_t cost_of(const AttentionBlock& block) {
  return block.stride * (block.count + kKeyOverhead);
}

// The part of n equal items, in a row of items that begins at `start` (all costs are in units of
// the whole), that falls to the range `mine`: items whose first unit lies in it.
struct Part {
  int begin, end;
};
Part part_of(std::int64_t start, std::int64_t item_cost, int n, Range mine) {
  auto first_at = [&](std::int64_t from) {
    const std::int64_t items = from <= start ? 0 : (from - start + item_cost - 1) / item_cost;
    return static_cast<int>(std::min<std::int64_t>(items, n));
  };
  return {first_at(mine.begin), first_at(mine.end)};
}

void place_scores(AttentionBlock& block, float* at) {
  block.scores = at;
  block.slot_scores = at + block.count * block.stride;
  block.sums = block.slot_scores + static_cast<std::int64_t>(block.count) * kMaxStepTokens;
}

const AttentionKernels& kernels_of(const SpecAttentionParams& p) {
  return p.exact ? attention_kernels() : fast_attention_kernels();
}

// What a thread could have done while it waits for the last one, if each has whole blocks. As many
// blocks of the largest one's size as there is work are done in so many turns.
std::int64_t idle_work(std::int64_t cost, std::int64_t largest, int head_dim, int nranks) {
  const std::int64_t turns = (cost + largest * nranks - 1) / (largest * nranks);
  return (turns * largest - cost / nranks) * head_dim;
}

// A piece is whole blocks; each rank has memory for one.
void run_alone(const SpecAttentionParams& p, float* memory, const Sizes& sizes) {
  const AttentionKernels& kernels = kernels_of(p);
  ThreadPool& pool = ThreadPool::global();
  std::int64_t total = 0, blocks = 0;
  for_each_block(p, true, [&](AttentionBlock& block) {
    total += cost_of(block);
    ++blocks;
  });
  const std::int64_t multiply_adds = 2 * total * p.cache.head_dim;
  const int pieces = pool.pieces(blocks, multiply_adds / kMultiplyAddsPerNs / blocks);
  pool.run(pieces, [&](int piece, int rank) {
    const Range mine = share(total, piece, pieces);
    float* own = memory + rank * sizes.rank;
    const RankScratch scratch = carve(own, sizes.dims);
    std::int64_t at = 0;
    for_each_block(p, true, [&](AttentionBlock& block) {
      // By its middle: whole blocks cannot follow the borders closer than half a block.
      const std::int64_t cost = cost_of(block), middle = at + cost / 2;
      at += cost;
      if (middle < mine.begin || middle >= mine.end) return;
      place_scores(block, own + sizes.working);
      kernels.scores(block, scratch, 0, num_tiles(block, kernels.tile_keys));
      kernels.softmax(block, 0, block.count);
      kernels.values(block, scratch, 0, p.cache.head_dim);
    });
  });
}

// One phase after the other; a piece is a run of items, of one block or several.
void run_shared(const SpecAttentionParams& p, float* memory, const Sizes& sizes,
                std::int64_t blocks) {
  const AttentionKernels& kernels = kernels_of(p);
  ThreadPool& pool = ThreadPool::global();
  float* shared = memory + pool.size() * sizes.rank;
  const std::int64_t head_dim = p.cache.head_dim;
  // Head dims of an item of the last phase: all of a block's, or else half of them, and so on. A
  // row of V is found once for each.
  std::int64_t dims = sizes.dims;
  while (dims % (2 * kDimChunk) == 0 &&
         blocks * (sizes.dims / dims) < kItemsPerRank * pool.size()) {
    dims /= 2;
  }
  const int chunks = static_cast<int>(sizes.dims / dims);

  // A block has items(block) items of item_cost(block) multiply-adds; run(block, part, scratch)
  // does some of them.
  auto phase = [&](auto&& items, auto&& item_cost, auto&& run) {
    std::int64_t total = 0, count = 0;
    for_each_block(p, false, [&](AttentionBlock& b) {
      total += items(b) * item_cost(b);
      count += items(b);
    });
    const int pieces = pool.pieces(count, total / kMultiplyAddsPerNs / count);
    pool.run(pieces, [&](int piece, int rank) {
      const Range mine = share(total, piece, pieces);
      const RankScratch scratch = carve(memory + rank * sizes.rank, sizes.dims);
      std::int64_t at = 0;
      float* place = shared;
      for_each_block(p, false, [&](AttentionBlock& b) {
        place_scores(b, place);
        place += score_floats(b.count, b.stride);
        const Part part = part_of(at, item_cost(b), items(b), mine);
        at += items(b) * item_cost(b);
        if (part.begin < part.end) run(b, part, scratch);
      });
    });
  };
  phase([&](const AttentionBlock& b) { return num_tiles(b, kernels.tile_keys); },
        [&](const AttentionBlock& b) {
          return (b.count + kKeyOverhead) * kernels.tile_keys * head_dim;
        },
        [&](const AttentionBlock& b, Part part, const RankScratch& scratch) {
          kernels.scores(b, scratch, part.begin, part.end);
        });
  phase([](const AttentionBlock& b) { return b.count; },
        [](const AttentionBlock& b) { return b.stride * kExponential; },
        [&](const AttentionBlock& b, Part part, const RankScratch&) {
          kernels.softmax(b, part.begin, part.end);
        });
  phase([&](const AttentionBlock&) { return chunks; },
        [&](const AttentionBlock& b) { return cost_of(b) * dims; },
        [&](const AttentionBlock& b, Part part, const RankScratch& scratch) {
          kernels.values(b, scratch, static_cast<int>(part.begin * dims),
                         static_cast<int>(part.end * dims));
        });
}

// Is there a NaN or an infinity (all bits of the exponent set) among n numbers?
template <typename Bits>
bool any_not_finite(const void* numbers, std::int64_t n, Bits exponent) {
  const Bits* bits = static_cast<const Bits*>(numbers);
  return std::any_of(bits, bits + n, [=](Bits x) { return (x & exponent) == exponent; });
}

// Flags the requests with a result that is no finite number.
void report_status(const SpecAttentionParams& p) {
  const std::int64_t size = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  const std::int64_t n = std::int64_t{p.num_heads} * p.cache.head_dim;
  for (int b = 0; b < p.step.num_requests; ++b) {
    for (std::int64_t row = p.step.cu_rows[b]; row < p.step.cu_rows[b + 1]; ++row) {
      const char* out = static_cast<const char*>(p.out) + row * p.out_row_stride * size;
      const bool bad = p.dtype == DType::kF32 ? any_not_finite<std::uint32_t>(out, n, 0x7f800000u)
                       : p.dtype == DType::kBF16 ? any_not_finite<std::uint16_t>(out, n, 0x7f80)
                                                 : any_not_finite<std::uint16_t>(out, n, 0x7c00);
      if (bad) p.exec.status[b] |= kStatusNaN;
    }
  }
}

}  // namespace

bool has_fast_attention(DType kv_dtype, std::int64_t head_dim) {
  const bool has_products = &fast_attention_kernels() != &attention_kernels();
  return has_products && multiplies_in_bf16(kv_dtype, head_dim);
}

std::size_t spec_attention_scratch_bytes(std::int64_t max_keys, int /*num_heads*/,
                                         int /*num_kv_heads*/, int head_dim, int nranks) {
  const Sizes sizes = sizes_of(max_keys, head_dim);
  const std::int64_t shared = nranks > 1 ? kSharedFloats : 0;
  return static_cast<std::size_t>(sizes.rank * nranks + shared) * sizeof(float) + 64;
}

void spec_attention(const SpecAttentionParams& p, void* scratch) {
  if (p.step.num_rows == 0) return;
  float* memory = reinterpret_cast<float*>(round_up(reinterpret_cast<std::intptr_t>(scratch), 64));
  const Sizes sizes = sizes_of(longest(p.step), p.cache.head_dim);
  const int nranks = ThreadPool::global().size();
  bool cut = false;
  std::int64_t blocks = 0;
  if (nranks > 1) {
    std::int64_t floats = 0, cost = 0, largest = 0;
    for_each_block(p, false, [&](const AttentionBlock& block) {
      ++blocks;
      cost += cost_of(block);
      largest = std::max(largest, cost_of(block));
      floats += score_floats(block.count, block.stride);
    });
    cut = blocks <= kSharedBlocksPerRank * nranks && floats <= kSharedFloats &&
          idle_work(cost, largest, p.cache.head_dim, nranks) > kIdleWork;
  }
  if (cut) {
    run_shared(p, memory, sizes, blocks);
  } else {
    run_alone(p, memory, sizes);
  }
}

void spec_attention(const SpecAttentionParams& p) {
  // The buffer of the calling thread; it grows to the largest problem seen.
  thread_local std::unique_ptr<char[]> buffer;
  thread_local std::size_t capacity = 0;
  const ThreadPool::Hold threads(ThreadPool::global());
  const int nranks = ThreadPool::global().size();
  const std::size_t bytes = spec_attention_scratch_bytes(
      longest(p.step), p.num_heads, p.cache.num_kv_heads, p.cache.head_dim, nranks);
  if (bytes > capacity) {
    capacity = 0;
    buffer.reset(new char[bytes]);
    capacity = bytes;
  }
  spec_attention(p, buffer.get());
  if (p.exec.status != nullptr) report_status(p);
}

}  // namespace specdec::cpu
