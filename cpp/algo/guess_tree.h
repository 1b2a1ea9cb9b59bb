// Static trees of guesses, for heads that each guess one token further ahead (Medusa): node i is
// rank r of head h's guesses, behind a node of head h - 1. What a node is worth follows from how
// often each head's guess of that rank was right.
#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"

namespace specdec {

struct GuessNode {
  std::int32_t head = 0, rank = 0;
  std::int32_t parent = -1;  // an earlier node; -1: the golden token
};

// How often each head's guess of each rank was right, among the texts seen lately. A head is asked
// only where all heads before it had the true token among their guesses: that is where a node of it
// can be accepted.
class GuessRates {
 public:
  // prior [num_heads, num_ranks]: rates to start from; `weight` observations' worth of them.
  // memory: observations that count; older ones fade.
  GuessRates(std::int32_t num_heads, std::int32_t num_ranks, const double* prior, double weight,
             double memory);

  std::int32_t num_heads() const { return static_cast<std::int32_t>(trials_.size()); }
  std::int32_t num_ranks() const { return num_ranks_; }
  // The token behind head `head`'s guesses [count <= num_ranks] is known; false if it is not among
  // them.
  bool observe(std::int32_t head, const TokenId* guesses, std::int32_t count, TokenId token);
  // The ranks of a head sum to at most 1.
  double rate(std::int32_t head, std::int32_t rank) const;
  double trials(std::int32_t head) const { return trials_[static_cast<std::size_t>(head)]; }

 private:
  std::int32_t num_ranks_;
  double memory_;
  std::vector<double> hits_, trials_;  // [num_heads, num_ranks], [num_heads]
};

// Medusa choices (a path of ranks each) as nodes, in their order. Errors: std::invalid_argument for
// a choice without its parent in front of it, or of a head or rank that there is not.
std::vector<GuessNode> guess_nodes(const std::vector<std::vector<std::int32_t>>& choices,
                                   std::int32_t num_heads, std::int32_t num_ranks);

// [n]: the probability that each node is accepted, the product of the rates along its path. A child
// is never worth more than its parent.
std::vector<double> guess_worth(const std::vector<GuessNode>& nodes, const GuessRates& rates);

// The nodes in the order in which a growing budget takes them: those that are worth most first,
// parents before children, of equal ones the earlier. `worth` is put into that order, too.
std::vector<GuessNode> likeliest_first(const std::vector<GuessNode>& nodes,
                                       std::vector<double>* worth);

}  // namespace specdec
