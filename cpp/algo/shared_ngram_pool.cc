#include "algo/shared_ngram_pool.h"

#include <algorithm>

#include "algo/ngram_index.h"
#include "base/check.h"

namespace specdec {
namespace {

constexpr TokenId kSeparator = -1;
constexpr int kWays = 8;
constexpr std::int32_t kMostTokens = 1 << 22;  // of a ring, whose patterns take some GiB then
// Tokens before a piece that are stored with it again when the ring has gone on to other text.
constexpr std::int32_t kOverlap = 16;
static_assert(kOverlap >= kMaxNgram, "a run that is continued holds whole patterns");

}  // namespace

struct SharedNgramPool::Ring {
  struct Entry {
    std::int64_t after = -1;  // ring position behind the occurrence (positions only grow); -1: free
    std::uint32_t tag = 0;
    std::int32_t n = 0;
  };
  std::vector<TokenId> tokens;
  std::vector<Entry> entries;  // [buckets, kWays]
  std::int64_t head = 0;       // position of the next token

  TokenId at(std::int64_t pos) const {
    return tokens[static_cast<std::size_t>(pos) % tokens.size()];
  }
  std::int64_t oldest() const {
    return std::max<std::int64_t>(0, head - static_cast<std::int64_t>(tokens.size()));
  }
  // The pattern and at least one token behind it are still in the ring.
  bool alive(const Entry& entry) const {
    return entry.after >= 0 && entry.after - entry.n >= oldest();
  }
  void push(TokenId token) {
    tokens[static_cast<std::size_t>(head) % tokens.size()] = token;
    ++head;
  }
  bool ends_with(const TokenId* text, std::int32_t n) const {
    if (head - n < oldest()) return false;
    for (std::int32_t i = 0; i < n; ++i) {
      if (at(head - n + i) != text[i]) return false;
    }
    return true;
  }
  // The entry that stands for the pattern whose tokens, last first, are before(1), before(2), ...
  template <typename Before>
  Entry* find(std::int64_t buckets, std::uint64_t h, std::int32_t n, const Before& before) {
    Entry* bucket = entries.data() + (static_cast<std::int64_t>(h) & (buckets - 1)) * kWays;
    const std::uint32_t tag = ngram_hash_tag(h);
    for (int way = 0; way < kWays; ++way) {
      Entry& entry = bucket[way];
      if (entry.n != n || entry.tag != tag || !alive(entry)) continue;
      std::int32_t equal = 1;
      while (equal <= n && at(entry.after - equal) == before(equal)) ++equal;
      if (equal > n) return &entry;
    }
    return nullptr;
  }
  Entry* victim(std::int64_t buckets, std::uint64_t h) {
    Entry* bucket = entries.data() + (static_cast<std::int64_t>(h) & (buckets - 1)) * kWays;
    return std::min_element(bucket, bucket + kWays, [](const Entry& a, const Entry& b) {
      return a.after < b.after;  // free ones first, then the least recent
    });
  }
};

SharedNgramPool::SharedNgramPool(const Options& options) : options_(options) {
  SPECDEC_REQUIRE(options.max_ngram >= 1 && options.max_ngram <= kMaxNgram,
                  "SharedNgramPool.max_ngram = ", options.max_ngram, ": use 1..", kMaxNgram);
  SPECDEC_REQUIRE(options.capacity_tokens >= 2 * (options.max_ngram + 1),
                  "SharedNgramPool.capacity_tokens = ", options.capacity_tokens,
                  ": a ring holds at least 2 * (max_ngram + 1) = ", 2 * (options.max_ngram + 1),
                  " tokens");
  SPECDEC_REQUIRE(options.capacity_tokens <= kMostTokens,
                  "SharedNgramPool.capacity_tokens = ", options.capacity_tokens, ": use at most ",
                  kMostTokens);
  SPECDEC_REQUIRE(options.max_salts >= 1, "SharedNgramPool.max_salts = ", options.max_salts,
                  ": use 1 or more");
  // Room for twice the patterns that a full ring can hold.
  const std::int64_t patterns = std::int64_t{options.capacity_tokens} * options.max_ngram;
  while (buckets_ * kWays < 2 * patterns) buckets_ *= 2;
}

SharedNgramPool::~SharedNgramPool() = default;

SharedNgramPool::Ring* SharedNgramPool::touch(const std::string& salt, bool create) {
  const auto found = salts_.find(salt);
  if (found != salts_.end()) {
    order_.splice(order_.begin(), order_, found->second);
    return order_.front().second.get();
  }
  if (!create) return nullptr;
  std::unique_ptr<Ring> ring;
  if (num_salts() == options_.max_salts) {
    ring = std::move(order_.back().second);
    salts_.erase(order_.back().first);
    order_.pop_back();
    std::fill(ring->entries.begin(), ring->entries.end(), Ring::Entry{});
    std::fill(ring->tokens.begin(), ring->tokens.end(), kSeparator);
    ring->head = 0;
  } else {
    ring = std::make_unique<Ring>();
    ring->tokens.assign(static_cast<std::size_t>(options_.capacity_tokens), kSeparator);
    ring->entries.resize(static_cast<std::size_t>(buckets_ * kWays));
  }
  order_.emplace_front(salt, std::move(ring));
  salts_.emplace(salt, order_.begin());
  return order_.front().second.get();
}

void SharedNgramPool::publish(const std::string& salt, const TokenId* text, std::int32_t begin,
                              std::int32_t end) {
  if (begin >= end) return;
  Ring& ring = *touch(salt, true);
  std::int32_t from = std::max(0, begin - kOverlap);  // first token that a pattern may contain
  std::int32_t i = begin;                             // next token to store
  if (begin == 0 || !ring.ends_with(text + from, begin - from)) {
    from = std::max(0, from - options_.max_ngram);
    from = std::max(from, end - (options_.capacity_tokens - 1));
    ring.push(kSeparator);
    i = from;
  }
  // A pattern is indexed once something follows it. In a new run that includes the patterns of the
  // overlap, whose continuations ended with the piece before.
  const std::int32_t first_indexed = std::max(i, begin - kOverlap);
  for (; i < end; ++i) {
    if (i >= first_indexed) {
      std::uint64_t h = kNgramHashSeed;
      const std::int32_t longest = std::min(options_.max_ngram, i - from);
      for (std::int32_t n = 1; n <= longest; ++n) {
        h = ngram_hash_step(h, text[i - n]);
        Ring::Entry* entry =
            ring.find(buckets_, h, n, [&](std::int32_t back) { return text[i - back]; });
        if (entry == nullptr) {
          entry = ring.victim(buckets_, h);
          entry->tag = ngram_hash_tag(h);
          entry->n = n;
        }
        entry->after = ring.head;
      }
    }
    ring.push(text[i]);
  }
}

std::int32_t SharedNgramPool::lookup(const std::string& salt, const TokenId* history,
                                     std::int32_t len, std::int32_t max_draft_len, TokenId* draft,
                                     std::int32_t* match_len) {
  *match_len = 0;
  Ring* ring = max_draft_len > 0 ? touch(salt, false) : nullptr;
  if (ring == nullptr) return 0;
  const std::int32_t longest = std::min(options_.max_ngram, len);
  std::uint64_t hashes[kMaxNgram + 1];
  hashes[0] = kNgramHashSeed;
  for (std::int32_t n = 1; n <= longest; ++n) {
    hashes[n] = ngram_hash_step(hashes[n - 1], history[len - n]);
  }
  for (std::int32_t n = longest; n > 0; --n) {
    const Ring::Entry* entry =
        ring->find(buckets_, hashes[n], n, [&](std::int32_t back) { return history[len - back]; });
    if (entry == nullptr) continue;
    std::int32_t length = 0;
    for (std::int64_t pos = entry->after; pos < ring->head && length < max_draft_len; ++pos) {
      const TokenId token = ring->at(pos);
      if (token == kSeparator) break;
      draft[length++] = token;
    }
    if (length > 0) *match_len = n;
    return length;
  }
  return 0;
}

std::int64_t SharedNgramPool::ring_bytes() const {
  return std::int64_t{options_.capacity_tokens} * static_cast<std::int64_t>(sizeof(TokenId)) +
         buckets_ * kWays * static_cast<std::int64_t>(sizeof(Ring::Entry));
}
std::int64_t SharedNgramPool::bytes() const { return num_salts() * ring_bytes(); }
std::int64_t SharedNgramPool::max_bytes() const { return options_.max_salts * ring_bytes(); }

}  // namespace specdec
