// What the scores of a request's rows decide where its slot is the host's: in steps that the host
// runs when they are committed, in steps on a device when they are delivered.
#include <algorithm>

#include "algo/fault.h"
#include "engine/executor.h"

namespace specdec {
namespace {

// Text goes to the public pool in pieces of this many tokens: each piece repeats a little of what
// came before it, so that n-grams across the border are found.
constexpr int kPublishTokens = 32;

}  // namespace

// What the scores of one request's rows decide, where its slot is the host's.
void Executor::decide_place(Place& place, const StepShare& share, const PlaceRows& rows,
                            const HostWords& words, const StepDraftProbs* drawn, int drawn_index,
                            SlotResult* result, std::int32_t* path, std::int32_t* path_len) {
  RequestRecord& request = *place.request;
  StepOutput& out = place.out;
  if (place.is_prefill && request.params.prompt_logprobs) {
    const int first = place.rows + place.drafts - place.choices;  // that scores are there of
    for (int i = first; i < place.rows && place.start + i + 1 < request.prompt_len; ++i) {
      const TokenId next = request.tokens()[place.start + i + 1];
      out.prompt_logprobs.push_back(compute_logprobs(rows.raw + (i - first) * rows.raw_stride,
                                                     config_.vocab_size, next,
                                                     *request.params.prompt_logprobs));
    }
  }
  if (!place.decides) return;
  Slot* slot = request.host_slot;
  const auto masks = words.masks.find(request.id);
  const TokenMasks* mask = masks == words.masks.end() ? nullptr : &masks->second;
  if (mask != nullptr && mask->rows > 0 && mask->rows != slot->tree.size) mask = nullptr;
  const auto failed = words.errors.find(request.id);
  if (failed != words.errors.end() || (request.params.grammar && mask == nullptr)) {
    out.finish_reason = FinishReason::kError;
    out.error = failed != words.errors.end()
                    ? failed->second
                    : "internal error (please report): no masks of this request's grammar";
    *result = SlotResult{};
    result->num_drafts = slot->tree.num_drafts();
    result->bad_row = 1;
    return;
  }
  // A prompt's other rows decide nothing; of a device's tree there may be fewer than was planned.
  const int root = place.tree >= 0 ? 0 : place.choices - slot->tree.size;
  TokenId* sampled = rows.sampled + root;
  const Proposal* proposal = request.step_proposal.get();
  const bool own_tree = request.own_tree && proposal == nullptr;
  const HostChoice choice{request.params,
                          request.processor,
                          slot->history(),
                          slot->len,
                          request.output_so_far(),
                          slot->tree,
                          proposal == nullptr ? nullptr : &proposal->probs,
                          proposal == nullptr ? nullptr : proposal->source,
                          slot->method == SlotMethod::kLookahead,
                          own_tree ? drawn : nullptr,
                          drawn_index,
                          mask == nullptr || mask->rows == 0 ? nullptr : mask,
                          request.uncut.empty() ? nullptr : request.uncut.data(),
                          place.root_draw < 0 ? kNotDrawn : root_draws_[place.root_draw].token,
                          rows.best == nullptr ? nullptr : rows.best + root};
  acceptor_.decide(choice, rows.scores == nullptr ? nullptr : rows.scores + root * rows.stride,
                   rows.stride, sampled, &accepted_);
  const bool begins = slot->begun == 0;
  slot_commit(SerialTeam{}, slot, &slot->tree, sampled, &accepted_, result, path, path_len,
              own_tree);
  const int kept = std::max(0, result->num_tokens - 1);
  const bool in_place = kept == 0 || accepted_.path[kept - 1] == kept;
  // What has ended leaves K/V behind only to be reused.
  if (slot->frozen() && book_.pages().reuse() && !in_place) *path_len = kept;
  if (fault(Fault::kStaleContext)) *path_len = 0;
  deliver_on_host(place, root, rows, result);
  if (request.params.return_drafts) keep_drafts(request, *result, out);
  count_sources(request, *result, out);
  learn_on_host(request, share, *result, begins);
}

// What the tokens bring besides themselves: logprobs, their rows, the text of processors.
void Executor::deliver_on_host(Place& place, int root, const PlaceRows& rows, SlotResult* result) {
  RequestRecord& request = *place.request;
  StepOutput& out = place.out;
  Slot* slot = request.host_slot;
  const DraftTree& tree = slot->tree;
  for (int i = 0; i < result->num_tokens; ++i) {
    const int row = root + (i == 0 ? 0 : accepted_.path[i - 1]);
    const TokenId token = result->tokens[i];
    request.processor.append(token);
    if (request.params.logprobs) {
      out.logprobs.push_back(compute_logprobs(rows.raw + row * rows.raw_stride, config_.vocab_size,
                                              token, *request.params.logprobs));
    }
    out.last_logit_row = rows.first + row;
    if (request.params.return_logits) out.logit_rows.push_back(out.last_logit_row);
  }
  if (place.is_prefill && request.params.end_after_drafts && !slot->frozen()) {
    slot->finish = result->finish = static_cast<std::int32_t>(FinishReason::kLength);
  }
  if (result->bad_row != 0 && rows.sampled[root] == kNothingAllowed) {
    out.error =
        "no token is allowed here: structured_outputs, allowed_token_ids, bad_words, min_tokens, "
        "logit_bias and logits_processors leave none; relax them";
  }
  std::int32_t depth[kMaxStepTokens];
  derive_depths(tree.parents, tree.size, depth);
  out.max_path = *std::max_element(depth, depth + tree.size);
}

// The step's tree, what became of its nodes, and who proposed them.
void Executor::keep_drafts(const RequestRecord& request, const SlotResult& result,
                           StepOutput& out) const {
  const DraftTree& tree = request.host_slot->tree;
  for (int i = 1; i < tree.size; ++i) {
    out.drafts.push_back({tree.tokens[i], tree.parents[i] - 1, false, request.sources[i]});
  }
  for (int i = 0; i < result.num_accepted; ++i) out.drafts[accepted_.path[i] - 1].accepted = true;
}

// Which of the step's drafts each source has proposed; where the output stands in the prediction
// now.
void Executor::count_sources(RequestRecord& request, const SlotResult& result, StepOutput& out) {
  const Slot* slot = request.host_slot;
  for (int i = 1; i <= result.num_drafts; ++i) {
    for (std::size_t s = 0; s < kNumDraftSources; ++s) {
      out.sources[s].drafts += (request.sources[i] >> s) & 1;
    }
  }
  for (int i = 0; i < result.num_accepted; ++i) {
    const SourceBits bits = request.sources[accepted_.path[i]];
    for (std::size_t s = 0; s < kNumDraftSources; ++s) out.sources[s].accepted += (bits >> s) & 1;
    out.accepted_by.push_back(bits);
  }
  request.forced.clear();
  const std::span<const TokenId> output(request.host_slot->history() + request.prompt_len,
                                        static_cast<std::size_t>(slot->len - request.prompt_len));
  if (request.prediction) request.prediction->advance(output, result.num_tokens);
  if (request.prompt_edits) request.prompt_edits->advance(output, result.num_tokens);
}

// The drafts of the request's method, beside others that were at hand as if it had drafted alone.
Executor::Brought Executor::brought_on_host(const RequestRecord& request,
                                            const SlotResult& result) {
  right_drafts_.clear();
  Slot* slot = request.host_slot;
  if (!request.asks()) {
    for (int i = 0; i < result.num_accepted; ++i) {
      const std::int32_t node = accepted_.path[i];
      right_drafts_.push_back(request.uncut.empty() ? node - 1 : request.uncut[node]);
    }
    return {result.num_drafts, result.num_accepted, right_drafts_};
  }
  if (slot->method == SlotMethod::kLookahead) {
    const SourceBits own = bit_of(DraftSource::kLookahead);
    Brought brought;
    for (int i = 1; i <= result.num_drafts; ++i) brought.drafts += (request.sources[i] & own) != 0;
    while (brought.accepted < result.num_accepted &&
           (request.sources[accepted_.path[brought.accepted]] & own) != 0) {
      ++brought.accepted;
    }
    return brought;
  }
  // Decided tokens say how far they were right, verified or not.
  const int proposed = request.offer.proposed(DraftSource::kModel);
  const ProposedDraft* drafts = slot->proposed_draft();
  for (int at = 0, i = 0, parent = -1; i < proposed && at < result.num_tokens; ++i) {
    if (drafts->parents[i] != parent || drafts->tokens[i] != result.tokens[at]) continue;
    right_drafts_.push_back(i);
    parent = i;
    ++at;
  }
  return {proposed, static_cast<int>(right_drafts_.size()), right_drafts_};
}

// What the step says about drafts of later ones. Decided tokens say how far an offered draft was
// right, verified or not.
void Executor::learn_on_host(RequestRecord& request, const StepShare& share,
                             const SlotResult& result, bool first) {
  if (result.num_tokens > 0) {
    const Brought brought = first ? Brought() : brought_on_host(request, result);
    request.offer.observe(result.tokens, result.num_tokens, &request.rates,
                          request.shared_rates.get());
    if (!first) learn(request, share, result, brought);
  }
  request.offer.clear();
  if (public_pool_ && result.num_tokens > 0 && request.host_slot->method == SlotMethod::kNgram) {
    const bool failed = result.finish == static_cast<std::int32_t>(FinishReason::kError);
    if (!failed) feed_pool(request, first || request.host_slot->frozen() ? 1 : kPublishTokens);
  }
}

// Publishes what is new of the text, if that is at least `at_least` tokens.
void Executor::feed_pool(RequestRecord& request, int at_least) {
  const std::int32_t length = request.host_slot->len;
  if (length - request.published < at_least) return;
  public_pool_->publish(request.params.cache_salt, request.host_slot->history(), request.published,
                        length);
  request.published = length;
}

}  // namespace specdec
