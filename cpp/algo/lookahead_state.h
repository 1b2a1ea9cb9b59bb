// Lookahead decoding: configuration, resource formulas and the state of one request.
//
// The state is one block of memory without pointers (sizes follow from the configuration), so a
// slot of any backend can hold it and it may be copied bytewise. No verb allocates.
//
// Source: Fu et al., "Break the sequential dependency of LLM inference using lookahead decoding"
// (2024), in the row-major arrangement that TensorRT-LLM uses, see docs/methods/lookahead.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace specdec {

// (W, N, G): window rows, n-gram size, verification-set size.
struct LookaheadConfig {
  std::int32_t w = 1, n = 1, g = 0;
  friend bool operator==(const LookaheadConfig&, const LookaheadConfig&) = default;
};

SPECDEC_HD constexpr bool lookahead_is_valid(std::int64_t w, std::int64_t n, std::int64_t g) {
  return w >= 1 && n >= 1 && g >= 0 && (n > 1 || (w == 1 && g == 0));
}

// Draft tokens of one step at most: (N == 1 ? 0 : N - 2) + (W - 1 + G)(N - 1).
SPECDEC_HD constexpr std::int64_t lookahead_max_draft_len(std::int64_t w, std::int64_t n,
                                                          std::int64_t g) {
  return (n == 1 ? 0 : n - 2) + (w - 1 + g) * (n - 1);
}
// No node of a tree lies deeper: the last window row hangs under the row above, and so on.
SPECDEC_HD constexpr std::int32_t lookahead_max_depth(const LookaheadConfig& cfg) {
  if (cfg.n == 1) return 0;
  const std::int32_t window = cfg.w + cfg.n - 3;
  return window > cfg.n - 1 || cfg.g == 0 ? window : cfg.n - 1;
}
// May a request ask for `request` where the executor was made for `limit`?
SPECDEC_HD constexpr bool lookahead_fits(const LookaheadConfig& request,
                                         const LookaheadConfig& limit) {
  return request.w <= limit.w && request.n <= limit.n && request.g <= limit.g &&
         lookahead_max_draft_len(request.w, request.n, request.g) <=
             lookahead_max_draft_len(limit.w, limit.n, limit.g);
}

// Throws std::invalid_argument naming the field, its value, the limit and the remedy. `what` names
// the place, e.g. "SamplingParams.lookahead".
void check_lookahead_config(const LookaheadConfig& cfg, const char* what);

// What this step may emit, an upper bound on each count; larger values than the request's own
// triple are cut to it. With LookaheadBudget{} everything is emitted.
struct LookaheadBudget {
  static constexpr std::int32_t kAll = kMaxStepTokens;
  std::int32_t window_rows =
      kAll;                       // a prefix of the rows; 0: no window branch, window stands still
  std::int32_t guesses = kAll;    // the newest ones
  std::int32_t guess_len = kAll;  // tokens of each guess
  std::int32_t max_drafts = kMaxDraftLen;  // draft nodes; a window row is emitted whole or not
  std::int32_t max_depth = kMaxDraftLen;   // depth of any draft node (the positions left)
};

// Draft nodes that a step of this budget can have at most, in any state.
SPECDEC_HD constexpr std::int32_t lookahead_draft_bound(const LookaheadConfig& cfg,
                                                        const LookaheadBudget& budget) {
  const auto cut = [](std::int32_t value, std::int32_t limit) {
    return value < 0 ? 0 : (value < limit ? value : limit);
  };
  const std::int32_t rows = cut(budget.window_rows, cfg.w);
  const std::int32_t guesses = cut(budget.guesses, cfg.g);
  const std::int32_t guess_len = cut(budget.guess_len, cfg.n - 1);
  const std::int32_t window = rows == 0 || cfg.n == 1 ? 0 : cfg.n - 2 + (rows - 1) * (cfg.n - 1);
  return cut(window + guesses * guess_len, cut(budget.max_drafts, kMaxDraftLen));
}

// Which branch put a node into the tree; a merged node has both bits. The golden token has none.
inline constexpr std::uint8_t kOriginWindow = 1, kOriginGuess = 2;

// The n-gram pool is an array of sets of grams (lookahead_pool.h). A pool for `grams` entries holds
// that many rounded down to a power of two of sets, one set at least.
SPECDEC_HD constexpr std::int32_t lookahead_pool_ways(std::int32_t g) {
  std::int32_t ways = 16;
  while (ways < 2 * g) ways *= 2;
  return ways;
}
SPECDEC_HD constexpr std::int32_t lookahead_pool_sets(std::int32_t g, std::int32_t grams) {
  std::int32_t sets = 1;
  while (std::int64_t{2} * sets * lookahead_pool_ways(g) <= grams) sets *= 2;
  return g == 0 ? 0 : sets;
}

// Grams kept for one request: several per token of its longest history, at most a few hundred KiB.
SPECDEC_HD constexpr std::int32_t lookahead_pool_grams(std::int32_t max_len) {
  const std::int64_t grams = std::int64_t{8} * max_len;
  return static_cast<std::int32_t>(grams < 1024 ? 1024 : (grams > 32768 ? 32768 : grams));
}

// Head of the block; the arrays follow it in the order of the accessors. All arrays are int32.
struct LookaheadState {
  LookaheadConfig cfg;
  std::int32_t pool_sets, pool_ways;
  std::uint32_t pool_stamp;   // number of inserts so far: the age order of the pool
  std::int32_t emitted_rows;  // window rows in the tree of the last draft; 0 after an update
  TokenId golden;             // golden token of the last draft

  SPECDEC_HD std::int32_t gram_len() const { return cfg.n - 1; }
  SPECDEC_HD std::int32_t num_prefill() const { return cfg.n > 2 ? cfg.n - 2 : 0; }

  // [N-2] drawn from the prompt; fills the gap between golden token and window during warm-up.
  SPECDEC_HD TokenId* prefill() { return base(); }
  // [W, N-1] the window A; the first fill()[w] columns of row w are valid.
  SPECDEC_HD TokenId* window() { return prefill() + num_prefill(); }
  // [W] filled columns of each row, never increasing with w; fill()[0] is the filling f.
  SPECDEC_HD std::int32_t* fill() { return window() + cfg.w * gram_len(); }
  // [W] tree node of each emitted row's last token.
  SPECDEC_HD std::int32_t* row_node() { return fill() + cfg.w; }
  // [W] scratch: key under which the row's gram enters the pool, -1 for none.
  SPECDEC_HD TokenId* row_key() { return row_node() + cfg.w; }
  // [N-1] the last decided tokens, golden token last; -1 before the start of a short prompt.
  SPECDEC_HD TokenId* tail() { return row_key() + cfg.w; }
  // [G] pool entries of this step's guesses, oldest first.
  SPECDEC_HD std::int32_t* guesses() { return tail() + gram_len(); }
  // [kMaxStepTokens] origin bits of each tree node.
  SPECDEC_HD std::int32_t* origin() { return guesses() + cfg.g; }
  // [kMaxStepTokens] each: links of the prefix tree while it is being built.
  SPECDEC_HD std::int32_t* first_child() { return origin() + kMaxStepTokens; }
  SPECDEC_HD std::int32_t* next_sibling() { return first_child() + kMaxStepTokens; }
  // [sets * ways] each: key token (-1: free) and age stamp of a gram.
  SPECDEC_HD TokenId* pool_keys() { return next_sibling() + kMaxStepTokens; }
  SPECDEC_HD std::uint32_t* pool_stamps() {
    return reinterpret_cast<std::uint32_t*>(pool_keys() + pool_entries());
  }
  // [sets * ways, N-1] tokens of each gram.
  SPECDEC_HD TokenId* pool_grams() { return pool_keys() + 2 * pool_entries(); }
  SPECDEC_HD std::int32_t pool_entries() const { return pool_sets * pool_ways; }

 private:
  SPECDEC_HD TokenId* base() { return reinterpret_cast<TokenId*>(this + 1); }
};

// Bytes of the block for a triple and a pool of `pool_grams` entries; the block is aligned to 8.
// Never decreasing in w, n, g and pool_grams: a slot sized for the executor's triple holds any
// other.
SPECDEC_HD constexpr std::size_t lookahead_bytes_required(const LookaheadConfig& cfg,
                                                          std::int32_t pool_grams) {
  const std::int64_t gram = cfg.n - 1;
  const std::int64_t entries =
      std::int64_t{lookahead_pool_sets(cfg.g, pool_grams)} * lookahead_pool_ways(cfg.g);
  const std::int64_t words = (cfg.n > 2 ? cfg.n - 2 : 0) + cfg.w * gram + 3 * cfg.w + gram + cfg.g +
                             3 * kMaxStepTokens + entries * (2 + gram);
  return (sizeof(LookaheadState) + static_cast<std::size_t>(words) * 4 + 7) / 8 * 8;
}

}  // namespace specdec
