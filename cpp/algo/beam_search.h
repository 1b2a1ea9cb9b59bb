// Beam search over a drafter's scores: one depth of one request's beams by a team, and at the end
// the draft tree of the beams that are left.
//
// A beam is extended by the best scores of its row alone, which the caller has found: their
// log-softmax at the request's temperature is added to the beam's log-probability. The num_beams
// best of all extensions are the next depth's beams: larger sum first; on ties the beam that stood
// first, then its better score. Sums are single precision, taken in the same order by every team.
//
// Scores of -infinity are no candidates; a row with NaN or +infinity has none. So a depth may have
// fewer beams than num_beams, and a request whose rows all fail keeps the beams that it had.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "algo/proposed_draft.h"
#include "algo/team.h"
#include "base/types.h"

namespace specdec {

// Best scores of a row that are looked at, at most.
inline constexpr std::int32_t kMaxBeamScores = 64;
// Beams of a request that are rows of a pass: behind the first depth there are two drafts in each.
inline constexpr std::int32_t kMaxBeamRows = kMaxDraftLen / 2;

// The beams of a request: node [depth][place], best first; token -1 and log-probability -infinity
// where there is none. length * width <= kMaxDraftLen.
struct BeamNodes {
  TokenId* tokens;
  std::int32_t* parents;  // place in the depth before
  float* log_probs;       // of the path
  std::int32_t length, width;
};

// The best scores of each row of one depth, best first: [rows, count].
struct BeamScores {
  const float* scores;
  const std::int64_t* columns;
  const TokenId* token_ids;  // of each column; null: the column
  std::int32_t count, num_scores;
};

// What a request asked for.
struct BeamLimits {
  std::int32_t num_beams, length;
  float temperature;  // finite and above 0, or no row has candidates
};

// The rows of the next pass: which row of this one each continues, and its token. Places without
// a beam continue the request's first row, with token 0.
struct BeamRows {
  std::int32_t* rows;
  TokenId* tokens;
  std::int32_t first;  // the request's first row of this pass
};

// Working memory of a team.
struct BeamScratch {
  float terms[kMaxBeamScores];
  float highest[kMaxBeamRows], log_total[kMaxBeamRows];
  std::int32_t candidates[kMaxBeamRows];  // of each row
};

// Counts the candidates of a row and sums their exponentials: in the same order for every team. A
// row with NaN or +infinity has none; what follows a score that is out of order is not looked at.
template <Team TeamT>
SPECDEC_HD inline void weigh_beam_row(const TeamT& team, const BeamScores& in, std::int32_t row,
                                      float temperature, BeamScratch* scratch) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float* scores = in.scores + std::int64_t{row} * in.count;
  const std::int64_t* columns = in.columns + std::int64_t{row} * in.count;
  bool is_bad = false;
  for (std::int32_t i = team.rank(); i < in.count; i += team.size()) {
    is_bad = is_bad || !(scores[i] < kInfinity);
  }
  const bool row_is_bad = team.any(is_bad);
  const std::int32_t kept = count_until_bad(team, in.count, [&](std::int32_t i) {
    return scores[i] > -kInfinity && (i == 0 || scores[i] <= scores[i - 1]) && columns[i] >= 0 &&
           columns[i] < in.num_scores;
  });
  const std::int32_t count = row_is_bad ? 0 : kept;
  const float highest = count > 0 ? scores[0] : 0.0f;
  for (std::int32_t i = team.rank(); i < kMaxBeamScores; i += team.size()) {
    scratch->terms[i] = i < count ? expf((scores[i] - highest) / temperature) : 0.0f;
  }
  team.sync();
  for (std::int32_t half = kMaxBeamScores / 2; half > 0; half /= 2) {
    for (std::int32_t i = team.rank(); i < half; i += team.size()) {
      scratch->terms[i] += scratch->terms[i + half];
    }
    team.sync();
  }
  if (team.rank() == 0) {
    scratch->highest[row] = highest;
    scratch->log_total[row] = count > 0 ? logf(scratch->terms[0]) : 0.0f;
    scratch->candidates[row] = count;
  }
  team.sync();
}

// The beams of `depth` from the scores of those before (one row at depth 0, else `nodes.width`).
// *reached: depths that the request's beams have; written here, as is everything of `next`. A
// request that has its length, or whose rows have no candidates, keeps the beams that it had.
template <Team TeamT>
SPECDEC_HD inline void grow_beams(const TeamT& team, const BeamScores& in, const BeamLimits& limits,
                                  std::int32_t depth, const BeamNodes& nodes, std::int32_t* reached,
                                  const BeamRows& next, BeamScratch* scratch) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::int32_t width = nodes.width, rows = depth == 0 ? 1 : width;
  const std::int32_t beams = limits.num_beams < width ? limits.num_beams : width;
  const bool grows = depth < limits.length && beams > 0 && (depth == 0 || *reached == depth) &&
                     limits.temperature > 0.0f && limits.temperature < kInfinity;
  const auto log_prob = [&](std::int32_t row) {
    return depth == 0 ? 0.0f : nodes.log_probs[(depth - 1) * width + row];
  };
  for (std::int32_t j = team.rank(); j < width; j += team.size()) {
    nodes.tokens[depth * width + j] = -1;
    nodes.parents[depth * width + j] = -1;
    nodes.log_probs[depth * width + j] = -kInfinity;
    next.rows[j] = next.first;
    next.tokens[j] = 0;
  }
  bool has_candidates = false;
  for (std::int32_t row = 0; row < rows; ++row) {
    if (grows && log_prob(row) > -kInfinity) {
      weigh_beam_row(team, in, row, limits.temperature, scratch);
    } else {
      if (team.rank() == 0) scratch->candidates[row] = 0;
      team.sync();
    }
    has_candidates = has_candidates || scratch->candidates[row] > 0;
  }
  // More of a row than there are beams never continue.
  const auto candidates = [&](std::int32_t row) {
    return scratch->candidates[row] < beams ? scratch->candidates[row] : beams;
  };
  const auto sum = [&](std::int32_t row, std::int32_t i) {
    const float below = in.scores[std::int64_t{row} * in.count + i] - scratch->highest[row];
    return log_prob(row) + (below / limits.temperature - scratch->log_total[row]);
  };
  const std::int32_t places = in.count < beams ? in.count : beams;  // of a row
  for (std::int32_t c = team.rank(); grows && c < rows * places; c += team.size()) {
    const std::int32_t row = c / places, i = c % places;
    if (i >= candidates(row)) continue;
    const float mine = sum(row, i);
    if (!(mine > -kInfinity)) continue;  // too far below the best for a float
    // Its place: how many go before it. Those of its row that do stand in front of it.
    std::int32_t place = i;
    for (std::int32_t other = 0; other < rows && place < beams; ++other) {
      if (other == row) continue;
      for (std::int32_t k = 0; k < candidates(other) && place < beams; ++k) {
        const float theirs = sum(other, k);
        if (!(theirs > mine || (theirs == mine && other < row))) break;
        ++place;
      }
    }
    if (place >= beams) continue;
    const std::int64_t column = in.columns[std::int64_t{row} * in.count + i];
    const TokenId token =
        in.token_ids != nullptr ? in.token_ids[column] : static_cast<TokenId>(column);
    nodes.tokens[depth * width + place] = token;
    nodes.parents[depth * width + place] = row;
    nodes.log_probs[depth * width + place] = mine;
    next.rows[place] = next.first + row;
    next.tokens[place] = token;
  }
  team.sync();
  if (team.rank() == 0) {
    if (has_candidates) {
      *reached = depth + 1;
    } else if (depth == 0) {
      *reached = 0;
    }
  }
  team.sync();
}

// Working memory of merge_beams, a place for each node.
struct BeamMergeScratch {
  std::int32_t kept[kMaxDraftLen];   // on a path to one of the last beams
  std::int32_t place[kMaxDraftLen];  // in the tree
};

// The draft tree of the beams: what they have in common is one node, since a beam's extensions
// differ. The likeliest nodes come first, of equal ones the shallower, so a parent comes before its
// children. tokens, parents [length * width]: parents -1 for the golden token, and -1 behind the
// tree. sources [length * width]: depth * width + place of each one's node, written up to its size;
// null: not wanted. Returns the size, to every rank.
template <Team TeamT>
SPECDEC_HD inline std::int32_t merge_beams(const TeamT& team, const BeamNodes& nodes,
                                           std::int32_t reached, TokenId* tokens,
                                           std::int32_t* parents, std::int32_t* sources,
                                           BeamMergeScratch* scratch) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::int32_t width = nodes.width;
  // At least 0, whatever the memory holds.
  const std::int32_t most = reached < nodes.length ? reached : nodes.length;
  const std::int32_t depths = most > 0 ? most : 0;
  for (std::int32_t i = team.rank(); i < nodes.length * width; i += team.size()) {
    tokens[i] = -1;
    parents[i] = -1;
  }
  for (std::int32_t depth = depths - 1; depth >= 0; --depth) {
    for (std::int32_t j = team.rank(); j < width; j += team.size()) {
      const std::int32_t node = depth * width + j;
      bool kept = depth == depths - 1;
      for (std::int32_t child = node - j + width;
           depth + 1 < depths && child < node - j + 2 * width; ++child) {
        kept = kept || (scratch->kept[child] != 0 && nodes.parents[child] == j);
      }
      scratch->kept[node] = kept && nodes.tokens[node] >= 0 ? 1 : 0;
    }
    team.sync();
  }
  const std::int32_t count = depths * width;
  const auto key = [&](std::int32_t node) {
    return nodes.log_probs[node] > -kInfinity ? nodes.log_probs[node] : -kInfinity;
  };
  std::int32_t mine = 0;
  for (std::int32_t node = team.rank(); node < count; node += team.size()) {
    std::int32_t place = 0;
    for (std::int32_t other = 0; other < count; ++other) {
      const bool goes_before = key(other) > key(node) || (key(other) == key(node) && other < node);
      place += scratch->kept[other] != 0 && goes_before ? 1 : 0;
    }
    scratch->place[node] = place;
    mine += scratch->kept[node];
  }
  team.sync();
  for (std::int32_t node = team.rank(); node < count; node += team.size()) {
    if (scratch->kept[node] == 0) continue;
    const std::int32_t place = scratch->place[node], parent = nodes.parents[node];
    const std::int32_t depth = node / width, above = (depth - 1) * width + parent;
    tokens[place] = nodes.tokens[node];
    if (sources != nullptr) sources[place] = node;
    if (depth == 0) {
      parents[place] = -1;
    } else {  // -2: no draft, for who takes the tree
      const bool is_node = parent >= 0 && parent < width && scratch->kept[above] != 0;
      parents[place] = is_node ? scratch->place[above] : -2;
    }
  }
  std::int32_t size = 0;
  team.scan(mine, &size);
  team.sync();
  return size;
}

}  // namespace specdec
