// deliver(): what a step brought, read from the ring; pages that nobody can touch any more return.
#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "base/check.h"
#include "engine/executor.h"

namespace specdec {
namespace {

constexpr const char* kBadScores =
    "the model's scores hold a NaN (numerical error); the request was stopped before a token was "
    "chosen from them";

}  // namespace

// Tokens that the slot decided for a request that goes on, by the rules of slot_commit().
void Executor::deliver_result(RequestRecord& request, const SlotResult& result, StepOutput& out) {
  out.tokens.assign(result.tokens, result.tokens + result.num_tokens);
  out.num_drafts = result.num_drafts;
  out.num_accepted = result.num_accepted;
  if (request.host_slot == nullptr) out.max_path = std::min(request.max_path, result.num_drafts);
  out.finish_reason = static_cast<FinishReason>(result.finish);
  if (result.stop_token != kNoStopToken) out.stop_token = result.stop_token;
  if (result.bad_row != 0 && out.error.empty()) {
    out.error = result.bad_row == 2 ? "the model's scores are all -infinity: no token can be chosen"
                                    : kBadScores;
  }
  request.known_len += result.num_tokens;
  if (request.host_slot == nullptr && book_.keeps_text()) {
    request.text.insert(request.text.end(), out.tokens.begin(), out.tokens.end());
  }
}

// The drafts of a step on a device, which says how many were accepted: of a chain these are the
// first ones.
Executor::Brought Executor::brought_on_device(const RequestRecord& request, const StepShare& share,
                                              const SlotResult& result) {
  right_drafts_.resize(request.chain ? static_cast<std::size_t>(result.num_accepted) : 0);
  std::iota(right_drafts_.begin(), right_drafts_.end(), 0);
  const int drafts = config_.pads_rows ? share.rows - 1 : result.num_drafts;
  return {drafts, result.num_accepted, right_drafts_};
}

// What a step's counts say about drafts of later ones. A text's last step was cut where it ended.
void Executor::learn(RequestRecord& request, const StepShare& share, const SlotResult& result,
                     const Brought& brought) {
  if (!request.adaptive || result.finish != static_cast<std::int32_t>(FinishReason::kNone)) return;
  const bool which = static_cast<int>(brought.right.size()) == brought.accepted;
  if (share.arm >= 0 && request.arms) {
    request.arms->observe(share.arm, brought.drafts, 1 + brought.accepted);
  } else if (share.arm >= 0 && which) {
    request.sizes->observe_step(share.arm, brought.drafts, brought.right);
  } else if (share.arm >= 0) {
    request.sizes->observe_step(share.arm, brought.drafts, brought.accepted);
  } else if (request.host_slot == nullptr && config_.method == DraftMethod::kNgram) {
    // A match that was not found costs padded rows, too; otherwise it costs nothing.
    request.lookup.observe(request.shared_rates->at(static_cast<std::size_t>(DraftSource::kLookup)),
                           brought.drafts, brought.accepted);
  }
}

std::vector<ChoiceTree> Executor::choice_trees() {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(!flights_.empty(), "choice_trees(): no step is in flight");
  std::vector<ChoiceTree> trees;
  InFlightStep& flight = host_ ? flights_.back() : flights_.front();
  int end = 0;
  for (Place& place : flight.places) {
    const RequestRecord& request = *place.request;
    if (!host_ && !request.by_host) continue;
    end += place.choices;
    const bool wanted = request.params.processes_scores || request.params.grammar;
    if (!place.decides || !wanted || flight.failed || request.ended) continue;
    if (place.tree >= 0 && !read_tree(place, flight.ring)) continue;
    const int rows = place.tree >= 0 ? place.choices : request.host_slot->tree.size;
    trees.push_back(choice_tree(place, end - rows));
  }
  return trees;
}

int Executor::oldest_host_rows() const {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(!flights_.empty(), "oldest_host_rows(): no step is in flight");
  int rows = 0;
  for (const Place& place : flights_.front().places) {
    if (place.request->by_host) rows += place.choices;
  }
  return rows;
}

int Executor::oldest_ring() const {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(!flights_.empty(), "oldest_ring(): no step is in flight");
  return flights_.front().ring;
}

// The tree that a device has drafted for a request that the host decides. False: it is none; the
// device is not trusted further than it has to be.
bool Executor::read_tree(Place& place, int ring) {
  SPECDEC_ENSURE(rings_.trees != nullptr, "no ring of trees for choices of the host's");
  const std::ptrdiff_t at = std::ptrdiff_t{ring} * config_.max_batch_size + place.tree;
  const auto* from = reinterpret_cast<const DraftTree*>(rings_.trees) + at;
  Slot* slot = place.request->host_slot;
  bool good = from->size >= 1 && from->size <= place.choices &&
              from->tokens[0] == slot->history()[slot->len - 1];
  for (int i = 1; good && i < from->size; ++i) {
    good = from->parents[i] >= 0 && from->parents[i] < i && from->tokens[i] >= 0 &&
           from->tokens[i] < config_.vocab_size;
  }
  if (!good) return false;
  slot->tree = *from;
  place.request->own_tree = true;
  std::fill_n(place.request->sources.begin(), from->size, bit_of(DraftSource::kModel));
  place.rows = 1;
  place.drafts = slot->tree.num_drafts();
  return true;
}

// What the host makes of its rows of a step on a device, from `first_row` on in the ring; `scores`:
// after the caller's processors.
void Executor::choose_place(Place& place, const StepShare& share, int first_row, const float* raw,
                            const float* scores, const HostWords& words, SlotResult* result) {
  RequestRecord& request = *place.request;
  TokenId sampled[kMaxStepTokens];
  std::int32_t path[kMaxStepTokens], path_len = 0;
  PlaceRows rows;
  rows.first = first_row;
  rows.scores = scores;
  rows.raw = raw;
  rows.stride = rows.raw_stride = config_.vocab_size;
  rows.sampled = sampled;
  const int root = request.host_slot->len - 1;
  decide_place(place, share, rows, words, nullptr, -1, result, path, &path_len);
  if (place.out.last_logit_row >= 0) request.kept_row = place.out.last_logit_row - first_row;
  if (result->finish == static_cast<std::int32_t>(FinishReason::kNone)) {
    request.unmoved.assign(path, path + path_len);
    request.unmoved_at = root;
  }
}

// Fills what the step brought to one request that has not ended.
void Executor::read_place(Place& place, const StepShare& share, const SlotResult& result, int flags,
                          StepOutput& out) {
  RequestRecord& request = *place.request;
  if (out.finish_reason != FinishReason::kNone) return;  // the caller's processor failed
  // A NaN in a row ends a request when the row decides a token, as on the host.
  if (const int wrong = flags & ~static_cast<int>(kStatusNaN); wrong != 0) {
    out.finish_reason = FinishReason::kError;
    out.error = "the device found this request's step broken (status " + std::to_string(wrong) +
                ": 2 page, 4 tree, 8 length, 16 law) and left it out; please report";
  } else if (place.decides) {
    // What a device wrote is not trusted further than it has to be.
    const bool decided = result.num_tokens > 0 || result.bad_row != 0;
    const bool sound = decided && result.num_tokens >= 0 && result.num_tokens <= share.tokens &&
                       result.finish >= 0 &&
                       result.finish <= static_cast<std::int32_t>(FinishReason::kError);
    if (!sound) {
      out.finish_reason = FinishReason::kError;
      out.error = "internal error (please report): the device delivered " +
                  std::to_string(result.num_tokens) + " tokens and end " +
                  std::to_string(result.finish) + ", 1.." + std::to_string(share.tokens) +
                  " tokens were possible";
      return;
    }
    if (request.host_slot == nullptr && !place.is_prefill) {
      learn(request, share, result, brought_on_device(request, share, result));
    }
    deliver_result(request, result, out);
  }
}

// Counters, pages and published text after the request's part of a step was read.
void Executor::settle(RequestRecord& request, const Place& place, const StepOutput& out,
                      int known_before) {
  totals_.generated_tokens += static_cast<std::int64_t>(out.tokens.size());
  totals_.num_drafts += out.num_drafts > 0;
  totals_.num_draft_tokens += out.num_drafts;
  totals_.num_accepted_tokens += out.num_accepted;
  PageTable& pages = book_.pages();
  // On a device tokens are published when the next ones are read, and what the last step moved
  // stays unpublished; where the host ran the step all of it lies where it belongs.
  const std::int64_t final_len = host_ ? request.known_len - 1 : known_before;
  if (out.finish_reason != FinishReason::kNone) {
    const bool failed = out.finish_reason == FinishReason::kError;
    ++(failed ? totals_.failed : totals_.finished);
    // What failed leaves nothing behind, least of all K/V with a NaN in it.
    if (!failed && pages.reuse()) {
      pages.commit(request.slot, final_len);
      book_.publish(request, final_len, !host_);
    }
    return;
  }
  // What steps in flight can still touch stays, the excess goes back.
  std::int64_t tokens = request.tokens_to_hold();
  if (fault(Fault::kExcessBackEarly)) {
    tokens = std::max(request.known_len - 1, request.prefilled);
  }
  pages.commit(request.slot, tokens);
  pages.rewind(request.slot);
  if (place.decides) book_.publish(request, final_len, !host_);
  book_.trim(request);
}

std::vector<StepOutput> Executor::deliver(const float* scores, const HostWords& words) {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(!flights_.empty(), "deliver(): no step is in flight");
  SPECDEC_REQUIRE(host_ == nullptr || host_->stage == HostSteps::Stage::kIdle ||
                      flights_.size() > 1 || flights_.front().failed,
                  "deliver(): the only step in flight has not run; commit() or fail() it first");
  InFlightStep flight = std::move(flights_.front());
  flights_.pop_front();
  const int ring = fault(Fault::kResultOfNewest) ? step_.ring : flight.ring;
  const bool has_flags = host_ == nullptr;
  const std::int32_t* ring_words =
      rings_.results + static_cast<std::ptrdiff_t>(ring) *
                           (has_flags
                                ? result_words()
                                : config_.max_batch_size *
                                      static_cast<int>(sizeof(SlotResult) / sizeof(std::int32_t)));
  const auto* results = reinterpret_cast<const SlotResult*>(ring_words);
  const std::int32_t* flags =
      has_flags ? ring_words + result_words() - config_.max_batch_size : nullptr;

  std::vector<StepOutput> outputs;
  std::vector<RequestRecord*> ended;
  const std::int64_t rows_before = totals_.rows;
  const float* raw = rings_.scores;  // of the step
  if (raw != nullptr) raw += std::int64_t{ring} * max_host_rows() * config_.vocab_size;
  if (scores == nullptr) scores = raw;
  int host_rows = 0;
  for (std::size_t b = 0; b < flight.places.size(); ++b) {
    Place& place = flight.places[b];
    RequestRecord& request = *place.request;
    const StepShare share = request.shares.front();
    request.shares.pop_front();
    SPECDEC_ENSURE(share.step == flight.step, "request ", request.id, " is in step ", share.step,
                   ", step ", flight.step, " is delivered");
    const int first_row = host_rows;
    if (request.by_host) host_rows += place.choices;
    if (flight.failed) continue;
    SlotResult result = results[b];
    const int step_flags = flags == nullptr ? 0 : flags[b];
    const bool late = request.ended && !fault(Fault::kLateResult);
    bool sound = (step_flags & ~static_cast<int>(kStatusNaN)) == 0;
    if (place.tree >= 0 && sound && !request.ended) sound = read_tree(place, flight.ring);
    if (request.by_host && !late && sound) {
      SPECDEC_ENSURE(raw != nullptr, "no ring of scores for choices of the host's");
      const std::ptrdiff_t at = std::ptrdiff_t{first_row} * config_.vocab_size;
      choose_place(place, share, first_row, raw + at, scores + at, words, &result);
    }
    // Who was cancelled before commit() took the step that the host ran has no result.
    const bool dropped = late && host_ != nullptr;
    const bool decided = place.decides && (request.by_host || dropped || result.num_tokens > 0 ||
                                           result.bad_row != 0);
    const bool known_rows = place.is_prefill || request.by_host;
    const int decoded = dropped ? place.choices : (decided ? 1 + result.num_drafts : 0);
    const int rows = known_rows ? place.rows + place.drafts : decoded;
    const int known_before = request.known_len;
    totals_.rows += rows;
    totals_.prefill_rows += place.is_prefill ? place.rows : 0;
    if (late) {
      totals_.late_results += decided;
      continue;
    }
    StepOutput out = std::move(place.out);
    out.request_id = request.id;
    out.step = flight.step;
    out.is_prefill = place.is_prefill;
    out.num_rows = rows;
    out.num_cached_tokens = request.num_cached;
    read_place(place, share, result, step_flags, out);
    settle(request, place, out, known_before);
    if (out.finish_reason != FinishReason::kNone && !request.ended) ended.push_back(&request);
    outputs.push_back(std::move(out));
  }
  ++totals_.steps;
  totals_.empty_steps += !flight.failed && totals_.rows == rows_before;
  for (RequestRecord* request : ended) end(*request);
  book_.release_retired(flight.step);
  follow_orders();
  book_.check_integrity();
  return outputs;
}

std::vector<StepOutput> Executor::fail(std::int64_t index, const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto flight = std::find_if(flights_.begin(), flights_.end(),
                                   [&](const InFlightStep& other) { return other.step == index; });
  SPECDEC_REQUIRE(flight != flights_.end(), "fail: step ", index, " is not in flight");
  flight->failed = true;
  if (host_ && index == step_.index) host_->stage = HostSteps::Stage::kIdle;
  std::vector<StepOutput> outputs;
  for (const Place& place : flight->places) {
    RequestRecord& request = *place.request;
    if (request.ended) continue;
    StepOutput out;
    out.request_id = request.id;
    out.step = flight->step;
    out.is_prefill = place.is_prefill;
    out.num_rows = place.rows;
    out.finish_reason = FinishReason::kError;
    out.error = message;
    outputs.push_back(std::move(out));
    ++totals_.failed;
    end(request);
  }
  // Others whose pages were to be copied in front of it.
  for (const RequestId id : flight->copied) {
    if (RequestRecord* request = book_.find_running(id)) book_.lose_copies(*request);
  }
  follow_orders();
  return outputs;
}

}  // namespace specdec
