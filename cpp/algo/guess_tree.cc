#include "algo/guess_tree.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>

#include "base/check.h"

namespace specdec {

GuessRates::GuessRates(std::int32_t num_heads, std::int32_t num_ranks, const double* prior,
                       double weight, double memory)
    : num_ranks_(num_ranks),
      memory_(memory),
      hits_(prior, prior + std::int64_t{num_heads} * num_ranks),
      trials_(static_cast<std::size_t>(num_heads), weight) {
  for (double& hits : hits_) hits *= weight;
}

bool GuessRates::observe(std::int32_t head, const TokenId* guesses, std::int32_t count,
                         TokenId token) {
  double& trials = trials_[static_cast<std::size_t>(head)];
  double* const hits = hits_.data() + std::int64_t{head} * num_ranks_;
  if (trials >= memory_) {
    const double keep = (memory_ - 1.0) / trials;
    for (std::int32_t rank = 0; rank < num_ranks_; ++rank) hits[rank] *= keep;
    trials *= keep;
  }
  trials += 1.0;
  const TokenId* const found = std::find(guesses, guesses + count, token);
  if (found == guesses + count) return false;
  hits[found - guesses] += 1.0;
  return true;
}

double GuessRates::rate(std::int32_t head, std::int32_t rank) const {
  return hits_[static_cast<std::size_t>(std::int64_t{head} * num_ranks_ + rank)] /
         std::max(trials(head), 1e-9);
}

std::vector<GuessNode> guess_nodes(const std::vector<std::vector<std::int32_t>>& choices,
                                   std::int32_t num_heads, std::int32_t num_ranks) {
  std::map<std::vector<std::int32_t>, std::int32_t> index;
  std::vector<GuessNode> nodes;
  nodes.reserve(choices.size());
  for (std::size_t i = 0; i < choices.size(); ++i) {
    const std::vector<std::int32_t>& choice = choices[i];
    SPECDEC_REQUIRE(!choice.empty() && choice.size() <= static_cast<std::size_t>(num_heads),
                    "choices[", i, "] has ", choice.size(), " ranks: give 1..", num_heads,
                    ", one of each head");
    const std::int32_t rank = choice.back();
    SPECDEC_REQUIRE(rank >= 0 && rank < num_ranks, "choices[", i, "] has rank ", rank,
                    ": ranks are 0..", num_ranks - 1);
    GuessNode node{static_cast<std::int32_t>(choice.size()) - 1, rank, -1};
    if (choice.size() > 1) {
      const auto parent = index.find({choice.begin(), choice.end() - 1});
      SPECDEC_REQUIRE(parent != index.end(), "choices[", i,
                      "]: its parent does not stand before it");
      node.parent = parent->second;
    }
    index.emplace(choice, static_cast<std::int32_t>(i));
    nodes.push_back(node);
  }
  return nodes;
}

std::vector<double> guess_worth(const std::vector<GuessNode>& nodes, const GuessRates& rates) {
  std::vector<double> worth;
  worth.reserve(nodes.size());
  for (const GuessNode& node : nodes) {
    const double above = node.parent < 0 ? 1.0 : worth[static_cast<std::size_t>(node.parent)];
    worth.push_back(above * rates.rate(node.head, node.rank));
  }
  return worth;
}

std::vector<GuessNode> likeliest_first(const std::vector<GuessNode>& nodes,
                                       std::vector<double>* worth) {
  std::vector<std::size_t> order(nodes.size()), place(nodes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  // Stable: of equal ones the earlier, so a parent, comes first.
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return (*worth)[a] > (*worth)[b]; });
  for (std::size_t i = 0; i < order.size(); ++i) place[order[i]] = i;
  std::vector<GuessNode> sorted;
  std::vector<double> values;
  sorted.reserve(nodes.size());
  values.reserve(nodes.size());
  for (const std::size_t i : order) {
    GuessNode node = nodes[i];
    if (node.parent >= 0) {
      node.parent = static_cast<std::int32_t>(place[static_cast<std::size_t>(node.parent)]);
    }
    sorted.push_back(node);
    values.push_back((*worth)[i]);
  }
  worth->swap(values);
  return sorted;
}

}  // namespace specdec
