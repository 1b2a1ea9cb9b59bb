// Prompt lookup across requests (is_public_pool): recent text of all requests that carry the same
// salt, host side.
//
// Text arrives as runs (publish). Each salt has its own ring of `capacity` tokens in which a run is
// stored after a separator, and an index from the n-grams of 1..M tokens of the ring to the
// position behind their most recent occurrence. Old text is overwritten; entries that point to
// overwritten text are dead and are reused. Nothing found under one salt can come from another.
//
// Bounded: max_salts rings; the salt used least recently gives way. Deterministic: the answer is a
// function of the sequence of calls. Not thread-safe: the executor calls it in batch order.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/types.h"

namespace specdec {

class SharedNgramPool {
 public:
  struct Options {
    std::int32_t capacity_tokens = 65536;  // per salt, separators included
    std::int32_t max_ngram = 2;            // M, 1..kMaxNgram
    std::int32_t max_salts = 8;
  };

  // Throws std::invalid_argument for a value out of range.
  explicit SharedNgramPool(const Options& options);
  ~SharedNgramPool();

  // Adds text[begin..end) of one request, which may be published piece by piece. A piece goes on
  // with the last run if the ring ends with the (up to 16) tokens before `begin`; otherwise it
  // starts a new run in which those tokens are stored again, so pieces of 32 tokens or more are
  // economical when several requests take turns. No token is negative. Of a piece longer than the
  // ring its end is kept.
  void publish(const std::string& salt, const TokenId* text, std::int32_t begin, std::int32_t end);

  // Copies to `draft` ([max_draft_len]) what followed the most recent occurrence of the longest
  // suffix of history[0..len) that the salt's ring holds, at most to the end of that run. Returns
  // the length, 0 for none; *match_len receives the length of the suffix.
  std::int32_t lookup(const std::string& salt, const TokenId* history, std::int32_t len,
                      std::int32_t max_draft_len, TokenId* draft, std::int32_t* match_len);

  // Bytes held now, and at most.
  std::int64_t bytes() const;
  std::int64_t max_bytes() const;
  std::int32_t num_salts() const { return static_cast<std::int32_t>(salts_.size()); }

 private:
  struct Ring;
  Ring* touch(const std::string& salt, bool create);
  std::int64_t ring_bytes() const;

  Options options_;
  std::int64_t buckets_ = 1;                                        // per ring, a power of two
  std::list<std::pair<std::string, std::unique_ptr<Ring>>> order_;  // most recently used first
  std::unordered_map<std::string, decltype(order_)::iterator> salts_;
};

}  // namespace specdec
