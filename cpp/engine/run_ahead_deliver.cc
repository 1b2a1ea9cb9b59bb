// deliver(): what a step brought, read from the ring; pages that nobody can touch any more return.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "engine/run_ahead.h"
#include "engine/run_ahead_request.h"

namespace specdec {
namespace {

constexpr const char* kBadScores =
    "the model's scores hold a NaN (numerical error); the request was stopped before a token was "
    "chosen from them";

}  // namespace

// Tokens that the device decided for a request that goes on, by the rules of slot_commit().
void RunAheadExecutor::deliver_result(Request& request, const SlotResult& result, StepOutput& out) {
  out.tokens.assign(result.tokens, result.tokens + result.num_tokens);
  out.num_drafts = result.num_drafts;
  out.num_accepted = result.num_accepted;
  out.max_path = std::min(request.max_path, result.num_drafts);
  out.finish_reason = static_cast<FinishReason>(result.finish);
  if (result.stop_token != kNoStopToken) out.stop_token = result.stop_token;
  if (result.bad_row != 0) {
    out.error = result.bad_row == 2 ? "the model's scores are all -infinity: no token can be chosen"
                                    : kBadScores;
  }
  request.known_len += result.num_tokens;
  if (pages_.reuse()) request.text.insert(request.text.end(), out.tokens.begin(), out.tokens.end());
}

// What the step says about drafts of later ones. A text's last step was cut where it ended.
void RunAheadExecutor::learn(Request& request, const Part& part, const SlotResult& result) {
  if (!request.adaptive || result.finish != static_cast<std::int32_t>(FinishReason::kNone)) return;
  const int rows = config_.pads_rows ? part.rows - 1 : result.num_drafts;
  if (part.arm >= 0) {
    request.any_arms()->observe(part.arm, rows, result.num_tokens);
    if (request.sizes) {
      const auto shared = shared_sizes_.find(request.max_drafts);
      if (shared != shared_sizes_.end()) {
        shared->second.observe(part.arm, rows, result.num_tokens);
      }
    }
  } else if (request.chain && !request.sizes) {
    // A match that was not found costs padded rows, too; otherwise it costs nothing.
    request.lookup.observe(shared_rates_, rows, result.num_accepted);
  }
}

std::vector<RequestId> RunAheadExecutor::host_requests() const {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(!flights_.empty(), "host_requests(): no step is in flight");
  std::vector<RequestId> ids;
  for (const Flight::Place& place : flights_.front().places) {
    if (!place.request->host || !place.decides) continue;
    ids.push_back(flights_.front().failed || place.request->ended ? 0 : place.request->id);
  }
  return ids;
}

int RunAheadExecutor::oldest_ring() const {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(!flights_.empty(), "oldest_ring(): no step is in flight");
  return flights_.front().ring;
}

// The token that the host chooses. `raw`: the model's own scores, for logprobs.
void RunAheadExecutor::deliver_choice(Request& request, const float* raw, const float* scores,
                                      StepOutput& out) {
  HostChoice& host = *request.host;
  const TokenId token = host.choose(request.text, scores, config_.vocab_size);
  if (token < 0) {
    out.finish_reason = FinishReason::kError;
    out.error = token == kNothingAllowed
                    ? "no token is allowed here: allowed_token_ids, bad_words, logit_bias and "
                      "logits_processors leave none; relax them"
                    : kBadScores;
    return;
  }
  out.tokens = {token};
  request.text.push_back(token);
  host.processor.append(token);
  ++host.num_output;
  ++request.known_len;
  if (host.params.logprobs) {
    out.logprobs.push_back(compute_logprobs(raw, config_.vocab_size, token, *host.params.logprobs));
  }
  const SlotRequest& s = request.slot_request;
  const StopRules rules{s.eos_token_ids.data(), static_cast<std::int32_t>(s.eos_token_ids.size()),
                        s.stop_token_ids.data(), static_cast<std::int32_t>(s.stop_token_ids.size()),
                        request.max_len};
  TokenId stop_token = kNoStopToken;
  out.finish_reason = finish_after(rules, token, request.known_len, &stop_token);
  if (stop_token != kNoStopToken) out.stop_token = stop_token;
}

std::vector<StepOutput> RunAheadExecutor::deliver(const HostScores& changed) {
  std::lock_guard<std::mutex> lock(mutex_);
  SPECDEC_REQUIRE(!flights_.empty(), "deliver(): no step is in flight");
  const Flight flight = std::move(flights_.front());
  flights_.pop_front();
  const int ring = fault(Fault::kResultOfNewest) ? step_.ring : flight.ring;
  const std::int32_t* words = rings_.results + static_cast<std::ptrdiff_t>(ring) * result_words();
  const auto* results = reinterpret_cast<const SlotResult*>(words);
  const std::int32_t* flags = words + result_words() - config_.max_batch_size;

  ExecutorStats& totals = totals_.executor;
  std::vector<StepOutput> outputs;
  std::vector<Request*> ended;
  const std::int64_t rows_before = totals.rows;
  const std::int64_t first_choice = std::int64_t{ring} * max_host_rows();
  std::int64_t num_choices = 0;  // of the host's
  for (std::size_t b = 0; b < flight.places.size(); ++b) {
    const Flight::Place& place = flight.places[b];
    Request& request = *place.request;
    const Part part = request.parts.front();
    request.parts.pop_front();
    SPECDEC_ENSURE(part.step == flight.step, "request ", request.id, " is in step ", part.step,
                   ", step ", flight.step, " is delivered");
    const bool by_host = request.host && place.decides;
    const std::int64_t choice = num_choices;
    num_choices += by_host;
    if (flight.failed) continue;
    const SlotResult& result = results[b];
    const bool decided = by_host || result.num_tokens > 0 || result.bad_row != 0;
    const bool known_rows = place.is_prefill || request.host;
    const int rows = known_rows ? place.rows : (decided ? 1 + result.num_drafts : 0);
    const int known_before = request.known_len;
    totals.rows += rows;
    totals.prefill_rows += place.is_prefill ? rows : 0;
    if (request.ended && !fault(Fault::kLateResult)) {
      totals_.late_results += decided;
      continue;
    }
    StepOutput out;
    out.request_id = request.id;
    out.is_prefill = place.is_prefill;
    out.num_rows = rows;
    out.num_cached_tokens = request.num_cached;
    // A NaN in a row ends a request when the row decides a token, as on the host.
    if (const std::int32_t wrong = flags[b] & ~static_cast<std::int32_t>(kStatusNaN); wrong != 0) {
      out.finish_reason = FinishReason::kError;
      out.error = "the device found this request's step broken (status " + std::to_string(wrong) +
                  ": 2 page, 4 tree, 8 length, 16 law) and left it out; please report";
    } else if (by_host) {
      const auto failed = changed.errors.find(request.id);
      if (failed != changed.errors.end()) {
        out.finish_reason = FinishReason::kError;
        out.error = failed->second;
      } else {
        SPECDEC_ENSURE(rings_.scores != nullptr, "no ring of scores for choices of the host's");
        const float* raw = rings_.scores + (first_choice + choice) * config_.vocab_size;
        const float* scores =
            changed.rows == nullptr ? raw : changed.rows + choice * changed.row_stride;
        deliver_choice(request, raw, scores, out);
      }
    } else if (place.decides) {
      // What a device wrote is not trusted further than it has to be.
      const bool sound = decided && result.num_tokens >= 0 && result.num_tokens <= part.tokens &&
                         result.finish >= 0 &&
                         result.finish <= static_cast<std::int32_t>(FinishReason::kError);
      if (sound) {
        if (!place.is_prefill) learn(request, part, result);
        deliver_result(request, result, out);
      } else {
        out.finish_reason = FinishReason::kError;
        out.error = "internal error (please report): the device delivered " +
                    std::to_string(result.num_tokens) + " tokens and end " +
                    std::to_string(result.finish) + ", 1.." + std::to_string(part.tokens) +
                    " tokens were possible";
      }
    }
    totals.generated_tokens += static_cast<std::int64_t>(out.tokens.size());
    totals.num_drafts += out.num_drafts > 0;
    totals.num_draft_tokens += out.num_drafts;
    totals.num_accepted_tokens += out.num_accepted;
    if (out.finish_reason != FinishReason::kNone) {
      ++(out.finish_reason == FinishReason::kError ? totals.failed : totals.finished);
      if (!request.ended) ended.push_back(&request);
      // What failed leaves nothing behind. Of the last step's tokens the K/V was not moved.
      if (out.finish_reason != FinishReason::kError && pages_.reuse()) {
        pages_.commit(request.slot, known_before);
        publish(request, known_before);
      }
    } else if (!request.ended) {
      // What steps in flight can still touch stays, the excess goes back.
      std::int64_t tokens = request.tokens_to_hold();
      if (fault(Fault::kExcessBackEarly)) {
        tokens = std::max(request.known_len - 1, request.prefilled);
      }
      pages_.commit(request.slot, tokens);
      pages_.rewind(request.slot);
      // Tokens are published when the next ones are read: by then a stop string has been found.
      if (place.decides) publish(request, known_before);
    }
    outputs.push_back(std::move(out));
  }
  ++totals.steps;
  totals_.empty_steps += !flight.failed && totals.rows == rows_before;
  for (Request* request : ended) end(*request);
  release_retired(flight.step);
  if (config_.check_integrity) pages_.check_integrity();
  return outputs;
}

std::vector<StepOutput> RunAheadExecutor::fail(std::int64_t index, const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto flight = std::find_if(flights_.begin(), flights_.end(),
                                   [&](const Flight& other) { return other.step == index; });
  SPECDEC_REQUIRE(flight != flights_.end(), "fail: step ", index, " is not in flight");
  flight->failed = true;
  std::vector<StepOutput> outputs;
  for (const Flight::Place& place : flight->places) {
    Request& request = *place.request;
    if (request.ended) continue;
    StepOutput out;
    out.request_id = request.id;
    out.is_prefill = place.is_prefill;
    out.num_rows = place.rows;
    out.finish_reason = FinishReason::kError;
    out.error = message;
    outputs.push_back(std::move(out));
    ++totals_.executor.failed;
    end(request);
  }
  return outputs;
}

}  // namespace specdec
