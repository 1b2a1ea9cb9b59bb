#include "engine/draft_runner.h"

#include <algorithm>

#include "base/check.h"
#include "base/pages.h"

namespace specdec {
namespace {

// A slot with at most this many unread tokens is in the middle of its text and is never held back.
constexpr int kFewTokens = 16;

const DraftRunnerConfig& checked(const DraftRunnerConfig& c) {
  SPECDEC_REQUIRE(c.vocab_size >= 1, "vocab_size = ", c.vocab_size, ": at least 1");
  SPECDEC_REQUIRE(c.num_scores >= 1, "num_scores = ", c.num_scores, ": at least 1");
  SPECDEC_REQUIRE(c.max_requests >= 1, "max_requests = ", c.max_requests, ": at least 1");
  SPECDEC_REQUIRE(c.max_rows >= c.max_requests, "max_rows = ", c.max_rows,
                  ": a pass has at least one row per request, max_requests = ", c.max_requests);
  SPECDEC_REQUIRE(c.max_len >= 1, "max_len = ", c.max_len, ": at least 1");
  SPECDEC_REQUIRE(
      c.input_ids.empty() || c.input_ids.size() == static_cast<std::size_t>(c.vocab_size),
      "input_ids has ", c.input_ids.size(), " entries, vocab_size is ", c.vocab_size);
  SPECDEC_REQUIRE(
      c.output_ids.empty() || c.output_ids.size() == static_cast<std::size_t>(c.num_scores),
      "output_ids has ", c.output_ids.size(), " entries, num_scores is ", c.num_scores);
  SPECDEC_REQUIRE(!c.output_ids.empty() || c.num_scores <= c.vocab_size,
                  "num_scores = ", c.num_scores,
                  " without output_ids: at most vocab_size = ", c.vocab_size);
  for (std::size_t i = 0; i < c.output_ids.size(); ++i) {
    const TokenId id = c.output_ids[i];
    SPECDEC_REQUIRE(id >= 0 && id < c.vocab_size && (i == 0 || id > c.output_ids[i - 1]),
                    "output_ids[", i, "] = ", id, ": ascending ids of 0..", c.vocab_size - 1,
                    " are needed");
  }
  return c;
}

int pages_per_slot(const DraftRunnerConfig& c, int page_size) {
  return pages_per_request(c.max_len, page_size);
}

}  // namespace

DraftRunner::DraftRunner(const DraftRunnerConfig& config, const KvCacheView& cache,
                         const Backend& backend)
    : config_(checked(config)),
      cache_(cache),
      backend_(backend),
      pages_(cache.num_pages, cache.page_size, config.max_requests,
             pages_per_slot(config, cache.page_size), config.enable_block_reuse),
      plan_(config.max_requests, config.max_rows, pages_per_slot(config, cache.page_size)),
      sequences_(config.max_requests),
      path_(kMaxStepTokens) {}

DraftRunner::Sequence& DraftRunner::sequence(int slot) {
  SPECDEC_REQUIRE(slot >= 0 && slot < config_.max_requests && sequences_[slot].open, "slot ", slot,
                  " is not open: slots are 0..", config_.max_requests - 1);
  return sequences_[slot];
}

const std::vector<DraftNode>& DraftRunner::nodes(int slot) const {
  return const_cast<DraftRunner*>(this)->sequence(slot).nodes;
}

int DraftRunner::cached(int slot) const {
  const Sequence& s = const_cast<DraftRunner*>(this)->sequence(slot);
  return std::min(s.cached, static_cast<int>(s.history.size()));
}

int DraftRunner::open(std::vector<TokenId> tokens, const SamplingLaw& law, std::uint64_t seed,
                      DraftMode mode, std::string salt) {
  SPECDEC_REQUIRE(!tokens.empty(), "tokens is empty: the last one is the golden token");
  SPECDEC_REQUIRE(mode == DraftMode::kBest || !law.greedy(),
                  "temperature = 0 with a mode that draws: use 'best'");
  for (int slot = 0; slot < config_.max_requests; ++slot) {
    Sequence& s = sequences_[slot];
    if (s.open) continue;
    s = Sequence{};
    s.open = true;
    s.mode = mode;
    s.law = law;
    s.seed = seed;
    s.salt = std::move(salt);
    s.history = std::move(tokens);
    return slot;
  }
  return -1;
}

void DraftRunner::close(int slot) {
  sequence(slot);
  publish(slot);
  sequences_[slot] = Sequence{};
  pages_.release(slot);
}

std::vector<std::pair<float, bool>> DraftRunner::extend(int slot,
                                                        const std::vector<TokenId>& tokens) {
  Sequence& s = sequence(slot);
  std::vector<std::pair<float, bool>> seen;
  const int length = static_cast<int>(s.history.size());
  if (s.cached >= length) {  // else no draft was made
    const int kept = is_tree(s) ? keep_tree(slot, tokens, &seen) : keep_chain(s, tokens, &seen);
    s.cached = std::min(s.cached, length) + kept;
  }
  s.history.insert(s.history.end(), tokens.begin(), tokens.end());
  // The golden token is always read: its row is what the next draft comes from.
  s.cached = std::min(s.cached, static_cast<int>(s.history.size()) - 1);
  s.nodes.clear();
  s.expanded.clear();
  s.frontier.clear();
  publish(slot);
  pages_.rewind(slot);
  return seen;
}

// Takes over the published pages that the text starts with.
void DraftRunner::begin(int slot) {
  Sequence& s = sequences_[slot];
  if (s.begun) return;
  s.begun = true;
  pages_.open(slot, s.salt);
  const auto reusable = static_cast<std::int64_t>(s.history.size()) - 1;
  s.cached = pages_.attach(slot, s.history.data(), reusable) * pages_.page_size();
}

// Decided tokens only: what was merely drafted is never shared.
void DraftRunner::publish(int slot) {
  const Sequence& s = sequences_[slot];
  if (!s.begun) return;
  const int decided = std::min(s.cached, static_cast<int>(s.history.size()));
  pages_.commit(slot, decided);
  pages_.publish(slot, s.history.data(), decided);
}

// How many drafts came true and have been read.
int DraftRunner::keep_chain(Sequence& s, const std::vector<TokenId>& tokens,
                            std::vector<std::pair<float, bool>>* seen) const {
  const int read = s.cached - static_cast<int>(s.history.size());
  int kept = 0;
  for (std::size_t i = 0; i < s.nodes.size() && i < tokens.size(); ++i) {
    const bool came_true = s.nodes[i].token == tokens[i];
    seen->emplace_back(s.nodes[i].confidence, came_true);
    if (!came_true) break;
    kept = std::min(static_cast<int>(i) + 1, read);
  }
  return kept;
}

int DraftRunner::keep_tree(int slot, const std::vector<TokenId>& tokens,
                           std::vector<std::pair<float, bool>>* seen) {
  Sequence& s = sequences_[slot];
  std::vector<std::int32_t> rows;
  bool all_read = true;
  std::int32_t parent = -1;
  for (const TokenId token : tokens) {
    std::int32_t next = -1;
    bool has_children = false;
    for (std::size_t i = 0; i < s.nodes.size(); ++i) {
      if (s.nodes[i].parent != parent) continue;
      has_children = true;
      const bool came_true = s.nodes[i].token == token;
      seen->emplace_back(s.nodes[i].confidence, came_true);
      if (came_true) next = static_cast<std::int32_t>(i);
    }
    if (!has_children || next < 0) break;
    all_read = all_read && s.nodes[next].row > 0;
    if (all_read) rows.push_back(s.nodes[next].row);
    parent = next;
  }
  move_rows(slot, rows);
  return static_cast<int>(rows.size());
}

// Moves the K/V of rows of the last tree pass behind the golden token's.
void DraftRunner::move_rows(int slot, const std::vector<std::int32_t>& rows) {
  if (rows.empty()) return;
  Sequence& s = sequences_[slot];
  std::copy(rows.begin(), rows.end(), path_.begin());
  const std::int32_t kv_len = static_cast<std::int32_t>(s.history.size()) - 1;
  const std::int32_t cu_rows[2] = {0, static_cast<std::int32_t>(s.expanded.size()) + 1};
  const auto count = static_cast<std::int32_t>(rows.size());
  if (config_.defer_moves) {
    const auto& pages = pages_.pages(slot);
    moves_.add(kv_len, cu_rows[1], pages.data(), static_cast<std::int32_t>(pages.size()),
               path_.data(), count);
    return;
  }
  CompactKvParams moved;
  moved.step.num_requests = 1;
  moved.step.num_rows = cu_rows[1];
  moved.step.cu_rows = cu_rows;
  moved.step.kv_len = &kv_len;
  moved.step.page_table = pages_.pages(slot).data();
  moved.step.page_table_stride = static_cast<std::int32_t>(pages_.pages(slot).size());
  moved.cache = cache_;
  moved.path = path_.data();
  moved.path_len = &count;
  backend_.compact_kv(moved);
}

KvMoves DraftRunner::take_moves() {
  KvMoves taken;
  std::swap(taken, moves_);
  return taken;
}

int DraftRunner::unread(const Sequence& s) const {
  const int length = static_cast<int>(s.history.size());
  if (is_tree(s))
    return s.frontier.empty() ? 0 : 1 + static_cast<int>(s.expanded.size() + s.frontier.size());
  return length + static_cast<int>(s.nodes.size()) - s.cached;
}

const StepPlan* DraftRunner::plan(const std::vector<int>& slots, int prefill_rows,
                                  bool needs_scores) {
  SPECDEC_REQUIRE(slots.size() <= static_cast<std::size_t>(config_.max_requests),
                  "plan: ", slots.size(), " slots, there are ", config_.max_requests);
  SPECDEC_REQUIRE(moves_.empty(),
                  "plan() before the K/V moves of extend() were taken: call take_moves() and make "
                  "them");
  plan_.num_requests = plan_.num_rows = plan_.num_logit_rows = plan_.num_prefill_rows = 0;
  plan_.needs_logits = needs_scores;
  plan_.cu_rows[0] = plan_.cu_logits[0] = 0;
  planned_.clear();
  statuses_.assign(slots.size(), kStillReading);
  confidences_.assign(slots.size(), 0.0f);
  // Texts in progress first: a long prompt takes what they leave.
  for (const bool few : {true, false}) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const Sequence& s = sequence(slots[i]);
      begin(slots[i]);
      int rows = unread(s);
      if ((rows <= kFewTokens || is_tree(s)) != few) continue;
      const int depth = s.nodes.empty() ? 0 : s.nodes.back().depth;
      if (static_cast<int>(s.history.size()) + depth > config_.max_len) {
        statuses_[i] = kTooLong;
        continue;
      }
      if (rows == 0) {
        statuses_[i] = kNoDraft;
        continue;
      }
      const int room = config_.max_rows - plan_.num_rows;
      if (is_tree(s)) {
        if (rows > room) continue;
      } else {
        rows = std::min(rows, few ? room : std::min(room, prefill_rows));
        if (rows <= 0) continue;
        if (!few) prefill_rows -= rows;
      }
      place(slots[i], static_cast<int>(i), rows);
    }
  }
  if (plan_.num_requests == 0) return nullptr;
  ++plan_.generation;
  return &plan_;
}

// A slot that cannot even begin its round gives up what it has: others can use it.
bool DraftRunner::reserve(int slot, std::int64_t tokens) {
  if (pages_.reserve(slot, tokens)) return true;
  Sequence& s = sequences_[slot];
  if (s.nodes.empty()) {
    s.cached = 0;
    s.begun = false;
    pages_.release(slot);
  }
  return false;
}

void DraftRunner::place(int slot, int index, int rows) {
  Sequence& s = sequences_[slot];
  const bool tree = is_tree(s);
  const int length = static_cast<int>(s.history.size());
  const int kv_len = tree ? length - 1 : s.cached;
  // A text that has not been read yet is begun only if there is room for all of it, and for the
  // first step.
  const int needed = s.cached < length - kFewTokens ? length : kv_len + rows;
  if (!reserve(slot, std::max(needed, kv_len + rows))) {
    statuses_[index] = kNoPages;
    return;
  }
  const int b = plan_.num_requests++;
  const int first = plan_.num_rows;
  plan_.kv_len[b] = kv_len;
  plan_.slot[b] = slot;
  plan_.is_tree[b] = 0;
  const auto& pages = pages_.pages(slot);
  std::copy(pages.begin(), pages.end(),
            plan_.page_table.begin() + static_cast<std::ptrdiff_t>(b) * plan_.page_table_stride);
  Planned planned{slot, index, rows, plan_.num_logit_rows, 0};
  if (tree) {
    place_tree(s);
    planned.num_logits = static_cast<int>(s.frontier.size());
  } else {
    place_chain(s, rows);
    const int total = length + static_cast<int>(s.nodes.size());
    if (s.cached + rows == total) {
      planned.num_logits = 1;
    } else {
      plan_.num_prefill_rows += rows;
    }
  }
  plan_.num_rows += rows;
  for (int i = planned.num_logits; i > 0; --i) {
    plan_.logit_rows[plan_.num_logit_rows++] = first + rows - i;
  }
  plan_.cu_rows[b + 1] = plan_.num_rows;
  plan_.cu_logits[b + 1] = plan_.num_logit_rows;
  planned_.push_back(planned);
}

void DraftRunner::place_chain(const Sequence& s, int rows) {
  const int first = plan_.num_rows;
  const int length = static_cast<int>(s.history.size());
  for (int i = 0; i < rows; ++i) {
    const int at = s.cached + i;
    const TokenId token = at < length ? s.history[at] : s.nodes[at - length].token;
    plan_.tokens[first + i] = config_.input_ids.empty() ? token : config_.input_ids[token];
    plan_.positions[first + i] = at;
    plan_.parents[first + i] = i - 1;
  }
}

// Row 0 is the golden token again, then the nodes in the order in which they were expanded.
void DraftRunner::place_tree(Sequence& s) {
  const int first = plan_.num_rows;
  const int golden = static_cast<int>(s.history.size()) - 1;
  auto put = [&](int row, TokenId token, std::int32_t parent) {
    plan_.tokens[first + row] = config_.input_ids.empty() ? token : config_.input_ids[token];
    plan_.parents[first + row] = parent;
  };
  put(0, s.history.back(), -1);
  int row = 1;
  for (const auto* part : {&s.expanded, &s.frontier}) {
    for (const std::int32_t i : *part) {
      const DraftNode& node = s.nodes[i];
      put(row++, node.token, node.parent < 0 ? 0 : s.nodes[node.parent].row);
    }
  }
  const std::int32_t* parents = plan_.parents.data() + first;
  std::int32_t depth[kMaxStepTokens];
  derive_depths(parents, row, depth);
  for (int i = 0; i < row; ++i) plan_.positions[first + i] = golden + depth[i];
  if (!is_chain(parents, row)) {
    plan_.is_tree[plan_.num_requests - 1] = 1;
    derive_mask(parents, row, plan_.mask.data() + static_cast<std::ptrdiff_t>(first) * kMaskWords);
  }
}

void DraftRunner::bind_probs(float* probs, int max_drafts) {
  probs_ = probs;
  probs_drafts_ = max_drafts;
}

std::size_t DraftRunner::memory_bytes() const {
  std::size_t bytes = plan_.memory_bytes();
  for (const Sequence& s : sequences_) {
    bytes += s.history.capacity() * sizeof(TokenId) + s.nodes.capacity() * sizeof(DraftNode);
  }
  return bytes;
}

}  // namespace specdec
