// First tokens that are drawn side by side: those that requests would draw one after another. And
// logprobs of rows with NaN.
#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "algo/sample.h"
#include "base/thread_pool.h"
#include "check.h"
#include "engine/host_accept.h"
#include "engine/score_processor.h"

namespace specdec {
namespace {

constexpr int kTokens = 20'011, kDraws = 23;

TEST(first_tokens_drawn_side_by_side_are_those_drawn_alone) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> scores(static_cast<std::size_t>(kDraws) * kTokens);
  for (float& score : scores) score = normal(random);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  scores[4 * kTokens + 17] = nan;
  std::fill_n(scores.begin() + 9 * kTokens, kTokens, -std::numeric_limits<float>::infinity());
  const std::vector<SamplingLaw> laws = {{1.0f},     {0.3f},           {0.7f, 0, 0.9f},
                                         {1.2f, 40}, {1.0f, 20, 0.8f}, {0.9f, 0, 1.0f, 0.05f}};
  HostAcceptor acceptor(kTokens, {});
  const int size_before = ThreadPool::global().size();
  for (const int threads : {1, 2, 5}) {
    ThreadPool::global().resize(threads);
    std::vector<RootDraw> draws;
    for (int i = 0; i < kDraws; ++i) {
      draws.push_back({scores.data() + static_cast<std::ptrdiff_t>(i) * kTokens,
                       laws[static_cast<std::size_t>(i) % laws.size()],
                       std::generate_canonical<double, 53>(random)});
    }
    acceptor.draw_roots(draws);
    for (const RootDraw& draw : draws) {
      TokenSampler alone;
      CHECK_EQ(draw.token, alone.draw(draw.scores, kTokens, draw.law, draw.u));
    }
    CHECK_EQ(draws[4].token, kBadRow);
    CHECK_EQ(draws[9].token, kNothingAllowed);
  }
  ThreadPool::global().resize(size_before);
}

TEST(only_rows_that_nothing_else_decides_are_drawn_in_front) {
  const HostAcceptor acceptor(kTokens, {}), synthetic(kTokens, {0.5});
  RequestParams params;
  params.sampling = {0.8f};
  const auto draws = [&](const HostAcceptor& which, int tree_size) {
    return which.draws_root(params, ScoreProcessor(params, kTokens), 3, tree_size);
  };
  CHECK(draws(acceptor, 1));
  CHECK(draws(acceptor, 4));
  CHECK(draws(synthetic, 1));
  CHECK(!draws(synthetic, 4));
  params.acceptance.rule = AcceptanceRule::kRejection;
  CHECK(draws(acceptor, 1));
  CHECK(!draws(acceptor, 4));
  params.acceptance.rule = AcceptanceRule::kExactMatch;
  params.processes_scores = true;
  CHECK(!draws(acceptor, 1));
  params.processes_scores = false;
  params.grammar = true;
  CHECK(!draws(acceptor, 1));
  params.grammar = false;
  params.sampling = {};
  CHECK(!draws(acceptor, 1));
}

TEST(top_logprobs_of_a_row_with_nan_are_the_best_numbers) {
  std::mt19937 random(8);
  for (int round = 0; round < 200; ++round) {
    const int vocab = 1 + static_cast<int>(random() % 600), top = static_cast<int>(random() % 40);
    std::vector<float> scores(static_cast<std::size_t>(vocab));
    std::vector<TokenId> numbers;
    for (int id = 0; id < vocab; ++id) {
      const bool bad = random() % 3 == 0;
      scores[static_cast<std::size_t>(id)] =
          bad ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(random() % 50);
      if (!bad) numbers.push_back(id);
    }
    std::stable_sort(numbers.begin(), numbers.end(), [&](TokenId a, TokenId b) {
      return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
    });
    const TokenLogprobs found = compute_logprobs(scores.data(), vocab, 0, top);
    CHECK(found.top.size() == static_cast<std::size_t>(std::min(top, vocab)));
    for (std::size_t i = 0; i < std::min(found.top.size(), numbers.size()); ++i) {
      CHECK(found.top[i].first == numbers[i]);
    }
  }
}

}  // namespace
}  // namespace specdec
