// Drafts of several sources merged into one tree, against a map from paths to what was said of
// them.
#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "engine/draft_offer.h"

namespace specdec {
namespace {

using Path = std::vector<TokenId>;

constexpr DraftSource kSources[] = {DraftSource::kPrediction, DraftSource::kSuffix,
                                    DraftSource::kModel};

struct Said {
  Path path;  // from the golden token
  DraftSource source;
  float share;
};

// Paths of each source, a parent before its children.
std::vector<Said> random_words(std::mt19937& random) {
  std::uniform_real_distribution<float> unit(0.05f, 1.0f);
  std::vector<Said> words;
  for (const DraftSource source : kSources) {
    std::vector<Path> paths{{}};
    for (int i = static_cast<int>(random() % 12); i > 0; --i) {
      Path path = paths[random() % paths.size()];
      path.push_back(static_cast<TokenId>(random() % 3));
      if (std::find(paths.begin(), paths.end(), path) != paths.end()) continue;
      paths.push_back(path);
      words.push_back({path, source, unit(random)});
    }
  }
  return words;
}

const SourceRates kNothingSeen{};

DraftOffer offer_of(const std::vector<Said>& words) {
  DraftOffer offer;
  std::map<std::pair<DraftSource, Path>, int> nodes;
  for (const Said& said : words) {
    const Path above(said.path.begin(), said.path.end() - 1);
    const int parent = above.empty() ? DraftOffer::kGolden : nodes.at({said.source, above});
    nodes[{said.source, said.path}] = offer.add(parent, said.path.back(), said.source,
                                                {3, 1, said.share}, nullptr, &kNothingSeen);
  }
  return offer;
}

// The path of a draft of the offer.
Path path_of(const DraftOffer& offer, int draft) {
  Path path;
  for (int i = draft; i != DraftOffer::kGolden; i = offer.parent(i)) path.push_back(offer.token(i));
  std::reverse(path.begin(), path.end());
  return path;
}

// By path: who has said it, and the chance that all of it is right.
struct Merged {
  SourceBits sources = 0;
  double chance = 0.0;
};

std::map<Path, Merged> merge(const std::vector<Said>& words) {
  // What texts, and what others, say of a path's last token: the mean, and the best.
  std::map<Path, std::vector<double>> texts, others;
  std::map<Path, Merged> merged;
  const std::set<DraftSource> is_text = {DraftSource::kPrediction, DraftSource::kSuffix,
                                         DraftSource::kLookup};
  for (const Said& said : words) {
    const double chance = std::min(1.0, said.share * start_rate(said.source, 3, 1));
    (is_text.count(said.source) != 0 ? texts : others)[said.path].push_back(chance);
    merged[said.path].sources |= bit_of(said.source);
  }
  std::map<Path, double> last;
  for (const auto& [path, node] : merged) {
    const std::vector<double>& all = texts[path];
    double sum = 0.0;
    for (const double chance : all) sum += chance;
    last[path] = all.empty() ? 0.0 : sum / static_cast<double>(all.size());
    for (const double chance : others[path]) last[path] = std::max(last[path], chance);
  }
  for (auto& [path, node] : merged) {
    node.chance = 1.0;
    for (std::size_t n = 1; n <= path.size(); ++n) {
      node.chance *= last.at(Path(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(n)));
    }
  }
  return merged;
}

void check_against(const DraftOffer& offer, const std::vector<Said>& words) {
  const std::map<Path, Merged> merged = merge(words);
  CHECK_EQ(offer.num_drafts(), static_cast<int>(merged.size()));
  std::set<Path> seen;
  for (int i = 1; i <= offer.num_drafts(); ++i) {
    const Path path = path_of(offer, i);
    CHECK(seen.insert(path).second);
    CHECK(offer.parent(i) < i);
    CHECK_EQ(offer.sources(i), merged.at(path).sources);
    CHECK(std::abs(offer.survival()[i - 1] - merged.at(path).chance) <= 1e-12);
  }
}

TEST(equal_paths_of_several_sources_are_one) {
  std::mt19937 random(3);
  int shared = 0;
  for (int round = 0; round < 500; ++round) {
    const std::vector<Said> words = random_words(random);
    DraftOffer offer = offer_of(words);
    check_against(offer, words);
    offer.sort();
    check_against(offer, words);
    for (int i = 1; i < offer.num_drafts(); ++i) {
      CHECK(offer.survival()[i - 1] >= offer.survival()[i]);
    }
    double sum = 0.0, first = 0.0;
    for (int i = 1; i <= offer.num_drafts(); ++i) {
      sum += offer.survival()[i - 1];
      first += offer.parent(i) == DraftOffer::kGolden ? offer.survival()[i - 1] : 0.0;
      CHECK(std::abs(offer.expected(i) - sum) <= 1e-12);
      CHECK(std::abs(offer.first_chance(i) - std::min(first, 1.0)) <= 1e-12);
    }
    shared += static_cast<int>(words.size()) - offer.num_drafts();
  }
  CHECK(shared > 500);
}

TEST(a_source_may_add_to_an_offer_that_is_in_order) {
  std::mt19937 random(4);
  for (int round = 0; round < 300; ++round) {
    std::vector<Said> words = random_words(random);
    const auto later = std::find_if(words.begin(), words.end(), [](const Said& said) {
      return said.source == DraftSource::kModel;
    });
    DraftOffer offer = offer_of({words.begin(), later});
    offer.sort();
    std::map<Path, int> nodes;
    for (auto said = later; said != words.end(); ++said) {
      const Path above(said->path.begin(), said->path.end() - 1);
      const int parent = above.empty() ? DraftOffer::kGolden : nodes.at(above);
      nodes[said->path] = offer.add(parent, said->path.back(), said->source, {3, 1, said->share},
                                    nullptr, &kNothingSeen);
    }
    offer.sort();
    check_against(offer, words);
  }
}

// What was cut is as if nobody had proposed it, and so is what hangs below it.
TEST(dropped_drafts_were_never_there) {
  std::mt19937 random(5);
  int dropped = 0;
  for (int round = 0; round < 500; ++round) {
    const std::vector<Said> words = random_words(random);
    DraftOffer offer = offer_of(words);
    offer.sort();
    const int all = offer.num_drafts(), looked_at = static_cast<int>(random() % (all + 1)) + 1;
    std::vector<std::int32_t> placed(static_cast<std::size_t>(all) + 1, 0);
    std::set<Path> cut;
    for (int i = 1; i < looked_at; ++i) {
      if (random() % 4 != 0) continue;
      placed[i] = -1;
      cut.insert(path_of(offer, i));
    }
    std::vector<Said> rest;
    for (const Said& said : words) {
      bool stays = true;
      for (std::size_t n = 1; n <= said.path.size(); ++n) {
        stays &=
            cut.count({said.path.begin(), said.path.begin() + static_cast<std::ptrdiff_t>(n)}) == 0;
      }
      if (stays) rest.push_back(said);
    }
    offer.drop(placed.data(), looked_at);
    check_against(offer, rest);
    dropped += all - offer.num_drafts();
    // The same lesson, too.
    DraftOffer other = offer_of(rest);
    other.sort();
    SourceRates own{}, shared{}, own_of_other{}, shared_of_other{};
    const TokenId decided[] = {0, 1, static_cast<TokenId>(random() % 3)};
    offer.observe(decided, 3, &own, &shared);
    other.observe(decided, 3, &own_of_other, &shared_of_other);
    for (const DraftSource source : kSources) {
      const auto s = static_cast<std::size_t>(source);
      CHECK(std::abs(own[s].rate({}, DraftSource::kLookup, 3, 1) -
                     own_of_other[s].rate({}, DraftSource::kLookup, 3, 1)) <= 1e-6);
    }
  }
  CHECK(dropped > 500);
}

TEST(a_draft_of_two_sources_counts_for_both) {
  DraftOffer offer;
  const auto add = [&](int parent, TokenId token, DraftSource source) {
    return offer.add(parent, token, source, {3, 1, 0.5f}, nullptr, &kNothingSeen);
  };
  const int a = add(DraftOffer::kGolden, 1, DraftSource::kSuffix);
  const int b = add(a, 2, DraftSource::kSuffix);
  add(b, 3, DraftSource::kSuffix);
  const int c = add(DraftOffer::kGolden, 1, DraftSource::kModel);
  CHECK_EQ(a, c);
  add(c, 4, DraftSource::kModel);
  CHECK_EQ(offer.proposed(DraftSource::kSuffix), 3);
  CHECK_EQ(offer.proposed(DraftSource::kModel), 2);
}

}  // namespace
}  // namespace specdec
