// commit(): deliver what acceptance decided (executor_accept.cc), compact K/V, advance histories
// and drafters, stop rules.
#include <algorithm>
#include <utility>

#include "algo/fault.h"
#include "base/check.h"
#include "engine/executor.h"
#include "engine/executor_request.h"

namespace specdec {

// Appends one decided token and applies the stop rules to it.
void Executor::deliver(Request& request, TokenId token, const float* scores, StepOutput& out) {
  request.history.push_back(token);
  request.processor.append(token);
  out.tokens.push_back(token);
  if (request.params.logprobs) {
    out.logprobs.push_back(
        compute_logprobs(scores, config_.vocab_size, token, *request.params.logprobs));
  }
  const RequestParams& p = request.params;
  const StopRules rules{
      p.eos_token_ids.data(), p.ignore_eos ? 0 : static_cast<std::int32_t>(p.eos_token_ids.size()),
      p.stop_token_ids.data(), static_cast<std::int32_t>(p.stop_token_ids.size()), request.max_len};
  TokenId stop_token = kNoStopToken;
  request.finished =
      finish_after(rules, token, static_cast<std::int32_t>(request.history.size()), &stop_token);
  if (stop_token != kNoStopToken) out.stop_token = stop_token;
}

// Of the prompt tokens that the rows of this chunk foretell.
void Executor::add_prompt_logprobs(const Request& request, const float* raw,
                                   std::int64_t raw_stride, StepOutput& out) {
  const RequestParams& p = request.params;
  for (int i = 0; i < request.step_rows; ++i) {
    const int next = request.prefilled + i + 1;
    if (next >= request.prompt_len()) return;
    out.prompt_logprobs.push_back(compute_logprobs(raw + i * raw_stride, config_.vocab_size,
                                                   p.prompt[next], *p.prompt_logprobs));
  }
}

void Executor::commit_decode(Request& request, int index, int row, const TokenId* sampled,
                             const float* raw, std::int64_t raw_stride, StepOutput& out) {
  const bool first_token = request.in_prefill();
  const DraftTree& tree = request.tree;
  const AcceptResult& accepted = accepted_;
  // Tokens decided: the target's choice after the golden token and after each accepted draft.
  int node = 0;
  int delivered = 0;
  for (int i = 0; i <= accepted.path_len && request.finished == FinishReason::kNone; ++i) {
    if (i > 0) node = accepted.path[i - 1];
    const TokenId token = sampled[node];
    if (token < 0) {
      // Deeper rows may be spoilt by a draft that plain decoding would never see: stop before it;
      // the next step decides that position with a row of its own.
      if (i > 0) break;
      request.finished = FinishReason::kError;
      out.error = token == kNothingAllowed
                      ? "no token is allowed here: allowed_token_ids, bad_words, logit_bias and "
                        "logits_processors leave none; relax them"
                      : "the model's scores hold a NaN (numerical error); the request was stopped "
                        "before a token was chosen from them";
      break;
    }
    deliver(request, token, raw == nullptr ? nullptr : raw + node * raw_stride, out);
    out.last_logit_row = row + node;
    if (request.params.return_logits) out.logit_rows.push_back(out.last_logit_row);
    ++delivered;
  }
  if (first_token && request.params.end_after_drafts && request.finished == FinishReason::kNone) {
    request.finished = FinishReason::kLength;
  }
  out.num_drafts = tree.num_drafts();
  out.num_accepted = std::max(0, std::min(delivered, accepted.path_len));
  out.max_path = request.step_max_path;

  // K/V of the golden token and of the accepted drafts stays: path entry i moves to slot i + 1.
  const int kept = std::max(0, delivered - 1);
  std::copy(accepted.path, accepted.path + kept, path_.begin() + index * kMaxStepTokens);
  const bool in_place = kept == 0 || accepted.path[kept - 1] == kept;
  // What has ended leaves K/V behind only to be reused.
  const bool needed = request.finished == FinishReason::kNone || pages_.reuse();
  path_len_[index] = needed && !in_place ? kept : 0;
  if (fault(Fault::kStaleContext)) path_len_[index] = 0;

  if (first_token) {
    request.prefilled = request.prompt_len();
    if (request.drafter && delivered > 0) request.drafter->begin(request.history);
  } else if (request.drafter && delivered > 0) {
    request.drafter->update(request.history, delivered, tree, sampled);
  }
  out.finish_reason = request.finished;
}

std::vector<StepOutput> Executor::commit(const StepPlan& plan, const TokenId* ids,
                                         const float* scores, std::int64_t row_stride,
                                         const ScoreChanges& changes) {
  std::lock_guard<std::mutex> lock(mutex_);
  require_outstanding(plan);
  SPECDEC_REQUIRE(!plan.needs_logits || scores != nullptr,
                  "this plan needs scores (plan.needs_logits): a request has processors or wants "
                  "logprobs; give float32 scores [num_logit_rows, vocab_size]");
  std::vector<StepOutput> outputs(plan.num_requests);
  bool moves = false;
  for (int b = 0; b < plan.num_requests; ++b) {
    Request& request = *planned_[b];
    StepOutput& out = outputs[b];
    out.request_id = request.id;
    out.num_rows = request.step_rows;
    out.num_cached_tokens = request.num_cached;
    out.is_prefill = request.in_prefill();
    path_len_[b] = 0;
    if (request.cancelled) continue;
    const float* raw = changes.raw == nullptr ? scores : changes.raw;
    const std::int64_t raw_stride = changes.raw == nullptr ? row_stride : changes.raw_stride;
    int first = plan.cu_logits[b];
    if (request.in_prefill()) {
      if (request.params.prompt_logprobs) {
        add_prompt_logprobs(request, raw + first * raw_stride, raw_stride, out);
      }
      if (request.prefilled + request.step_rows < request.prompt_len()) {
        request.prefilled += request.step_rows;
        continue;
      }
      first = plan.cu_logits[b + 1] - request.tree.size;  // the row that decides the first token
    }
    if (const auto failed = changes.errors.find(request.id); failed != changes.errors.end()) {
      request.finished = out.finish_reason = FinishReason::kError;
      out.error = failed->second;
      continue;
    }
    const float* row_scores = scores == nullptr ? nullptr : scores + first * row_stride;
    if (scores == nullptr) {
      for (int i = first; i < plan.cu_logits[b + 1]; ++i) {
        SPECDEC_REQUIRE(ids[i] < config_.vocab_size, "ids[", i, "] = ", ids[i],
                        ": token ids are 0..", config_.vocab_size - 1);
        sampled_[i] = ids[i];
      }
    }
    decide(request, row_scores, row_stride, sampled_.data() + first);
    commit_decode(request, b, first, sampled_.data() + first,
                  raw == nullptr ? nullptr : raw + first * raw_stride, raw_stride, out);
    moves |= path_len_[b] > 0;
  }
  if (moves) move_kv(plan);
  settle(plan, outputs);
  return outputs;
}

// Brings the K/V of accepted drafts to its final place, or notes down what is to be moved.
void Executor::move_kv(const StepPlan& plan) {
  if (!config_.defer_moves) {
    CompactKvParams moved;
    moved.step = plan.view();
    moved.cache = cache_;
    moved.path = path_.data();
    moved.path_len = path_len_.data();
    backend_.compact_kv(moved);
    return;
  }
  for (int b = 0; b < plan.num_requests; ++b) {
    if (path_len_[b] == 0) continue;
    const std::int32_t rows = plan.cu_rows[b + 1] - plan.cu_rows[b];
    const std::int32_t used = (plan.kv_len[b] + rows + cache_.page_size - 1) / cache_.page_size;
    moves_.add(plan.kv_len[b], rows,
               plan.page_table.data() + static_cast<std::size_t>(b) * plan.page_table_stride, used,
               path_.data() + static_cast<std::size_t>(b) * kMaxStepTokens, path_len_[b]);
  }
}

KvMoves Executor::take_moves() {
  std::lock_guard<std::mutex> lock(mutex_);
  KvMoves taken;
  std::swap(taken, moves_);
  return taken;
}

std::vector<StepOutput> Executor::fail(const StepPlan& plan, const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  require_outstanding(plan);
  std::vector<StepOutput> outputs(plan.num_requests);
  for (int b = 0; b < plan.num_requests; ++b) {
    Request& request = *planned_[b];
    outputs[b].request_id = request.id;
    outputs[b].num_rows = request.step_rows;
    outputs[b].is_prefill = request.in_prefill();
    if (request.cancelled) continue;
    request.finished = FinishReason::kError;
    outputs[b].finish_reason = FinishReason::kError;
    outputs[b].error = message;
  }
  settle(plan, outputs);
  return outputs;
}

// Publishes the full pages of decided tokens. They are past a prompt's last row, so every row that
// a page holds has been read by a later one whose scores were finite.
void Executor::publish(const Request& request) {
  if (!pages_.reuse()) return;
  const std::int64_t kv_len = static_cast<std::int64_t>(request.history.size()) - 1;
  pages_.commit(request.slot, kv_len);
  pages_.publish(request.slot, request.history.data(), kv_len);
}

// Pages, counters and departures after a step; cancelled requests are dropped from the outputs.
void Executor::settle(const StepPlan& plan, std::vector<StepOutput>& outputs) {
  ++totals_.steps;
  totals_.rows += plan.num_rows;
  totals_.prefill_rows += plan.num_prefill_rows;
  for (int b = 0; b < plan.num_requests; ++b) {
    Request& request = *planned_[b];
    const StepOutput& out = outputs[b];
    if (request.cancelled) continue;
    totals_.generated_tokens += static_cast<std::int64_t>(out.tokens.size());
    totals_.num_drafts += out.num_drafts > 0;
    totals_.num_draft_tokens += out.num_drafts;
    totals_.num_accepted_tokens += out.num_accepted;
    if (request.finished != FinishReason::kNone) {
      const bool failed = request.finished == FinishReason::kError;
      ++(failed ? totals_.failed : totals_.finished);
      if (request.drafter && !failed && request.num_output() > 0) {
        request.drafter->end(request.history);
      }
      // What failed leaves nothing behind, least of all K/V with a NaN in it.
      if (!failed) publish(request);
      continue;
    }
    const std::int64_t kv_len = request.in_prefill()
                                    ? request.prefilled
                                    : static_cast<std::int64_t>(request.history.size()) - 1;
    pages_.commit(request.slot, kv_len);
    pages_.rewind(request.slot);
    if (!request.in_prefill()) publish(request);
  }
  std::erase_if(outputs, [&](const StepOutput& out) {
    return std::any_of(planned_.begin(), planned_.end(), [&](const Request* request) {
      return request->id == out.request_id && request->cancelled;
    });
  });
  std::erase_if(running_, [&](std::unique_ptr<Request>& request) {
    if (request->finished == FinishReason::kNone && !request->cancelled) return false;
    finish(*request);
    return true;
  });
  planned_.clear();
  outstanding_ = false;
  if (config_.check_integrity) pages_.check_integrity();
}

}  // namespace specdec
