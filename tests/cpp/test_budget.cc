// The draft budget against definitions that try everything.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "engine/budget.h"

namespace specdec {
namespace {

using Nodes = std::vector<double>;

struct Options {
  std::vector<double> gains, rows;
};

// A step in every respect that matters to its time, with costs drawn at random.
struct BudgetWorld {
  explicit BudgetWorld(std::mt19937& random) {
    std::uniform_real_distribution<double> unit(0.0, 1.0);
    const double knee = 1.0 + 2.0 * unit(random);
    cost = StepCost({1, 2, 5, 20}, {1.0, 1.0 + 0.2 * unit(random), knee, knee + 8 * unit(random)});
    if (random() % 3 == 0) drafting = {0.3 * unit(random), 0.2 * unit(random)};
    if (random() % 4 == 0) spent = unit(random);
    limit = static_cast<int>(random() % 12);
    if (random() % 3 == 0) {
      prompts.rows = static_cast<int>(1 + random() % 30);
      prompts.readers = static_cast<int>(1 + random() % 4);
      prompts.decoding = static_cast<int>(1 + random() % 3);
    }
  }
  // `rows`: of those that decode.
  StepBase base(int rows, double tokens) const {
    return {cost, rows + prompts.rows, tokens, limit, drafting, spent, prompts};
  }
  // Tokens per second.
  double value(int base_rows, double tokens, double rows, double most) const {
    return tokens / seconds(base_rows, rows, most);
  }
  double seconds(int base_rows, double rows, double most) const {
    // What a draft adds, beside the rows that are read anyway, each of who waits pays for.
    const double beside = base_rows + prompts.rows;
    double added = cost(beside + rows) - cost(beside);
    if (rows > 0.0) added += drafting.fixed + most * drafting.each;
    const double waiting = prompts.decoding + prompts.readers;
    return cost(base_rows) + spent + added * waiting / prompts.decoding;
  }

  StepCost cost;
  DraftCost drafting;
  double spent = 0.0;
  int limit = 0;
  PromptShare prompts;
};

// The nodes that an offer keeps, ascending: a parent before its children.
std::vector<int> kept_nodes(const Offer& offer) {
  const auto worth = [&](int i) { return offer.gains[i] > 0.0 ? offer.gains[i] : 0.0; };
  std::vector<int> order(static_cast<std::size_t>(offer.length));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return worth(a) > worth(b); });
  order.resize(static_cast<std::size_t>(offer.chosen));
  std::sort(order.begin(), order.end());
  return order;
}

// What a step makes of the best value: what gains too little is left.
double or_plain(double best, double plain) { return best < kLeastSpeedup * plain ? plain : best; }

// The best value over all ways to take some of the first nodes, or one option, of each request.
double best_by_trying(const BudgetWorld& world, int base, double tokens, double rows, double most,
                      const std::vector<Nodes>& nodes, std::size_t request) {
  if (request == nodes.size()) return world.value(base, tokens, rows, most);
  double best = -1e300, gain = 0.0;
  for (std::size_t n = 0; n <= nodes[request].size() && rows + n <= world.limit; ++n) {
    if (n > 0) gain += nodes[request][n - 1];
    best = std::max(best, best_by_trying(world, base, tokens + gain, rows + n,
                                         std::max(most, 1.0 * n), nodes, request + 1));
  }
  return best;
}

TEST(chains_are_cut_to_the_best_of_all_combinations) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  int drafted = 0, refused = 0;
  Budget budget;
  for (int round = 0; round < 1000; ++round) {
    BudgetWorld world(random);
    world.drafting.each = 0.0;  // it couples the chains: see the next test
    const int requests = 1 + static_cast<int>(random() % 3);
    std::vector<Nodes> nodes(requests);
    std::vector<Offer> offers;
    for (Nodes& chain : nodes) {
      double alive = 1.0;
      for (int i = static_cast<int>(random() % 6); i > 0; --i)
        chain.push_back(alive *= unit(random));
      offers.push_back({chain.data(), static_cast<int>(chain.size())});
    }
    const int base = requests + static_cast<int>(random() % 4);
    const Cut cut = budget.cut(offers, world.base(base, requests));
    double tokens = requests, rows = 0.0, most = 0.0;
    for (int i = 0; i < requests; ++i) {
      for (int d = 0; d < offers[i].chosen; ++d) tokens += nodes[i][d];
      rows += offers[i].chosen;
      most = std::max(most, 1.0 * offers[i].chosen);
      (offers[i].chosen > 0 ? drafted : refused) += !nodes[i].empty();
    }
    CHECK(rows <= world.limit);
    CHECK(std::abs(cut.tokens - tokens) < 1e-12 && cut.rows == rows);
    const double value = world.value(base, tokens, rows, most);
    const double best = or_plain(best_by_trying(world, base, requests, 0.0, 0.0, nodes, 0),
                                 world.value(base, requests, 0.0, 0.0));
    CHECK(std::abs(value - best) <= 1e-12 * std::max(1.0, std::abs(best)));
    CHECK(std::abs(cut.tokens / cut.seconds - best) <= 1e-12 * best);
    const double plain = world.seconds(base, 0.0, 0.0);
    CHECK(std::abs(cut.speedup() * requests / plain - tokens / cut.seconds) <= 1e-12);
  }
  CHECK(drafted > 300 && refused > 300);
  CHECK_EQ(budget.stats.weighed, drafted + refused);
  CHECK_EQ(budget.stats.refused, refused);
}

TEST(a_dear_draft_model_shortens_the_chain_of_one_request) {
  std::mt19937 random(8);
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  for (int round = 0; round < 300; ++round) {
    BudgetWorld world(random);
    std::vector<Nodes> nodes(1);
    double alive = 1.0;
    for (int i = 0; i < 8; ++i) nodes[0].push_back(alive *= unit(random));
    std::vector<Offer> offers{{nodes[0].data(), 8}};
    Budget budget;
    const Cut cut = budget.cut(offers, world.base(2, 1.0));
    const double best =
        or_plain(best_by_trying(world, 2, 1.0, 0.0, 0.0, nodes, 0), world.value(2, 1.0, 0.0, 0.0));
    CHECK(std::abs(world.value(2, cut.tokens, cut.rows, cut.rows) - best) <= 1e-12 + 1e-12 * best);
  }
  const StepCost flat({1, 128}, {1.0, 1.0});
  const Nodes chain{0.5, 0.25, 0.125, 0.0625};
  const auto chosen = [&](DraftCost drafting) {
    std::vector<Offer> offers{{chain.data(), 4}};
    Budget().cut(offers, {flat, 1, 1.0, 100, drafting});
    return offers[0].chosen;
  };
  CHECK_EQ(chosen({}), 4);
  CHECK_EQ(chosen({0.0, 0.1}), 2);
  CHECK_EQ(chosen({0.0, 0.3}), 1);
  CHECK_EQ(chosen({0.0, 0.6}), 0);
  CHECK_EQ(chosen({0.8, 0.0}), 4);
  CHECK_EQ(chosen({1.0, 0.0}), 0);
}

TEST(a_tree_keeps_parents_and_a_chain_is_a_tree) {
  std::mt19937 random(9);
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  int kept = 0;
  for (int round = 0; round < 500; ++round) {
    const BudgetWorld world(random);
    std::vector<Nodes> gains(1 + random() % 3);
    std::vector<std::vector<int>> parents(gains.size());
    std::vector<Offer> offers, sorted_offers;
    std::vector<Nodes> sorted;
    for (std::size_t b = 0; b < gains.size(); ++b) {
      for (int i = 0; i < static_cast<int>(random() % 10); ++i) {
        const int parent = static_cast<int>(random() % (i + 1)) - 1;
        // Ties with the parent, too.
        const double rate = random() % 4 == 0 ? 1.0 : unit(random);
        parents[b].push_back(parent);
        gains[b].push_back(rate * (parent < 0 ? 1.0 : gains[b][parent]));
      }
      sorted.push_back(gains[b]);
      std::sort(sorted[b].rbegin(), sorted[b].rend());
    }
    for (std::size_t b = 0; b < gains.size(); ++b) {
      offers.push_back({gains[b].data(), static_cast<int>(gains[b].size())});
      sorted_offers.push_back({sorted[b].data(), static_cast<int>(sorted[b].size())});
    }
    const StepBase step = world.base(3, 1.0 * gains.size());
    const Cut cut = Budget().cut(offers, step);
    const Cut same = Budget().cut(sorted_offers, step);
    CHECK_EQ(cut.tokens, same.tokens);
    for (std::size_t b = 0; b < gains.size(); ++b) {
      const std::vector<int> nodes = kept_nodes(offers[b]);
      CHECK_EQ(static_cast<int>(nodes.size()), offers[b].chosen);
      CHECK_EQ(offers[b].chosen, sorted_offers[b].chosen);
      CHECK(std::is_sorted(nodes.begin(), nodes.end()));
      std::vector<bool> has(gains[b].size());
      for (const int node : nodes) {
        has[node] = true;
        ++kept;
        CHECK(parents[b][node] < 0 || has[parents[b][node]]);
      }
    }
  }
  CHECK(kept > 500);
}

TEST(options_of_one_request_are_the_best_of_all) {
  std::mt19937 random(10);
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  int beyond_hull = 0;
  for (int round = 0; round < 2000; ++round) {
    const BudgetWorld world(random);
    Options options;
    for (int k = static_cast<int>(random() % 7); k >= 0; --k) {
      options.rows.push_back(0.5 + 10.0 * unit(random));
      options.gains.push_back(2.0 * unit(random) - 0.2);
    }
    const int size = static_cast<int>(options.rows.size());
    std::vector<Offer> offers{{options.gains.data(), size, options.rows.data()}};
    const int base = 1 + static_cast<int>(random() % 4);
    const Cut cut = Budget().cut(offers, world.base(base, 1.0));
    double best = world.value(base, 1.0, 0.0, 0.0);
    for (int k = 0; k < size; ++k) {
      if (options.rows[k] > world.limit) continue;
      const double gain = std::max(0.0, options.gains[k]);
      best = std::max(best, world.value(base, 1.0 + gain, options.rows[k], options.rows[k]));
    }
    best = or_plain(best, world.value(base, 1.0, 0.0, 0.0));
    const int k = offers[0].chosen;
    CHECK(std::abs(cut.rows - (k == 0 ? 0.0 : options.rows[k - 1])) < 1e-9);
    CHECK(std::abs(world.value(base, cut.tokens, cut.rows, cut.rows) - best) <= 1e-9);
    // Some are best although a mixture of two others would beat them.
    for (int a = 0; a < size && k > 0; ++a) {
      const double share = options.rows[k - 1] / options.rows[a];
      beyond_hull += share < 1.0 && options.gains[a] * share > options.gains[k - 1];
    }
  }
  CHECK(beyond_hull > 20);
}

TEST(options_and_chains_share_a_step) {
  std::mt19937 random(11);
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  double worst = 1.0;
  for (int round = 0; round < 400; ++round) {
    BudgetWorld world(random);
    world.drafting.each = 0.0;
    std::vector<Nodes> chains(1);
    double alive = 1.0;
    for (int i = 0; i < 5; ++i) chains[0].push_back(alive *= unit(random));
    std::vector<Options> options(2);
    double best = 0.0;
    for (Options& o : options) {
      double gain = 0.0;
      for (double rows = 1.0 + unit(random); rows < 12.0; rows *= 2.0) {
        o.rows.push_back(rows);
        o.gains.push_back(gain += unit(random) / rows);
      }
    }
    for (std::size_t a = 0; a <= options[0].rows.size(); ++a) {
      for (std::size_t b = 0; b <= options[1].rows.size(); ++b) {
        const double rows =
            (a > 0 ? options[0].rows[a - 1] : 0.0) + (b > 0 ? options[1].rows[b - 1] : 0.0);
        const double gain =
            (a > 0 ? options[0].gains[a - 1] : 0.0) + (b > 0 ? options[1].gains[b - 1] : 0.0);
        if (rows > world.limit) continue;
        best = std::max(best, best_by_trying(world, 3, 3.0 + gain, rows, 0.0, chains, 0));
      }
    }
    std::vector<Offer> offers{{chains[0].data(), 5}};
    for (const Options& o : options)
      offers.push_back({o.gains.data(), static_cast<int>(o.rows.size()), o.rows.data()});
    const Cut cut = Budget().cut(offers, world.base(3, 3.0));
    CHECK(cut.rows <= world.limit);
    best = or_plain(best, world.value(3, 3.0, 0.0, 0.0));
    worst = std::min(worst, cut.tokens / cut.seconds / best);
    CHECK(cut.tokens / cut.seconds <= best * (1 + 1e-12));
  }
  CHECK(worst > 0.9);  // not exact, as knapsacks are; never far off
}

TEST(what_gains_too_little_is_left) {
  // A draft that is sure to be right and costs nothing, in a step of `requests`: n + 1 tokens for
  // n.
  const StepCost cost({1, 2, 128}, {1.0, 1.0, 1.0});
  const Nodes sure{1.0};
  for (const int requests : {1, 8, 49, 51, 64}) {
    std::vector<Offer> offers{{sure.data(), 1}};
    const Cut cut = Budget().cut(offers, {cost, requests, 1.0 * requests, 100});
    CHECK_EQ(offers[0].chosen, requests < 50 ? 1 : 0);
    CHECK_EQ(cut.rows, 1.0 * offers[0].chosen);
    CHECK(offers[0].chosen == 1 || cut.speedup() == 1.0);
  }
}

TEST(prompts_make_no_draft_look_cheap) {
  // 8 + rows, four requests that decode: a token takes 3 seconds. Beside prompts of any length a
  // draft adds 1, and with four that read them 2.
  const StepCost cost({1, 2, 128}, {9.0, 10.0, 136.0});
  const auto kept = [&](double chance, const PromptShare& prompts) {
    std::vector<Nodes> gains(4, Nodes{chance});
    std::vector<Offer> offers;
    for (const Nodes& one : gains) offers.push_back({one.data(), 1});
    const int rows = 4 + prompts.rows;
    const StepBase step{.cost = cost, .rows = rows, .tokens = 4.0, .prompts = prompts};
    return static_cast<int>(Budget().cut(offers, step).rows);
  };
  for (const int rows : {1, 40, 1000}) {
    CHECK_EQ(kept(0.5, {rows, 0, 4}), 4);
    CHECK_EQ(kept(0.3, {rows, 0, 4}), 0);
    CHECK_EQ(kept(0.8, {rows, 4, 4}), 4);
    CHECK_EQ(kept(0.6, {rows, 4, 4}), 0);
  }
  const StepBase step{.cost = cost, .rows = 44, .tokens = 4.0, .prompts = {40, 4, 4}};
  CHECK_EQ(second_worth(step), 2.0 * 4.0 / 12.0);
}

TEST(what_is_no_number_is_worth_nothing) {
  const StepCost flat({1, 128}, {1.0, 1.1});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Nodes gains{0.9, nan, 0.5, -1.0};
  std::vector<Offer> offers{{gains.data(), 4}};
  const Cut cut = Budget().cut(offers, {flat, 1, 1.0, 100});
  CHECK_EQ(offers[0].chosen, 2);
  CHECK_EQ(kept_nodes(offers[0]), (std::vector<int>{0, 2}));
  CHECK(std::abs(cut.tokens - 2.4) < 1e-12);
  const std::vector<double> rows{1.0, 2.0, nan, 0.0};
  offers = {{gains.data(), 4, rows.data()}};
  Budget().cut(offers, {flat, 1, 1.0, 100});
  CHECK_EQ(offers[0].chosen, 1);
  Budget().cut(offers, {flat, 1, 1.0, -3});  // no room at all
  CHECK_EQ(offers[0].chosen, 0);
  CHECK_EQ(Budget().cut({}, {flat, 4, 4.0, 100}).speedup(), 1.0);
}

TEST(why_nothing_was_drafted_is_counted) {
  const StepCost dear({1, 5}, {1.0, 5.0});
  const Nodes chain{0.5, 0.2};
  const Nodes none;
  std::vector<Offer> offers{{chain.data(), 2}, {none.data(), 0}};
  Budget budget;
  for (int i = 0; i < 3; ++i) budget.cut(offers, {dear, 1, 1.0, 100});
  CHECK_EQ(budget.stats.weighed, 3);  // an empty offer is none
  CHECK_EQ(budget.stats.refused, 3);
  CHECK_EQ(budget.stats.refused_tokens, 1.5);
  CHECK_EQ(budget.stats.refused_price, 6.0);
}

}  // namespace
}  // namespace specdec
