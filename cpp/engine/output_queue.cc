#include "engine/output_queue.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace specdec {
namespace {

// The steps from `first` on as one output. What only single steps have (logprobs, drafts, rows of
// logits) nobody has asked for: executor check().
OutputPtr joined(Outputs::const_iterator first, Outputs::const_iterator last) {
  if (first == last) return nullptr;
  if (last - first == 1) return *first;
  const StepOutput& end = **(last - 1);
  auto sum = std::make_shared<StepOutput>();
  sum->request_id = end.request_id;
  sum->step = end.step;
  sum->sequence = end.sequence;
  sum->is_prefill = end.is_prefill;
  sum->num_cached_tokens = end.num_cached_tokens;
  sum->last_logit_row = end.last_logit_row;
  sum->finish_reason = end.finish_reason;
  sum->stop_token = end.stop_token;
  sum->error = end.error;
  sum->parts.assign(first, last);
  for (const OutputPtr& part : sum->parts) {
    sum->tokens.insert(sum->tokens.end(), part->tokens.begin(), part->tokens.end());
    sum->num_rows += part->num_rows;
    sum->num_drafts += part->num_drafts;
    sum->num_accepted += part->num_accepted;
    sum->max_path = std::max(sum->max_path, part->max_path);
  }
  return sum;
}

// The first of `parts` behind number `sequence`.
Outputs::const_iterator behind(const Outputs& parts, std::int64_t sequence) {
  return std::find_if(parts.begin(), parts.end(),
                      [sequence](const OutputPtr& part) { return part->sequence > sequence; });
}

}  // namespace

OutputPtr since(const OutputPtr& out, std::int64_t sequence) {
  if (out->sequence <= sequence) return nullptr;
  const Outputs& parts = out->parts;
  const auto first = behind(parts, sequence);
  return first == parts.begin() ? out : joined(first, parts.end());
}

void OutputQueue::hold(RequestId id, int most) {
  if (most <= 1) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  held_[id].most = most;
}

Outputs OutputQueue::keep(std::vector<StepOutput> outputs) {
  const auto before = static_cast<std::ptrdiff_t>(kept_.size());
  const std::lock_guard<std::mutex> lock(mutex_);
  for (StepOutput& out : outputs) {
    out.sequence = ++last_;
    auto one = std::make_shared<StepOutput>(std::move(out));
    const auto found = held_.find(one->request_id);
    if (found == held_.end()) {
      kept_.push_back(std::move(one));
      continue;
    }
    Held& held = found->second;
    const bool ends = one->finish_reason != FinishReason::kNone;
    const bool waits = held.begun && !ends;
    held.begun |= !one->tokens.empty();
    held.parts.push_back(std::move(one));
    if (waits && held.parts.size() < static_cast<std::size_t>(held.most)) continue;
    kept_.push_back(joined(held.parts.begin(), held.parts.end()));
    held.parts.clear();
    if (ends) held_.erase(found);
  }
  return {kept_.begin() + before, kept_.end()};
}

OutputPtr OutputQueue::held(RequestId id, std::int64_t sequence) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = held_.find(id);
  if (found == held_.end()) return nullptr;
  const Outputs& parts = found->second.parts;
  return joined(behind(parts, sequence), parts.end());
}

void OutputQueue::drop(RequestId id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  held_.erase(id);
}

void OutputQueue::clear() { kept_.clear(); }

}  // namespace specdec
