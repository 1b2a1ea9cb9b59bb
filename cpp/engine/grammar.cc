// What a grammar changes of a step: drafts that it does not allow are cut before the pass, tokens
// that it leaves no choice about are proposed, and every node's scores are masked when the host
// chooses. The grammars themselves are the caller's: masks and cuts are all that is known of them.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/executor.h"

namespace specdec {
namespace {

// As a match of so many tokens: rates are kept apart from those of shorter ones.
constexpr int kForcedMatch = 16;

// Nodes that no grammar cuts: of lookahead, those that carry its window.
int fixed_nodes(Slot* slot, bool own_tree) {
  int nodes = 1;
  if (slot->method != SlotMethod::kLookahead || !own_tree) return nodes;
  const std::int32_t* origin = slot->lookahead_state()->origin();
  while (nodes < slot->tree.size && (origin[nodes] & kOriginWindow) != 0) ++nodes;
  return nodes;
}

}  // namespace

// The chain that a grammar leaves no choice about.
void Executor::offer_forced(RequestRecord& request, int most) {
  int node = DraftOffer::kGolden;
  for (int i = 0; i < std::min(most, static_cast<int>(request.forced.size())); ++i) {
    const DraftOffer::Estimate estimate{kForcedMatch, static_cast<std::int16_t>(i + 1), 1.0f};
    node = request.offer.add(node, request.forced[i], DraftSource::kGrammar, estimate,
                             request.learnt(), request.shared_rates.get());
  }
}

ChoiceTree Executor::choice_tree(const Place& place, int first) const {
  const RequestRecord& request = *place.request;
  Slot* slot = request.host_slot;
  const DraftTree& tree = slot->tree;
  const bool own_tree = request.own_tree && slot->begun != 0;
  ChoiceTree out;
  out.request = request.id;
  out.first = first;
  // On a device the rows are placed already.
  out.fixed = host_ == nullptr ? tree.size : fixed_nodes(slot, own_tree);
  out.processed = request.params.processes_scores;
  out.masked = request.params.grammar;
  out.greedy = request.params.sampling.greedy() && !request.params.processes_scores &&
               !request.processor.active(request.output_so_far());
  out.prompt_len = request.prompt_len;
  out.history.assign(slot->history(), slot->history() + slot->len);
  out.tokens.assign(tree.tokens, tree.tokens + tree.size);
  out.parents.assign(tree.parents, tree.parents + tree.size);
  return out;
}

std::vector<ChoiceTree> Executor::draft() {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(host_ != nullptr && host_->stage != HostSteps::Stage::kIdle,
                  "draft() follows a plan() of steps that the host runs");
  draft_places();
  std::vector<ChoiceTree> trees;
  for (const Place& place : flights_.back().places) {
    const RequestRecord& request = *place.request;
    if (!place.decides || !request.params.grammar || request.ended) continue;
    trees.push_back(choice_tree(place, -1));
  }
  return trees;
}

void Executor::cut(RequestId id, const std::vector<std::uint8_t>& kept) {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(host_ != nullptr && host_->stage == HostSteps::Stage::kDrafted,
                  "cut() stands between draft() and build()");
  for (Place& place : flights_.back().places) {
    RequestRecord& request = *place.request;
    if (request.id != id || !place.decides) continue;
    DraftTree& tree = request.host_slot->tree;
    SPECDEC_REQUIRE(kept.size() == static_cast<std::size_t>(tree.size), "cut: kept has ",
                    kept.size(), " entries, the tree ", tree.size, " nodes");
    const int fixed = choice_tree(place, -1).fixed;
    const DraftTree before = tree;
    std::int32_t placed[kMaxStepTokens] = {0};  // -1: cut
    tree.reset(before.tokens[0]);
    Proposal* proposal = request.step_proposal.get();
    for (int i = 1; i < before.size; ++i) {
      const std::int32_t parent = placed[before.parents[i]];
      placed[i] =
          parent >= 0 && (i < fixed || kept[i] != 0) ? tree.add(before.tokens[i], parent) : -1;
      if (placed[i] < 0) continue;
      request.sources[placed[i]] = request.sources[i];
      request.uncut[placed[i]] = request.uncut[i];
      if (proposal != nullptr) proposal->source[placed[i]] = proposal->source[i];
    }
    const int lost = before.size - tree.size;
    totals_.grammar_cut += lost;
    if (place.is_prefill) {
      place.drafts -= lost;
      place.choices -= lost;
    } else if (request.weighed && !request.own_tree) {
      request.offer.drop(placed, before.size);
    }
    return;
  }
  SPECDEC_REQUIRE(false, "cut: request ", id, " decides nothing in this step");
}

void Executor::force(RequestId id, std::vector<TokenId> tokens) {
  for (const TokenId token : tokens) {
    SPECDEC_REQUIRE(token >= 0 && token < config_.vocab_size, "force: token id ", token,
                    ": this model's ids are 0..", config_.vocab_size - 1);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  RequestRecord* request = book_.find_running(id);
  if (request == nullptr || request->host_slot == nullptr || !request->shares.empty()) return;
  if (request->known_drafts > 0) request->forced = std::move(tokens);
}

std::vector<TokenId> Executor::output(RequestId id, int first) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const RequestRecord* request = book_.find(id);
  if (request == nullptr || request->ended || request->host_slot == nullptr) return {};
  if (request->host_slot->begun == 0 || !request->shares.empty()) return {};
  const TokenId* begin = request->tokens() + request->prompt_len + first;
  const TokenId* end = request->tokens() + request->host_slot->len;
  return begin < end ? std::vector<TokenId>(begin, end) : std::vector<TokenId>();
}

// Every tree with a grammar comes with masks of its nodes, unless its grammar has failed.
void Executor::check_masks(const HostWords& words) const {
  const InFlightStep& flight = flights_.back();
  const int wanted = (config_.vocab_size + 31) / 32;
  for (const Place& place : flight.places) {
    const RequestRecord& request = *place.request;
    if (!place.decides || !request.params.grammar || request.ended || flight.failed) continue;
    if (words.errors.count(request.id) != 0) continue;
    const auto masks = words.masks.find(request.id);
    SPECDEC_REQUIRE(masks != words.masks.end(), "request ", request.id,
                    " has a grammar: give the masks of its tree");
    if (masks->second.rows == 0) continue;
    SPECDEC_REQUIRE(masks->second.rows == request.host_slot->tree.size, "the masks of request ",
                    request.id, " have ", masks->second.rows, " rows, its tree has ",
                    request.host_slot->tree.size, " nodes");
    SPECDEC_REQUIRE(masks->second.words >= wanted, "the masks of request ", request.id, " have ",
                    masks->second.words, " words, ", wanted, " hold the vocabulary");
  }
}

}  // namespace specdec
