// The per-request algorithms: results do not depend on the team's size, memory stays inside
// bytes_required() (blocks are allocated at exactly that size for ASan), published vectors.
// Agreement with the pure-Python references is tested from Python (tests/unit).
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "algo/accept.h"
#include "algo/lookahead.h"
#include "algo/lookahead_host.h"
#include "algo/ngram_batch.h"
#include "algo/shared_ngram_pool.h"
#include "algo/synthetic_acceptance.h"
#include "check.h"
#include "thread_team.h"

namespace specdec {
namespace {

using testing::ThreadTeam;
using Rng = std::mt19937;

int below(Rng& rng, int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); }

std::vector<TokenId> random_tokens(Rng& rng, int n, int vocab) {
  std::vector<TokenId> out(static_cast<std::size_t>(n));
  for (TokenId& token : out) token = below(rng, vocab);
  return out;
}

// A block of exactly `bytes`, zeroed so that states can be compared byte for byte.
class Block {
 public:
  explicit Block(std::size_t bytes) : words_(bytes / 4) { CHECK_EQ(bytes % 4, std::size_t{0}); }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(words_.data());
  }
  const std::vector<std::uint32_t>& words() const { return words_; }

 private:
  std::vector<std::uint32_t> words_;
};

TEST(philox_known_answers) {
  const auto words = [](std::uint64_t seed, std::uint64_t position, std::uint32_t purpose,
                        std::uint32_t draw) {
    const Philox r = philox4x32(seed, position, static_cast<RandomPurpose>(purpose), draw);
    return std::vector<std::uint32_t>(r.v, r.v + 4);
  };
  using Words = std::vector<std::uint32_t>;
  CHECK_EQ(words(0, 0, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  CHECK_EQ(words(~0ull, ~0ull, ~0u, ~0u), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK_EQ(words(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x13198a2e, 0x03707344),
           (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(synthetic_lengths_have_the_rates) {
  const double rates[] = {1.0, 0.75, 0.5, 0.0};
  int at_least[5] = {};
  const int draws = 40000;
  for (int i = 0; i < draws; ++i) {
    const std::int32_t length = synthetic_length({rates, 4}, 11, static_cast<std::uint64_t>(i));
    CHECK(length >= 1 && length <= 3);
    for (int k = 0; k <= length; ++k) ++at_least[k];
  }
  // Within five standard deviations, which are at most 0.0025.
  CHECK_EQ(at_least[1], draws);
  CHECK(std::abs(at_least[2] / static_cast<double>(draws) - 0.75) < 0.0125);
  CHECK(std::abs(at_least[3] / static_cast<double>(draws) - 0.5) < 0.0125);
  CHECK_EQ(synthetic_length({}, 11, 3), 0);
  const double always[] = {1.0, 1.0};
  CHECK_EQ(synthetic_length({always, 2}, 5, 9), 2);
}

TEST(what_follows_the_last_kept_draft_is_no_draft) {
  DraftTree tree;
  tree.reset(9);
  tree.add(3, 0);
  tree.add(4, 0);
  tree.add(5, 1);
  tree.add(0, 0);
  const std::int32_t depth[] = {0, 1, 1, 2, 1};
  CHECK_EQ(deepest_node(depth, tree.size), 3);
  CHECK_EQ(deepest_node(depth, 1), 0);
  const DraftedTree drafted{tree.tokens, tree.parents, tree.size, 0, 0};
  CHECK_EQ(not_a_child(drafted, 0, 2, 6), 2);
  CHECK_EQ(not_a_child(drafted, 0, 3, 6), 5);  // 3 and 4 are children of the root, 5 is not
  CHECK_EQ(not_a_child(drafted, 1, 5, 6), 0);  // behind the last id comes the first
  CHECK_EQ(not_a_child(drafted, 3, 5, 6), 5);
  tree.add(1, 0);
  tree.add(2, 0);
  const DraftedTree full{tree.tokens, tree.parents, tree.size, 0, 0};
  CHECK_EQ(not_a_child(full, 0, 3, 5), 3);  // every id is a child
  CHECK_EQ(not_a_child(full, 0, 3, 6), 5);
}

TEST(serial_team_is_a_team_of_one) {
  const SerialTeam team;
  std::int32_t total = 0;
  CHECK_EQ(team.scan(5, &total), 0);
  CHECK_EQ(total, 5);
  CHECK(team.any(true) && !team.any(false));
  ThreadTeam::run(5, [](const ThreadTeam& t) {
    std::int32_t sum = 0;
    const std::int32_t before = t.scan(t.rank() + 1, &sum);
    const bool third = t.any(t.rank() == 3), none = t.any(false);
    if (t.rank() == 4) {
      CHECK_EQ(before, 10);
      CHECK_EQ(sum, 15);
      CHECK(third && !none);
    }
  });
}

// What one request went through: every tree, path and the state's bytes after every step.
struct Trace {
  std::vector<TokenId> log;
  std::vector<std::uint32_t> state;
  bool operator==(const Trace&) const = default;
};

struct LookaheadCase {
  LookaheadConfig cfg;
  std::int32_t pool_grams;
  std::vector<TokenId> prompt;
  std::uint64_t seed;
  int vocab, steps;
};

template <Team TeamT>
void play(const TeamT& team, const LookaheadCase& c, Block* block, DraftTree* tree,
          AcceptResult* result, std::vector<TokenId>* sampled, Trace* trace) {
  Rng rng(static_cast<unsigned>(c.seed));  // every rank draws the same numbers
  LookaheadState* state = block->as<LookaheadState>();
  lookahead_init(team, state, c.cfg, c.pool_grams, c.prompt.data(),
                 static_cast<std::int32_t>(c.prompt.size()), c.seed);
  TokenId golden = c.prompt.back();
  for (int step = 0; step < c.steps; ++step) {
    LookaheadBudget budget;
    if (below(rng, 3) == 0) {
      budget.window_rows = below(rng, c.cfg.w + 1);
      budget.guess_len = below(rng, c.cfg.n);
      budget.max_drafts = below(rng, 60);
      budget.max_depth = below(rng, 12);
    }
    const std::int32_t size = lookahead_draft(team, state, golden, budget, tree);
    CHECK(size - 1 <= lookahead_draft_bound(c.cfg, budget));
    std::vector<TokenId> choice(kMaxStepTokens);
    for (TokenId& token : choice) {
      const int pick = below(rng, c.vocab), draft = below(rng, 4);
      token = draft > 0 && draft < size ? tree->tokens[draft] : pick;
    }
    team.sync();
    if (team.rank() == 0) *sampled = choice;
    team.sync();
    accept_greedy(team, tree->tokens, tree->parents, size, sampled->data(), c.cfg.n - 1, result);
    lookahead_update(team, state, tree->tokens, sampled->data(), result->emitted,
                     result->num_emitted);
    golden = result->emitted[result->num_emitted - 1];
    if (team.rank() == 0) {
      trace->log.insert(trace->log.end(), tree->tokens, tree->tokens + size);
      trace->log.insert(trace->log.end(), tree->parents, tree->parents + size);
      trace->log.insert(trace->log.end(), result->path, result->path + result->path_len);
      trace->log.insert(trace->log.end(), result->emitted, result->emitted + result->num_emitted);
    }
    team.sync();
  }
  if (team.rank() == 0) trace->state = block->words();
}

Trace play_with(int ranks, const LookaheadCase& c) {
  Block block(lookahead_bytes_required(c.cfg, c.pool_grams));
  DraftTree tree;
  AcceptResult result;
  std::vector<TokenId> sampled;
  Trace trace;
  if (ranks == 1) {
    play(SerialTeam{}, c, &block, &tree, &result, &sampled, &trace);
  } else {
    ThreadTeam::run(ranks, [&](const ThreadTeam& team) {
      play(team, c, &block, &tree, &result, &sampled, &trace);
    });
  }
  return trace;
}

TEST(lookahead_does_not_depend_on_the_team) {
  Rng rng(1);
  const std::vector<LookaheadConfig> configs = {{1, 1, 0},  {2, 2, 1},   {4, 3, 4},   {7, 7, 7},
                                                {3, 5, 20}, {40, 2, 80}, {1, 100, 0}, {5, 4, 0}};
  for (const LookaheadConfig& cfg : configs) {
    for (const int vocab : {3, 50}) {
      const LookaheadCase c{
          cfg, vocab == 3 ? 16 : 512, random_tokens(rng, 1 + below(rng, 90), vocab), rng(), vocab,
          12};
      const Trace serial = play_with(1, c);
      CHECK(!serial.log.empty());
      for (const int ranks : {2, 3, 8}) CHECK(play_with(ranks, c) == serial);
    }
  }
}

TEST(lookahead_does_not_depend_on_the_team_of_32) {
  Rng rng(2);
  const LookaheadCase c{{7, 7, 7}, 1024, random_tokens(rng, 200, 8), 99, 8, 8};
  CHECK(play_with(32, c) == play_with(1, c));
}

TEST(accept_does_not_depend_on_the_team) {
  Rng rng(3);
  for (int round = 0; round < 12; ++round) {
    const int size = 1 + below(rng, kMaxStepTokens), vocab = 1 + below(rng, 3);
    const auto tokens = random_tokens(rng, size, vocab), sampled = random_tokens(rng, size, vocab);
    std::vector<std::int32_t> parents(static_cast<std::size_t>(size), -1);
    const bool chain = round % 3 == 0;
    for (int i = 1; i < size; ++i) parents[i] = chain ? i - 1 : below(rng, i);
    AcceptResult serial{}, other{};
    accept_greedy(SerialTeam{}, tokens.data(), parents.data(), size, sampled.data(), 100, &serial);
    for (const int ranks : {2, 7, 32}) {
      ThreadTeam::run(ranks, [&](const ThreadTeam& team) {
        accept_greedy(team, tokens.data(), parents.data(), size, sampled.data(), 100, &other);
      });
      CHECK(std::memcmp(&serial, &other, sizeof serial) == 0);
    }
    if (chain && vocab == 1) CHECK_EQ(serial.path_len, std::min(size - 1, 100));
  }
}

TEST(ngram_index_does_not_depend_on_the_team) {
  Rng rng(4);
  for (const int vocab : {1, 2, 20, 5000}) {
    const int limit = 900, max_ngram = 4;
    const auto text = random_tokens(rng, limit, vocab);
    const std::size_t bytes = ngram_bytes_required(limit, ngrams_up_to(max_ngram));
    const auto work = [&](const auto& team, Block* block, NgramMatch* match,
                          std::vector<std::int32_t>* log) {
      NgramIndex* index = block->template as<NgramIndex>();
      ngram_init(team, index, limit, ngrams_up_to(max_ngram));
      for (int len = 1; len <= limit; len += 1 + len / 7) {
        ngram_extend(team, index, text.data(), len);
        for (const bool oldest : {true, false}) {
          ngram_lookup(team, index, text.data(), len, NgramLookup{5, true, oldest}, match);
          if (team.rank() == 0) {
            log->insert(log->end(), {match->source, match->length, match->match_len});
          }
          team.sync();
        }
      }
    };
    Block serial(bytes);
    NgramMatch match;
    std::vector<std::int32_t> expected;
    work(SerialTeam{}, &serial, &match, &expected);
    for (const int ranks : {2, 5, 32}) {
      Block block(bytes);
      std::vector<std::int32_t> log;
      ThreadTeam::run(ranks, [&](const ThreadTeam& team) { work(team, &block, &match, &log); });
      CHECK(log == expected);
      CHECK(block.words() == serial.words());
    }
  }
}

TEST(a_state_may_be_copied_bytewise) {
  Rng rng(5);
  const LookaheadConfig cfg{4, 4, 4};
  const auto prompt = random_tokens(rng, 60, 5);
  Block first(lookahead_bytes_required(cfg, 256));
  lookahead_init(SerialTeam{}, first.as<LookaheadState>(), cfg, 256, prompt.data(), 60, 7);
  Block second = first;
  DraftTree a, b;
  lookahead_draft(SerialTeam{}, first.as<LookaheadState>(), prompt.back(), LookaheadBudget{}, &a);
  lookahead_draft(SerialTeam{}, second.as<LookaheadState>(), prompt.back(), LookaheadBudget{}, &b);
  CHECK_EQ(a.size, b.size);
  CHECK(std::equal(a.tokens, a.tokens + a.size, b.tokens));
  CHECK(std::equal(a.parents, a.parents + a.size, b.parents));
}

TEST(a_slot_of_the_executors_triple_holds_every_request) {
  const LookaheadConfig limit{7, 7, 7};
  const std::size_t room = lookahead_bytes_required(limit, 512);
  for (std::int32_t w = 1; w <= 8; ++w) {
    for (std::int32_t n = 1; n <= 8; ++n) {
      for (std::int32_t g = 0; g <= 8; ++g) {
        if (!lookahead_is_valid(w, n, g)) continue;
        const LookaheadConfig request{w, n, g};
        CHECK_EQ(lookahead_fits(request, limit), w <= 7 && n <= 7 && g <= 7);
        if (lookahead_fits(request, limit)) CHECK(lookahead_bytes_required(request, 512) <= room);
        CHECK_EQ(lookahead_draft_bound(request, LookaheadBudget{}),
                 static_cast<std::int32_t>(
                     std::min<std::int64_t>(lookahead_max_draft_len(w, n, g), kMaxDraftLen)));
      }
    }
  }
}

std::vector<std::string> words_under(const OwnedLookahead& state, char key) {
  std::vector<std::string> out;
  for (const auto& gram : state.pool_entries(key)) out.emplace_back(gram.begin(), gram.end());
  return out;
}

TEST(published_pool_vectors) {
  const std::string text = "hello world; hello world. live is life.";
  OwnedLookahead state({1, 4, 5}, {text.begin(), text.end()}, 0, 4096);
  using Words = std::vector<std::string>;
  CHECK_EQ(words_under(state, 'l'), (Words{"lo ", "o w", "d. ", "ive", "ife"}));
  state.update({}, {'l', 'a', 'b', 'c'});
  CHECK_EQ(words_under(state, 'l'), (Words{"o w", "d. ", "ive", "ife", "abc"}));
  state.update({}, {'l', 'o', ' ', 'w'});
  CHECK_EQ(words_under(state, 'l'), (Words{"d. ", "ive", "ife", "abc", "o w"}));
}

TEST(config_refusals_name_field_value_and_remedy) {
  CHECK_THROWS(check_lookahead_config({0, 2, 1}, "here"), std::invalid_argument,
               "here = [0,2,1]: window size 0 is below 1");
  CHECK_THROWS(check_lookahead_config({10, 9, 8}, "here"), std::invalid_argument,
               "needs 143 draft tokens per step, the limit is 127");
  CHECK_THROWS(OwnedNgramIndex(0, 1), std::invalid_argument, "max_seq_len = 0");
  CHECK_THROWS(OwnedNgramIndex(8, kMaxNgram + 1), std::invalid_argument, "max_ngram = 17");
}

TEST(shared_pool_never_mixes_salts) {
  Rng rng(6);
  SharedNgramPool pool({64, 3, 3});
  // The tokens of salt i are 100 * i .. 100 * i + 5: a draft shows where it came from.
  for (int round = 0; round < 3000; ++round) {
    const int salt = below(rng, 5);
    auto text = random_tokens(rng, 1 + below(rng, 90), 6);
    std::vector<TokenId> own = text;
    for (TokenId& token : own) token += 100 * salt;
    pool.publish(std::to_string(salt), own.data(), 0, static_cast<std::int32_t>(own.size()));
    const int asked = below(rng, 5);
    TokenId draft[8];
    std::int32_t match_len = 0;
    const std::int32_t n = pool.lookup(std::to_string(asked), own.data(),
                                       static_cast<std::int32_t>(own.size()), 8, draft, &match_len);
    CHECK(n == 0 || asked == salt);
    for (std::int32_t i = 0; i < n; ++i) CHECK_EQ(draft[i] / 100, salt);
    CHECK(pool.bytes() <= pool.max_bytes());
  }
}

}  // namespace
}  // namespace specdec
