#include "algo/lookahead.h"

#include "base/check.h"

namespace specdec {

void check_lookahead_config(const LookaheadConfig& cfg, const char* what) {
  const auto triple = [&] { return detail::join("[", cfg.w, ",", cfg.n, ",", cfg.g, "]"); };
  SPECDEC_REQUIRE(cfg.w >= 1, what, " = ", triple(), ": window size ", cfg.w,
                  " is below 1; use a window of 1 or more rows");
  SPECDEC_REQUIRE(cfg.n >= 1, what, " = ", triple(), ": n-gram size ", cfg.n,
                  " is below 1; use 2 or more, or [1,1,0] for plain decoding");
  SPECDEC_REQUIRE(cfg.g >= 0, what, " = ", triple(), ": verification-set size ", cfg.g,
                  " is below 0; use 0 or more");
  SPECDEC_REQUIRE(
      cfg.n > 1 || (cfg.w == 1 && cfg.g == 0), what, " = ", triple(),
      ": n-gram size 1 drafts nothing and needs window size 1 and verification-set size "
      "0; use [1,1,0] for plain decoding or an n-gram size of 2 or more");
  const std::int64_t drafts = lookahead_max_draft_len(cfg.w, cfg.n, cfg.g);
  SPECDEC_REQUIRE(drafts <= kMaxDraftLen, what, " = ", triple(), " needs ", drafts,
                  " draft tokens per step, the limit is ", kMaxDraftLen,
                  "; choose smaller values: (N-2) + (W-1+G)*(N-1) <= ", kMaxDraftLen);
}

static_assert(lookahead_max_draft_len(7, 7, 7) == 83);
static_assert(lookahead_max_draft_len(2, 2, 1) == 2);
static_assert(lookahead_max_draft_len(1, 1, 0) == 0);
static_assert(lookahead_max_draft_len(4, 3, 4) == 15);
static_assert(lookahead_max_draft_len(3, 3, 3) == 11);
static_assert(lookahead_max_draft_len(10, 9, 8) == 143);

}  // namespace specdec
