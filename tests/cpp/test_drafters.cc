// Networks that draft on the host: what Medusa learns of its guesses, its heads' rows, and drafts
// into slots.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "algo/guess_tree.h"
#include "algo/slot_host.h"
#include "backend/cpu/drafter/medusa_drafter.h"
#include "backend/cpu/drafter/medusa_heads.h"
#include "backend/cpu/linear/linear_call.h"
#include "check.h"

namespace specdec {
namespace {

using cpu::MedusaDrafter;
using cpu::MedusaHeads;
using cpu::PackedLinear;

constexpr std::int64_t kHidden = 20, kVocab = 70;
constexpr std::int32_t kHeads = 3;

PackedLinear random_layer(std::int64_t n, std::int64_t k, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> weights(static_cast<std::size_t>(n * k));
  for (float& weight : weights) weight = normal(random);
  return PackedLinear({cpu::rows_view(weights.data(), n, k)});
}

// Three heads of two residual layers, each with a matrix of its own.
struct Network {
  PackedLinear first = random_layer(kHeads * kHidden, kHidden, 1);
  std::vector<PackedLinear> deeper, lm_heads;
  std::vector<MedusaHeads> heads;  // one

  Network() {
    for (unsigned h = 0; h < kHeads; ++h) {
      deeper.push_back(random_layer(kHidden, kHidden, 10 + h));
      lm_heads.push_back(random_layer(kVocab, kHidden, 20 + h));
    }
    cpu::MedusaLayers layers;
    layers.first = &first;
    for (unsigned h = 0; h < kHeads; ++h) {
      layers.deeper.push_back({&deeper[h]});
      layers.lm_heads.push_back(&lm_heads[h]);
    }
    heads.emplace_back(kHidden, kHeads, kVocab, layers, nullptr, std::vector<TokenId>{});
  }
};

std::vector<float> random_rows(std::int64_t rows, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(rows * kHidden));
  for (float& value : values) value = normal(random);
  return values;
}

TEST(drafters_rates_are_counts_that_fade) {
  const std::vector<double> nothing(6, 0.0), half(1, 0.5);
  GuessRates rates(2, 3, nothing.data(), 0.0, std::numeric_limits<double>::infinity());
  const TokenId guesses[2][3] = {{7, 8, 9}, {1, 2, 3}};
  CHECK(rates.observe(0, guesses[0], 3, 7));
  CHECK(rates.observe(0, guesses[0], 3, 9) && rates.observe(0, guesses[0], 3, 9));
  CHECK(!rates.observe(0, guesses[0], 3, 5));
  CHECK(rates.observe(1, guesses[1], 3, 2));
  CHECK(rates.rate(0, 0) == 0.25 && rates.rate(0, 1) == 0.0 && rates.rate(0, 2) == 0.5);
  CHECK(rates.rate(1, 1) == 1.0 && rates.trials(0) == 4.0 && rates.trials(1) == 1.0);
  GuessRates fading(1, 1, half.data(), 10.0, 20.0);
  CHECK(fading.rate(0, 0) == 0.5);
  for (int i = 0; i < 200; ++i) fading.observe(0, guesses[1], 1, 1);
  CHECK(fading.rate(0, 0) > 0.99 && std::abs(fading.trials(0) - 20.0) < 1e-12);
}

TEST(drafters_a_likeliest_order_has_parents_in_front) {
  const std::vector<double> prior = {0.2, 0.6, 1.0, 0.0};
  const GuessRates rates(2, 2, prior.data(), 1.0, 1.0);
  const std::vector<GuessNode> given = guess_nodes({{0}, {0, 0}, {1}, {1, 0}, {1, 1}}, 2, 2);
  std::vector<double> worth = guess_worth(given, rates);
  const std::vector<GuessNode> nodes = likeliest_first(given, &worth);
  // 0.6, 0.6 behind it, 0.2, 0.2 behind that, 0.
  CHECK_EQ(worth, (std::vector<double>{0.6, 0.6, 0.2, 0.2, 0.0}));
  std::vector<std::int32_t> parents;
  for (const GuessNode& node : nodes) parents.push_back(node.parent);
  CHECK_EQ(parents, (std::vector<std::int32_t>{-1, 0, -1, 2, 0}));
  CHECK_THROWS(guess_nodes({{0, 0}, {0}}, 2, 2), std::invalid_argument, "does not stand before");
  CHECK_THROWS(guess_nodes({{}}, 2, 2), std::invalid_argument, "has 0 ranks");
  CHECK_THROWS(guess_nodes({{2}}, 2, 2), std::invalid_argument, "rank 2: ranks are 0..1");
}

TEST(drafters_a_row_of_medusa_heads_stands_alone) {
  Network network;
  MedusaHeads& heads = network.heads[0];
  const std::vector<float> rows = random_rows(9, 4);
  std::vector<const float*> all;
  for (std::int64_t r = 0; r < 9; ++r) all.push_back(rows.data() + r * kHidden);
  const float* scores = heads.scores(all, kHeads);
  const std::vector<float> together(scores, scores + kHeads * 9 * kVocab);
  for (std::int64_t r = 0; r < 9; ++r) {
    const float* const alone = heads.scores({all[static_cast<std::size_t>(r)]}, 2);
    for (std::int64_t h = 0; h < 2; ++h) {
      for (std::int64_t v = 0; v < kVocab; ++v) {
        CHECK_EQ(alone[h * kVocab + v],
                 together[static_cast<std::size_t>((h * 9 + r) * kVocab + v)]);
      }
    }
  }
}

// One request in slot 1 of two; its text is `len` tokens behind a prompt of one.
struct DrafterWorld {
  SlotLayout layout = make_slot_layout(SlotMethod::kProposed, 64, {}, 0);
  std::vector<std::max_align_t> memory;
  std::int32_t ids[3] = {-1, 1, 0}, most[3] = {5, 5, 5};
  std::vector<float> hidden = random_rows(2, 8);

  DrafterWorld()
      : memory(static_cast<std::size_t>(2 * layout.bytes) / sizeof(std::max_align_t) + 1) {
    SlotRequest request;
    request.prompt = {3};
    request.max_tokens = 40;
    write_slot(layout, request, at(1));
    say({4});
  }
  Slot* at(std::int32_t id) {
    return reinterpret_cast<Slot*>(reinterpret_cast<std::byte*>(memory.data()) + id * layout.bytes);
  }
  void say(const std::vector<TokenId>& tokens) {
    Slot* const slot = at(1);
    slot->begun = 1;
    for (const TokenId token : tokens) slot->history()[slot->len++] = token;
  }
  cpu::SlotRequests step() {
    cpu::SlotRequests step;
    step.slots = {reinterpret_cast<std::byte*>(memory.data()), layout.bytes, 2};
    step.slot_ids = ids;
    step.max_drafts = most;
    step.num_requests = 3;
    step.hidden = hidden.data();
    step.hidden_size = kHidden;
    return step;
  }
};

TEST(drafters_medusa_drafts_and_learns) {
  Network network;
  const std::vector<double> prior(static_cast<std::size_t>(kHeads * 12), 0.05);
  MedusaDrafter drafter(&network.heads[0], prior, 12, 2, kVocab);
  DrafterWorld world;
  drafter.draft(world.step());  // nobody has entered
  CHECK_EQ(drafter.stats().idle, std::int64_t{2});
  drafter.enter(1, {{0}, {11}, {0, 0}, {0, 0, 1}}, false);
  TokenId best[kHeads * 12];
  network.heads[0].best({world.hidden.data() + kHidden}, kHeads, 12, best);
  drafter.draft(world.step());
  const ProposedDraft& proposed = *world.at(1)->proposed_draft();
  CHECK(proposed.len == 2 && proposed.count == 4);
  CHECK(proposed.tokens[0] == best[0] && proposed.tokens[1] == best[11]);
  CHECK(proposed.tokens[2] == best[12] && proposed.tokens[3] == best[2 * 12 + 1]);
  CHECK(proposed.parents[0] == -1 && proposed.parents[1] == -1 && proposed.parents[2] == 0 &&
        proposed.parents[3] == 2);
  world.say({best[11], best[12 + 3], 69});
  drafter.draft(world.step());
  CHECK(drafter.measured().rate(0, 11) == 1.0 && drafter.measured().rate(1, 3) == 1.0);
  CHECK_EQ(drafter.measured().trials(2), 1.0);
  CHECK_EQ(drafter.stats().nodes, std::int64_t{8});
  // A hidden state that is no number: no drafts, and nothing is learnt of them.
  for (float& value : world.hidden) value = std::numeric_limits<float>::quiet_NaN();
  world.say({5});
  drafter.draft(world.step());
  CHECK(proposed.len == 6 && proposed.count == 0);
  drafter.enter(1, {}, false);
  world.say({6});
  drafter.draft(world.step());
  CHECK_EQ(proposed.len, 6);
  CHECK_THROWS(drafter.enter(2, {}, false), std::invalid_argument, "slot = 2: there are 2");
  CHECK_THROWS(drafter.enter(0, {{0, 0, 0, 0}}, false), std::invalid_argument, "give 1..3");
}

}  // namespace
}  // namespace specdec
