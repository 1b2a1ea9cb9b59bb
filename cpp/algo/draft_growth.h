// A tree of a draft model's likeliest continuations, grown level by level. A pass of the model
// reads the golden token and every node that was opened so far; what it says behind the nodes of
// the newest level becomes the next level. One text for a thread of the host and a warp.
//
// A node's worth is the product of the shares that the model gave along its path. Only the most
// valuable nodes can ever be drafts, `max_nodes` of them over all levels: a child is worth no more
// than its parent and comes behind it, so a node that is not among them has no child that is, and
// everything behind it is dropped at once. Of each level the `max_open` most valuable nodes that
// are left are opened. Ties: the earlier node.
#pragma once

#include <cstdint>

#include "algo/proposed_draft.h"
#include "algo/team.h"
#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

// Children of a node, and nodes of a level that are opened, at most.
inline constexpr std::int32_t kMaxDraftChildren = 64;

struct DraftGrowth {
  std::int32_t count;     // nodes, parents before their children
  std::int32_t num_open;  // nodes whose rows the next pass reads for the first time
  std::int32_t num_rows;  // of the next pass: the golden token, then the nodes that were opened
  TokenId tokens[kMaxDraftLen];
  std::int32_t parents[kMaxDraftLen];  // -1: the golden token
  float worth[kMaxDraftLen];
  std::int32_t rows[kMaxDraftLen];  // of the next pass; 0: it was not opened
  std::int32_t was[kMaxDraftLen];   // of the pass before it; 0: it had none
};

// The golden token alone; its row is the only one of the next pass.
SPECDEC_HD inline void begin_growth(DraftGrowth* growth) {
  growth->count = 0;
  growth->num_open = 0;
  growth->num_rows = 1;
}

// What the model said behind each row that was new to it, in their order: its likeliest columns.
template <typename Column>
struct DraftChildren {
  const float* shares;       // [rows, width] falling, each in (0, 1]; what is none ends a row
  const Column* columns;     // [rows, width]
  const TokenId* token_ids;  // of each column; null: the column
  std::int32_t width, num_columns;
};

struct DraftGrowthScratch {
  std::int32_t open[kMaxDraftChildren];      // the node of each row, -1: the golden token
  std::int32_t children[kMaxDraftChildren];  // of each row
  std::int32_t place[kMaxDraftLen];          // of the nodes that were there; -1: dropped
  std::int8_t kept[kMaxDraftChildren * kMaxDraftChildren];  // 0: no, 1: a leaf, 2: opened
};

// The next level. `max_open` 0: the last one.
template <Team TeamT, typename Column>
SPECDEC_HD inline void grow_drafts(const TeamT& team, const DraftChildren<Column>& in,
                                   std::int32_t max_nodes, std::int32_t max_open,
                                   DraftGrowth* growth, DraftGrowthScratch* scratch) {
  const std::int32_t old = growth->count, width = in.width;
  const std::int32_t rows = old == 0 ? 1 : growth->num_open;
  const std::int32_t first_row = growth->num_rows - rows;
  if (team.rank() == 0 && old == 0) scratch->open[0] = -1;
  for (std::int32_t i = team.rank(); i < old; i += team.size()) {
    if (growth->rows[i] >= first_row && growth->rows[i] > 0) {
      scratch->open[growth->rows[i] - first_row] = i;
    }
  }
  for (std::int32_t row = 0; row < rows; ++row) {
    const float* shares = in.shares + row * width;
    const Column* columns = in.columns + row * width;
    const std::int32_t count = count_until_bad(team, width, [&](std::int32_t i) {
      return shares[i] > 0.0f && (i == 0 || shares[i] <= shares[i - 1]) && columns[i] >= 0 &&
             columns[i] < in.num_columns;
    });
    if (team.rank() == 0) scratch->children[row] = count;
  }
  team.sync();
  const auto worth = [&](std::int32_t row, std::int32_t i) {
    const float share = in.shares[row * width + i];
    const float above = scratch->open[row] < 0 ? 1.0f : growth->worth[scratch->open[row]];
    return share < 1.0f ? above * share : above;
  };
  // How many children of other rows than `row` go before one of that worth; none of `row` -1.
  const auto children_before = [&](std::int32_t row, float mine) {
    std::int32_t before = 0;
    for (std::int32_t other = 0; other < rows && before < max_nodes; ++other) {
      if (other == row) continue;
      for (std::int32_t i = 0; i < scratch->children[other]; ++i) {
        const float theirs = worth(other, i);
        if (!(theirs > mine || (theirs == mine && other < row))) break;
        ++before;
      }
    }
    return before;
  };
  for (std::int32_t i = team.rank(); i < old; i += team.size()) {
    const float mine = growth->worth[i];
    std::int32_t before = children_before(-1, mine);
    for (std::int32_t j = 0; j < old; ++j) {
      before += growth->worth[j] > mine || (growth->worth[j] == mine && j < i) ? 1 : 0;
    }
    scratch->place[i] = before < max_nodes ? 0 : -1;
  }
  for (std::int32_t c = team.rank(); c < rows * width; c += team.size()) {
    const std::int32_t row = c / width, i = c % width;
    std::int8_t kept = 0;
    if (i < scratch->children[row]) {
      const float mine = worth(row, i);
      const std::int32_t of_level = i + children_before(row, mine);
      std::int32_t before = of_level;
      for (std::int32_t j = 0; j < old && before < max_nodes; ++j) {
        before += growth->worth[j] >= mine ? 1 : 0;
      }
      if (before < max_nodes) kept = of_level < max_open ? 2 : 1;
    }
    scratch->kept[c] = kept;
  }
  team.sync();
  // The nodes that stay move up, then the new ones follow.
  std::int32_t count = 0, opened = 0;
  for (std::int32_t first = 0; first < old; first += team.size()) {
    const std::int32_t i = first + team.rank();
    const bool stays = i < old && scratch->place[i] == 0;
    const bool read = stays && growth->rows[i] > 0;
    std::int32_t total = 0, read_total = 0;
    const std::int32_t at = count + team.scan(stays ? 1 : 0, &total);
    const std::int32_t row = 1 + opened + team.scan(read ? 1 : 0, &read_total);
    TokenId token = 0;
    std::int32_t parent = -1, was = 0;
    float value = 0.0f;
    if (stays) {
      was = growth->rows[i];
      token = growth->tokens[i];
      parent = growth->parents[i];
      value = growth->worth[i];
      scratch->place[i] = at;
    }
    team.sync();  // all of them are read, and places known
    if (stays) {
      growth->tokens[at] = token;
      growth->parents[at] = parent < 0 ? -1 : scratch->place[parent];
      growth->worth[at] = value;
      growth->rows[at] = read ? row : 0;
      growth->was[at] = was;
    }
    team.sync();
    count += total;
    opened += read_total;
  }
  std::int32_t open = 0;
  // The worth of a row's children is that of its node, which may have moved by now: `above`.
  for (std::int32_t first = 0; first < rows * width; first += team.size()) {
    const std::int32_t c = first + team.rank();
    const std::int8_t kept = c < rows * width ? scratch->kept[c] : std::int8_t{0};
    std::int32_t total = 0, open_total = 0;
    const std::int32_t at = count + team.scan(kept > 0 ? 1 : 0, &total);
    const std::int32_t row = 1 + opened + open + team.scan(kept == 2 ? 1 : 0, &open_total);
    if (kept > 0) {
      const std::int32_t node = scratch->open[c / width];
      const std::int32_t parent = node < 0 ? -1 : scratch->place[node];
      const float above = parent < 0 ? 1.0f : growth->worth[parent];
      const float share = in.shares[c];
      const Column column = in.columns[c];
      growth->tokens[at] =
          in.token_ids == nullptr ? static_cast<TokenId>(column) : in.token_ids[column];
      growth->parents[at] = parent;
      growth->worth[at] = share < 1.0f ? above * share : above;
      growth->rows[at] = kept == 2 ? row : 0;
      growth->was[at] = 0;
    }
    count += total;
    open += open_total;
    team.sync();
  }
  if (team.rank() == 0) {
    growth->count = count;
    growth->num_open = open;
    growth->num_rows = 1 + opened + open;
  }
  team.sync();
}

// The grown tree as drafts of the text of `len` tokens, the most valuable first.
template <Team TeamT>
SPECDEC_HD inline void propose_growth(const TeamT& team, const DraftGrowth* growth,
                                      std::int32_t len, ProposedDraft* to,
                                      DraftGrowthScratch* scratch) {
  const std::int32_t count = growth->count;
  for (std::int32_t i = team.rank(); i < count; i += team.size()) {
    std::int32_t place = 0;
    for (std::int32_t j = 0; j < count; ++j) {
      const float mine = growth->worth[i], theirs = growth->worth[j];
      place += theirs > mine || (theirs == mine && j < i) ? 1 : 0;
    }
    scratch->place[i] = place;
  }
  team.sync();
  for (std::int32_t i = team.rank(); i < count; i += team.size()) {
    const std::int32_t place = scratch->place[i], parent = growth->parents[i];
    to->tokens[place] = growth->tokens[i];
    to->parents[place] = parent < 0 ? -1 : scratch->place[parent];
    to->survival[place] = growth->worth[i];
  }
  if (team.rank() == 0) {
    to->len = len;
    to->count = count;
  }
  team.sync();
}

}  // namespace specdec
