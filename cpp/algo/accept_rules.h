// The rules of algo/acceptance.h, once for a thread and for a block of a device.
//
// What a rule has to know of a row's law comes from `Laws`, whose functions every rank calls in the
// same order with the same arguments and which give every rank the same answer:
//
//   TokenId weigh(node)        makes the law after that node the current one; 0, or
//                              kBadRow or kNothingAllowed
//   double weight(token)       of the current law, largest 1 before any rejection
//   double total()             sum of its weights
//   DraftLaw draft(node)       what that draft was drawn from; no columns: unusable
//   void subtract(q, mass)     the current law becomes its residual
//   TokenId draw(u)            from the current law
//   TokenId sample(node, u)    from the law after that node, or what weigh() says of it
//   double spread()            e^-entropy of the current law
//   bool has_probs(), replacement()
#pragma once

#include <cstdint>

#include "algo/accept.h"
#include "algo/fault.h"
#include "algo/residual.h"
#include "algo/team.h"
#include "base/philox.h"
#include "base/types.h"

namespace specdec {

enum class AcceptanceRule : std::uint8_t {
  kExactMatch,
  kRejection,
  kTypical,
  kThreshold,
  kBestBeam
};

// What callers name a rule, by its number. Lossless: the output has the target's own law, whatever
// the drafter.
struct AcceptanceRuleName {
  const char* name;
  bool lossless;
};
inline constexpr AcceptanceRuleName kAcceptanceRules[] = {{"exact_match", true},
                                                          {"rejection", true},
                                                          {"typical", false},
                                                          {"threshold", false},
                                                          {"best_beam", false}};
inline constexpr double kPosteriorThreshold = 0.09, kPosteriorAlpha = 0.3;  // typical

struct AcceptanceParams {
  AcceptanceRule rule = AcceptanceRule::kExactMatch;
  float posterior_threshold = static_cast<float>(kPosteriorThreshold);
  float posterior_alpha = static_cast<float>(kPosteriorAlpha);
  float threshold = 1.0f;  // threshold

  // False for a NaN in any place.
  SPECDEC_HD bool valid() const {
    return rule <= AcceptanceRule::kBestBeam && posterior_threshold > 0.0f &&
           posterior_threshold <= 1.0f && posterior_alpha > 0.0f && posterior_alpha <= 1.0f &&
           threshold > 0.0f && threshold <= 1.0f;
  }
};

// Working memory that all ranks see.
struct AcceptScratch {
  std::int32_t first_child[kMaxStepTokens];   // -1: none
  std::int32_t next_sibling[kMaxStepTokens];  // of larger index; -1: none
  EarlierSibling earlier[kMaxStepTokens];     // siblings that were held already
  std::int32_t depth[kMaxStepTokens];         // of an acceptable node, else -1
  double score[kMaxStepTokens];               // product of p along its path
};

// A request's drafts and what its random numbers are keyed by. The memory is shared.
struct DraftedTree {
  const TokenId* tokens;        // [size]
  const std::int32_t* parents;  // [size] a valid tree
  std::int32_t size;
  std::uint64_t seed;
  std::int64_t position;  // absolute position of the token after the root
};

// The counter of a node's numbers; a position that no text has wraps.
SPECDEC_HD inline std::uint64_t step_position(const DraftedTree& tree, std::int32_t depth) {
  return static_cast<std::uint64_t>(tree.position) + static_cast<std::uint64_t>(depth);
}

SPECDEC_HD inline double token_uniform_at(const DraftedTree& tree, std::int32_t depth) {
  return philox_uniform(tree.seed, step_position(tree, depth), RandomPurpose::kToken, 0);
}

SPECDEC_HD inline double accept_uniform_at(const DraftedTree& tree, std::int32_t depth,
                                           std::int32_t sibling) {
  return philox_uniform(tree.seed, step_position(tree, depth), RandomPurpose::kAccept,
                        static_cast<std::uint32_t>(sibling));
}

// Children of every node, in order of index.
template <Ranks TeamT>
SPECDEC_HD inline void link_children(const TeamT& team, const DraftedTree& tree,
                                     AcceptScratch* scratch) {
  for (std::int32_t i = team.rank(); i < tree.size; i += team.size()) scratch->first_child[i] = -1;
  team.sync();
  if (team.rank() == 0) {
    for (std::int32_t i = tree.size - 1; i > 0; --i) {
      std::int32_t& first = scratch->first_child[tree.parents[i]];
      scratch->next_sibling[i] = first;
      first = i;
    }
  }
  team.sync();
}

// Fills the rest of a result whose path is known: decided[node] is the token after the root and
// after each node of the path.
template <Ranks TeamT>
SPECDEC_HD inline void emit_path(const TeamT& team, const TokenId* decided, AcceptResult* out) {
  team.sync();
  if (team.rank() == 0) {
    const std::int32_t length = out->path_len;
    out->emitted[0] = decided[0];
    for (std::int32_t i = 0; i < length; ++i) out->emitted[i + 1] = decided[out->path[i]];
    const std::int32_t last = length == 0 ? 0 : out->path[length - 1];
    const bool bad = decided[last] < 0;
    out->bad_row = bad ? last : -1;
    out->num_emitted = length + (bad ? 0 : 1);
  }
  team.sync();
}

// What q says of its own draft, as a weight of a law of that total: the draft is kept by a number u
// if u times this lies below its weight in the law.
SPECDEC_HD inline double wanted_weight(const DraftLaw& q, double mass, double total) {
  return static_cast<double>(q.probs[q.column]) / mass * total;
}

// Holds the children of a node against the current law: the one that is kept; -1: none, and the
// current law is the residual.
template <Ranks TeamT, class Laws>
SPECDEC_HD inline std::int32_t hold_children(const TeamT& team, const DraftedTree& tree,
                                             std::int32_t first, std::int32_t depth, Laws& laws,
                                             AcceptScratch* scratch) {
  std::int32_t i = 0;
  for (std::int32_t node = first; node >= 0; node = scratch->next_sibling[node], ++i) {
    const DraftLaw q = laws.draft(node);
    if (q.columns == 0) return -1;
    const bool remove = !laws.replacement() && !fault(Fault::kSiblingNotRemoved);
    const double mass = draft_mass(q, scratch->earlier, remove ? i : 0);
    const double wanted = wanted_weight(q, mass, laws.total());
    const double weight = laws.weight(tree.tokens[node]);
    bool kept = accept_uniform_at(tree, depth, i) * wanted < weight;
    if (fault(Fault::kAlwaysAccept)) kept = true;
    if (fault(Fault::kConstantThreshold)) kept = 0.5 * wanted < weight;
    if constexpr (requires { laws.favourite(); }) {
      if (fault(Fault::kArgmaxMatch)) kept = tree.tokens[node] == laws.favourite();
    }
    if (kept) return node;
    team.sync();  // all have read them
    if (team.rank() == 0) scratch->earlier[i] = {tree.tokens[node], q.column};
    team.sync();
    if (fault(Fault::kResampleFromTarget)) continue;
    if (fault(Fault::kResidualNotUpdated) && scratch->next_sibling[node] >= 0) continue;
    laws.subtract(q, mass);
    // Nothing left: r was q up to rounding, so the draft is as good as a draw from r.
    if (!(laws.total() > 0.0)) return node;
  }
  return -1;
}

// decided: [size]; filled for the root and the nodes of out->path, other entries are left alone.
template <Ranks TeamT, class Laws>
SPECDEC_HD inline void accept_by_rejection(const TeamT& team, const DraftedTree& tree, Laws& laws,
                                           AcceptScratch* scratch, TokenId* decided,
                                           AcceptResult* out) {
  link_children(team, tree, scratch);
  std::int32_t node = 0, depth = 0;
  for (;; ++depth) {
    const std::int32_t first = scratch->first_child[node];
    std::int32_t kept = -1;
    TokenId token;
    if (first < 0) {
      token = laws.sample(node, token_uniform_at(tree, depth));
    } else if (token = laws.weigh(node); token >= 0) {
      // A leaf that is never looked at: the mistake of reading one row too few.
      const bool unseen = fault(Fault::kLastDraftUnverified) && scratch->first_child[first] < 0;
      kept = unseen ? first : hold_children(team, tree, first, depth, laws, scratch);
      if (kept >= 0) {
        token = tree.tokens[kept];
      } else {
        token = laws.draw(fault(Fault::kSharedUniform) ? accept_uniform_at(tree, depth, 0)
                                                       : token_uniform_at(tree, depth));
      }
    }
    if (team.rank() == 0) {
      decided[node] = token;
      if (kept >= 0) out->path[depth] = kept;
    }
    if (kept < 0) break;
    node = kept;
  }
  if (team.rank() == 0) out->path_len = depth;
  emit_path(team, decided, out);
}

// Marks the children of a node that a lossy rule finds acceptable; the current law is the node's.
template <Ranks TeamT, class Laws>
SPECDEC_HD inline void judge_children(const TeamT& team, const DraftedTree& tree,
                                      const AcceptanceParams& params, std::int32_t node, Laws& laws,
                                      AcceptScratch* scratch) {
  const bool typical = params.rule == AcceptanceRule::kTypical;
  double least = static_cast<double>(params.threshold);
  if (typical) {
    const double share = static_cast<double>(params.posterior_alpha) * laws.spread();
    const auto bound = static_cast<double>(params.posterior_threshold);
    least = share < bound ? share : bound;
  }
  std::int32_t i = 0;
  for (std::int32_t child = scratch->first_child[node]; child >= 0;
       child = scratch->next_sibling[child], ++i) {
    const double p = laws.weight(tree.tokens[child]) / laws.total();
    double q = 1.0;
    if (!typical && laws.has_probs()) {
      const DraftLaw draft = laws.draft(child);
      if (draft.columns == 0) return;
      q = static_cast<double>(draft.probs[draft.column]) /
          draft_mass(draft, scratch->earlier, laws.replacement() ? 0 : i);
      team.sync();
      if (team.rank() == 0) scratch->earlier[i] = {tree.tokens[child], draft.column};
      team.sync();
    }
    if (team.rank() == 0 && p > 0.0 && p >= least * q) {
      scratch->depth[child] = scratch->depth[node] + 1;
      scratch->score[child] = scratch->score[node] * p;
    }
  }
}

// The result whose path ends at `best`, `length` drafts deep, with `token` after it.
template <Ranks TeamT>
SPECDEC_HD inline void finish_path(const TeamT& team, const DraftedTree& tree, std::int32_t best,
                                   std::int32_t length, TokenId token, TokenId* decided,
                                   AcceptResult* out) {
  if (team.rank() == 0) {
    out->path_len = length;
    TokenId after = token;
    for (std::int32_t i = length, node = best; i >= 0; --i, node = tree.parents[node]) {
      decided[node] = after;
      if (i > 0) out->path[i - 1] = node;
      after = tree.tokens[node];
    }
  }
  emit_path(team, decided, out);
}

// Typical acceptance and the constant threshold. decided: as above.
template <Ranks TeamT, class Laws>
SPECDEC_HD inline void accept_deepest(const TeamT& team, const DraftedTree& tree,
                                      const AcceptanceParams& params, Laws& laws,
                                      AcceptScratch* scratch, TokenId* decided, AcceptResult* out) {
  link_children(team, tree, scratch);
  for (std::int32_t i = team.rank(); i < tree.size; i += team.size()) {
    scratch->depth[i] = i == 0 ? 0 : -1;
    scratch->score[i] = 1.0;
  }
  team.sync();
  std::int32_t best = 0;
  for (std::int32_t node = 0; node < tree.size; ++node) {
    if (scratch->depth[node] < 0) continue;
    const bool deeper = scratch->depth[node] > scratch->depth[best];
    const bool level = scratch->depth[node] == scratch->depth[best];
    if (deeper || (level && scratch->score[node] > scratch->score[best])) best = node;
    if (scratch->first_child[node] < 0 || laws.weigh(node) < 0) continue;
    judge_children(team, tree, params, node, laws, scratch);
    team.sync();
  }
  const std::int32_t length = scratch->depth[best];
  const TokenId token = laws.sample(best, token_uniform_at(tree, length));
  finish_path(team, tree, best, length, token, decided, out);
}

// The rule of ReDrafter's paper. Each draft of a tree of beams is kept with probability
// min(1, p / q), by a number of its own; of the deepest paths of such drafts the first stays. The
// token after it is drawn from max(p - q, 0), after a whole beam from p. LOSSY: that the longest of
// several beams is taken is not corrected. decided: as above.
template <Ranks TeamT, class Laws>
SPECDEC_HD inline void accept_best_beam(const TeamT& team, const DraftedTree& tree, Laws& laws,
                                        AcceptScratch* scratch, TokenId* decided,
                                        AcceptResult* out) {
  link_children(team, tree, scratch);
  for (std::int32_t i = team.rank(); i < tree.size; i += team.size()) {
    scratch->depth[i] = i == 0 ? 0 : -1;
  }
  team.sync();
  std::int32_t best = 0;
  for (std::int32_t node = 0; node < tree.size; ++node) {
    const std::int32_t depth = scratch->depth[node];
    if (depth < 0) continue;
    if (depth > scratch->depth[best]) best = node;
    if (scratch->first_child[node] < 0 || laws.weigh(node) < 0) continue;
    for (std::int32_t child = scratch->first_child[node]; child >= 0;
         child = scratch->next_sibling[child]) {
      const DraftLaw q = laws.draft(child);
      if (q.columns == 0) break;
      const double mass = draft_mass(q, scratch->earlier, 0);
      const double wanted = wanted_weight(q, mass, laws.total());
      const double weight = laws.weight(tree.tokens[child]);
      const bool kept = accept_uniform_at(tree, depth, child) * wanted < weight;
      if (team.rank() == 0 && kept) scratch->depth[child] = depth + 1;
    }
    team.sync();
  }
  const std::int32_t length = scratch->depth[best], next = scratch->first_child[best];
  const double u = token_uniform_at(tree, length);
  TokenId token = next < 0 ? laws.sample(best, u) : laws.weigh(best);
  if (next >= 0 && token >= 0) {
    const DraftLaw q = laws.draft(next);
    if (q.columns > 0) laws.subtract(q, draft_mass(q, scratch->earlier, 0));
    token = laws.total() > 0.0 ? laws.draw(u) : laws.sample(best, u);
  }
  finish_path(team, tree, best, length, token, decided, out);
}

// Exact match: the token after each node that may be kept is drawn, and a draft is kept if it is
// the token drawn after its parent. decided[node] is filled for those nodes.
template <Ranks TeamT, class Laws>
SPECDEC_HD inline void accept_drawn(const TeamT& team, const DraftedTree& tree, Laws& laws,
                                    AcceptScratch* scratch, TokenId* decided, AcceptResult* out) {
  for (std::int32_t node = 0; node < tree.size; ++node) {
    const std::int32_t parent = tree.parents[node];
    const bool kept =
        node == 0 || (scratch->depth[parent] >= 0 && tree.tokens[node] == decided[parent]);
    const std::int32_t depth = node == 0 ? 0 : kept ? scratch->depth[parent] + 1 : -1;
    const TokenId token = kept ? laws.sample(node, token_uniform_at(tree, depth)) : 0;
    if (team.rank() == 0) {
      scratch->depth[node] = depth;
      if (kept) decided[node] = token;
    }
    team.sync();
  }
  accept_greedy(team, tree.tokens, tree.parents, tree.size, decided, kMaxDraftLen, out);
}

// By the request's rule. Laws: of a law that is not greedy.
template <Ranks TeamT, class Laws>
SPECDEC_HD inline void accept_by_rule(const TeamT& team, const DraftedTree& tree,
                                      const AcceptanceParams& params, Laws& laws,
                                      AcceptScratch* scratch, TokenId* decided, AcceptResult* out) {
  switch (params.rule) {
    case AcceptanceRule::kTypical:
    case AcceptanceRule::kThreshold:
      return accept_deepest(team, tree, params, laws, scratch, decided, out);
    case AcceptanceRule::kBestBeam:
      if (laws.has_probs()) return accept_best_beam(team, tree, laws, scratch, decided, out);
      return accept_drawn(team, tree, laws, scratch, decided, out);
    case AcceptanceRule::kRejection:
      if (laws.has_probs()) return accept_by_rejection(team, tree, laws, scratch, decided, out);
      [[fallthrough]];  // rejection of drafts that were chosen without chance is exact match
    case AcceptanceRule::kExactMatch:
      return accept_drawn(team, tree, laws, scratch, decided, out);
  }
}

// Is this a tree of drafts that exist? Then no walk along it leaves the arrays.
SPECDEC_HD inline bool is_drafted_node(const DraftedTree& tree, std::int32_t node,
                                       std::int32_t vocab) {
  const std::int32_t parent = tree.parents[node];
  if (node == 0) return parent == -1;
  return parent >= 0 && parent < node && tree.tokens[node] >= 0 && tree.tokens[node] < vocab;
}

}  // namespace specdec
