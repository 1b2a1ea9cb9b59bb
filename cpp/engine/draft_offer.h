// What sources have found for a request's next step, merged into one tree, before the budget cuts
// it. This is the one place where drafts of several sources meet: a path that two of them propose
// is one path; the nodes stand in the order of their chances, so that any number of the first ones
// is the best tree of that many nodes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "engine/chain_history.h"
#include "tree/draft_tree.h"

namespace specdec {

// One request's own past of each source, and that of all requests with its salt.
using SourceRates = std::array<ChainRates, kNumDraftSources>;

class DraftOffer {
 public:
  static constexpr int kGolden = 0;  // the node that drafts hang under

  // What a source says of a node under its parent: tokens that agreed with what was found there,
  // edges to the golden token where the source's chances depend on them (else 1), and the node's
  // part of what was found, in (0, 1]; 0: it did not propose it.
  struct Estimate {
    std::int16_t match = 0, depth = 0;
    float share = 0.0f;
  };

  DraftOffer() { clear(); }
  void clear() {
    tree_.reset(0);
    survival_[kGolden] = 1.0;
  }
  bool empty() const { return tree_.size == 1; }
  int num_drafts() const { return tree_.num_drafts(); }

  // The child of `parent` with this token, made if there is none. -1: there is no room. Its chance
  // is the parent's times the share times what `own` and `shared` have seen of such drafts; null:
  // times what is taken for it before anything was seen, so that the tree says nothing of the past.
  // Where several sources propose it see Chance; it counts for what is below the node, too.
  int add(int parent, TokenId token, DraftSource source, const Estimate& estimate,
          const SourceRates* own, const SourceRates* shared);
  // Puts the nodes in order. What add() said of them before counts no more.
  void sort();
  // Takes out nodes, and what is below them: of the first `count` ones those that placed[node] is
  // negative of. The others keep their order; it is as if nobody had proposed them.
  void drop(const std::int32_t* placed, int count);
  // The first `count` drafts under the golden token of `tree`.
  void take(int count, DraftTree* tree) const;

  // [num_drafts()] the chance that each draft and all above it are accepted.
  const double* survival() const { return survival_.data() + 1; }
  // What `count` tokens that were decided say about the sources' chances, taken or not.
  void observe(const TokenId* tokens, int count, SourceRates* own, SourceRates* shared) const;
  // Tokens that the first `count` drafts are expected to bring, and the chance that one of those
  // right under the golden token is accepted.
  double expected(int count) const;
  double first_chance(int count) const;
  // How many drafts `source` has proposed.
  int proposed(DraftSource source) const;

  TokenId token(int draft) const { return tree_.tokens[draft]; }
  int parent(int draft) const { return tree_.parents[draft]; }
  // Who has proposed a draft.
  SourceBits sources(int draft) const;

 private:
  // That a node is accepted where its parent was. Sources that find it in texts have mostly found
  // the same text, and the best of their estimates is the one that errs highest: their mean counts.
  // What a network, a form of the output or an edit says is news: then the better of the two.
  struct Chance {
    void add(double chance, DraftSource source);
    double value() const { return std::max(text, other); }
    double text = 0.0, other = 0.0;
    int texts = 0;
  };
  int find(int parent, TokenId token) const;

  DraftTree tree_;  // node 0 stands for the golden token
  std::array<double, kMaxStepTokens> survival_{};
  std::array<Chance, kMaxStepTokens> chance_{};
  std::array<std::array<Estimate, kNumDraftSources>, kMaxStepTokens> estimates_{};
};

}  // namespace specdec
