#include "backend/cpu/drafter/medusa_drafter.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <limits>
#include <utility>

#include "backend/cpu/drafter/thread_seconds.h"
#include "base/check.h"

namespace specdec::cpu {
namespace {

constexpr double kRequestPrior = 24.0;      // observations' worth of the rates to start from
constexpr double kRequestMemory = 128.0;    // observations of a request that count
constexpr std::int64_t kArrangeEvery = 16;  // steps of a request: its tree follows what was seen
constexpr double kNeverFades = std::numeric_limits<double>::infinity();

}  // namespace

MedusaDrafter::MedusaDrafter(MedusaHeads* heads, std::vector<double> prior, std::int32_t num_ranks,
                             std::int32_t max_requests, std::int32_t vocab_size)
    : heads_(heads),
      prior_(std::move(prior)),
      num_ranks_(num_ranks),
      vocab_size_(vocab_size),
      requests_(static_cast<std::size_t>(max_requests)),
      measured_(heads->num_heads(), num_ranks, prior_.data(), 0.0, kNeverFades) {}

std::int32_t MedusaDrafter::seen_ranks() const {
  const auto most = std::min<std::int64_t>(num_ranks_, heads_->num_scores());
  return std::min(kSeenRanks, static_cast<std::int32_t>(most));
}

void MedusaDrafter::enter(std::int32_t slot, const std::vector<std::vector<std::int32_t>>& choices,
                          bool adaptive) {
  SPECDEC_REQUIRE(slot >= 0 && slot < static_cast<std::int32_t>(requests_.size()), "slot = ", slot,
                  ": there are ", requests_.size());
  std::optional<Request>& request = requests_[static_cast<std::size_t>(slot)];
  request.reset();
  if (choices.empty()) return;
  const auto ranks =
      static_cast<std::int32_t>(std::min<std::int64_t>(num_ranks_, heads_->num_scores()));
  request.emplace(
      guess_nodes(choices, heads_->num_heads(), ranks), adaptive,
      GuessRates(heads_->num_heads(), num_ranks_, prior_.data(), kRequestPrior, kRequestMemory));
}

void MedusaDrafter::draft(const SlotRequests& step) {
  choose(step);
  if (drafting_.empty()) return;
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  const double processor_begin = thread_seconds();
  // Heads and guesses that the nodes of these requests need, no more.
  std::int32_t num_heads = 0, top_k = 0;
  hidden_.clear();
  for (const Drafting& one : drafting_) {
    num_heads = std::max(num_heads, one.num_heads);
    top_k = std::max(top_k, one.top_k);
    hidden_.push_back(step.hidden_of(one.b));
  }
  ids_.resize(drafting_.size() * static_cast<std::size_t>(num_heads * top_k));
  heads_->best(hidden_, num_heads, top_k, ids_.data());
  stats_.head_thread_seconds += thread_seconds() - processor_begin;
  stats_.head_seconds += std::chrono::duration<double>(Clock::now() - begin).count();
  const TokenId* ids = ids_.data();
  for (const Drafting& one : drafting_) {
    propose(step, one, ids, num_heads, top_k);
    ids += num_heads * top_k;
  }
  ++stats_.steps;
}

// drafting_: who drafts in this step, and what each needs of the heads.
void MedusaDrafter::choose(const SlotRequests& step) {
  drafting_.clear();
  for (std::int32_t b = 0; b < step.num_requests; ++b) {
    const std::int32_t slot = step.slot_ids[b];
    if (slot < 0) continue;
    const std::int32_t len = step.len_to_draft(b);
    Request* request = nullptr;
    if (slot < static_cast<std::int32_t>(requests_.size()) && requests_[slot]) {
      request = &*requests_[slot];
    }
    if (request == nullptr || len == 0) {
      ++stats_.idle;
      continue;
    }
    learn(request, step.slots.at(slot)->history(), len);
    if (request->steps++ % kArrangeEvery == 0) arrange(request);
    const auto count =
        std::min(step.max_drafts[b], static_cast<std::int32_t>(request->nodes.size()));
    const auto last = static_cast<std::size_t>(count - 1);
    drafting_.push_back({b, len, count, request->heads[last],
                         std::max(request->ranks[last], seen_ranks()), request});
  }
}

void MedusaDrafter::arrange(Request* request) const {
  std::vector<double> worth = guess_worth(request->given, request->rates);
  request->nodes = request->adaptive ? likeliest_first(request->given, &worth) : request->given;
  request->worth.assign(worth.begin(), worth.end());
  request->heads.clear();
  request->ranks.clear();
  std::int32_t heads = 0, ranks = 0;
  for (const GuessNode& node : request->nodes) {
    request->heads.push_back(heads = std::max(heads, node.head + 1));
    request->ranks.push_back(ranks = std::max(ranks, node.rank + 1));
  }
}

// Holds earlier guesses against the tokens that are known by now.
void MedusaDrafter::learn(Request* request, const TokenId* text, std::int32_t len) {
  std::deque<Guesses>& pending = request->pending;
  for (Guesses& guesses : pending) {
    while (guesses.next_head < guesses.num_heads && guesses.start + guesses.next_head < len) {
      const std::int32_t head = guesses.next_head++;
      const TokenId* const ids = guesses.ids.data() + head * guesses.top_k;
      const TokenId token = text[guesses.start + head];
      measured_.observe(head, ids, guesses.top_k, token);
      // The heads behind a wrong one are not asked: none of their nodes can be accepted.
      if (!request->rates.observe(head, ids, guesses.top_k, token)) {
        guesses.next_head = guesses.num_heads;
      }
    }
  }
  std::erase_if(pending, [](const Guesses& g) { return g.next_head == g.num_heads; });
}

void MedusaDrafter::propose(const SlotRequests& step, const Drafting& one, const TokenId* ids,
                            std::int32_t num_heads, std::int32_t top_k) {
  SPECDEC_ENSURE(one.num_heads <= num_heads && one.top_k <= top_k, "guesses of a request");
  Request& request = *one.request;
  TokenId tokens[kMaxDraftLen];
  std::int32_t parents[kMaxDraftLen];
  const std::int32_t count = std::min(one.count, kMaxDraftLen);
  for (std::int32_t i = 0; i < count; ++i) {
    const GuessNode& node = request.nodes[static_cast<std::size_t>(i)];
    tokens[i] = ids[node.head * top_k + node.rank];
    parents[i] = node.parent;
  }
  propose_draft(SerialTeam{}, step.slots.at(step.slot_ids[one.b])->proposed_draft(), one.len,
                tokens, parents, request.worth.data(), count, vocab_size_);
  stats_.nodes += count;
  ++stats_.proposals;
  Guesses said{one.len, one.num_heads, one.top_k, 0, {}};
  said.ids.reserve(static_cast<std::size_t>(one.num_heads * one.top_k));
  for (std::int32_t h = 0; h < one.num_heads; ++h) {
    said.ids.insert(said.ids.end(), ids + h * top_k, ids + h * top_k + one.top_k);
  }
  request.pending.push_back(std::move(said));
}

}  // namespace specdec::cpu
