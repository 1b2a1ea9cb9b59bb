// Parameter structs of draft trees that grow on a step's stream (algo/draft_growth.h).
#pragma once

#include <cstdint>

#include "algo/draft_growth.h"
#include "backend/ops.h"
#include "backend/slot_ops.h"

namespace specdec {

// The next level of each request's tree. A request whose limit is 0 has no tree.
struct GrowDraftsParams {
  DraftGrowth* growths = nullptr;  // [D]
  bool begins = false;             // the first level: the trees are empty before
  // [D, places, width]: of the rows that were new to the model; `places` is 1 for the first level.
  const float* shares = nullptr;
  const std::int64_t* columns = nullptr;
  const TokenId* token_ids = nullptr;    // [num_columns]; null: the column
  const std::int32_t* limits = nullptr;  // [D] nodes of the request's tree, at most
  std::int32_t places = 1, width = 1, num_columns = 0, num_requests = 0;
  std::int32_t max_open = 0;  // nodes that the next pass reads, at most; 0: this level is the last
  ExecutionContext exec;

  SPECDEC_HD DraftChildren<std::int64_t> children_of(std::int32_t b) const {
    const std::int64_t first = std::int64_t{b} * places * width;
    return {shares + first, columns + first, token_ids, width, num_columns};
  }
  SPECDEC_HD std::int32_t limit(std::int32_t b) const {
    return limits[b] < kMaxDraftLen ? limits[b] : kMaxDraftLen;
  }
};

// The rows of the next pass: of each request that goes on the golden token and the opened nodes,
// those of the newest level last. Rows behind them hold token 0 and parent -1.
struct PackDraftsParams {
  const DraftGrowth* growths = nullptr;  // [D]
  const TokenId* golden = nullptr;       // [D]
  TokenId* tokens = nullptr;             // [R]
  std::int32_t* parents = nullptr;       // [R] within the request
  // [R]: the parent's row in the pass before, within the request; -1: of a golden token, of none.
  // Null: not wanted.
  std::int32_t* sources = nullptr;
  std::int32_t* cu_rows = nullptr;  // [D + 1]
  // [D, places]: the rows of the nodes of the newest level; 0 where there is none.
  std::int32_t* logit_rows = nullptr;
  std::int32_t places = 1, num_rows = 0, num_requests = 0;
  ExecutionContext exec;

  // Rows of a request; none if its tree is complete, or has more open nodes than there are places.
  SPECDEC_HD std::int32_t rows(std::int32_t b) const {
    const std::int32_t open = growths[b].num_open;
    return open > 0 && open <= places ? growths[b].num_rows : 0;
  }
};

// The trees into the requests' slots, the most valuable drafts first, as propose_drafts.
struct ProposeGrowthsParams {
  SlotPoolView slots;
  const std::int32_t* slot_ids = nullptr;  // [D], each slot at most once
  const DraftGrowth* growths = nullptr;    // [D]
  std::int32_t num_requests = 0;
  ExecutionContext exec;
};

// A request's rows among those of all, by one thread or one lane after another: those of a pass
// that do not fit are left out.
template <Team TeamT>
SPECDEC_HD inline void pack_growth(const TeamT& team, const PackDraftsParams& p, std::int32_t b,
                                   std::int32_t first) {
  const DraftGrowth& g = p.growths[b];
  const std::int32_t rows = p.rows(b);
  const bool fits = rows > 0 && first + rows <= p.num_rows;
  for (std::int32_t i = team.rank(); i < p.places; i += team.size()) {
    p.logit_rows[b * p.places + i] = fits && i < g.num_open ? first + rows - g.num_open + i : 0;
  }
  if (!fits) return;
  if (team.rank() == 0) {
    p.tokens[first] = p.golden[b];
    p.parents[first] = -1;
    if (p.sources != nullptr) p.sources[first] = -1;
  }
  for (std::int32_t i = team.rank(); i < g.count; i += team.size()) {
    const std::int32_t row = g.rows[i];
    if (row <= 0 || row >= rows) continue;
    p.tokens[first + row] = g.tokens[i];
    const std::int32_t parent = g.parents[i];
    p.parents[first + row] = parent < 0 ? 0 : g.rows[parent];
    if (p.sources != nullptr) p.sources[first + row] = parent < 0 ? 0 : g.was[parent];
  }
}

}  // namespace specdec
