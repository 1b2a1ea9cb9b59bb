// Outputs that are held against the list of all outputs of each request.
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "engine/output_queue.h"

namespace specdec {
namespace {

struct Known {
  std::vector<StepOutput> all;  // every output of the request, as it went in
  std::int64_t delivered = 0;   // number of the last one that keep() has returned
  std::int64_t seen = 0;        // number of the last one that somebody has looked at
  std::vector<TokenId> from_looks, from_calls;
  int most = 1;
  bool ended = false;
};

std::vector<TokenId> tokens_after(const Known& known, std::int64_t sequence) {
  std::vector<TokenId> tokens;
  for (const StepOutput& out : known.all) {
    if (out.sequence <= sequence) continue;
    tokens.insert(tokens.end(), out.tokens.begin(), out.tokens.end());
  }
  return tokens;
}

// What is asked of any output: it sums up exactly the ones behind `after`, up to itself.
void check_sums(const Known& known, const StepOutput& out, std::int64_t after) {
  int rows = 0, drafts = 0, accepted = 0, steps = 0, path = 0;
  std::vector<TokenId> tokens;
  const StepOutput* last = nullptr;
  for (const StepOutput& one : known.all) {
    if (one.sequence <= after || one.sequence > out.sequence) continue;
    rows += one.num_rows;
    drafts += one.num_drafts;
    accepted += one.num_accepted;
    path = std::max(path, one.max_path);
    tokens.insert(tokens.end(), one.tokens.begin(), one.tokens.end());
    ++steps;
    last = &one;
  }
  CHECK(last != nullptr && last->sequence == out.sequence && last->step == out.step);
  CHECK(tokens == out.tokens);
  CHECK_EQ(rows, out.num_rows);
  CHECK_EQ(drafts, out.num_drafts);
  CHECK_EQ(accepted, out.num_accepted);
  CHECK_EQ(path, out.max_path);
  CHECK_EQ(last->num_cached_tokens, out.num_cached_tokens);
  CHECK(last->finish_reason == out.finish_reason && last->stop_token == out.stop_token);
  CHECK_EQ(last->error, out.error);
  CHECK_EQ(steps, out.parts.empty() ? 1 : static_cast<int>(out.parts.size()));
}

StepOutput random_output(std::mt19937& random, RequestId id, std::int64_t step) {
  StepOutput out;
  out.request_id = id;
  out.step = step;
  out.is_prefill = random() % 4 == 0;
  out.num_rows = 1 + static_cast<int>(random() % 9);
  out.num_drafts = static_cast<int>(random() % 5);
  out.num_accepted = static_cast<int>(random() % 3);
  out.max_path = static_cast<int>(random() % 7);
  out.num_cached_tokens = static_cast<int>(random() % 100);
  for (auto count = random() % 4; count > 0; --count) {
    out.tokens.push_back(static_cast<TokenId>(random() % 1000));
  }
  if (random() % 40 == 0) {
    out.finish_reason = random() % 2 == 0 ? FinishReason::kStop : FinishReason::kError;
    out.error = out.finish_reason == FinishReason::kError ? "broken" : "";
    if (out.error.empty()) out.stop_token = 7;
  }
  return out;
}

}  // namespace

TEST(held_outputs_are_all_outputs) {
  std::mt19937 random(3);
  OutputQueue queue;
  std::map<RequestId, Known> known;
  RequestId next = 1;
  std::int64_t numbers = 0;
  int sums = 0;
  for (std::int64_t step = 0; step < 20000; ++step) {
    if (random() % 8 == 0 && known.size() < 6) {
      Known& one = known[next];
      one.most = random() % 3 == 0 ? 1 : 2 + static_cast<int>(random() % 9);
      queue.hold(next++, one.most);
    }
    std::vector<StepOutput> outputs;
    for (auto& [id, one] : known) {
      if (random() % 5 == 0) continue;
      outputs.push_back(random_output(random, id, step));
      outputs.back().sequence = ++numbers;
      one.all.push_back(outputs.back());
      outputs.back().sequence = 0;
    }
    queue.clear();
    const Outputs due = queue.keep(outputs);
    CHECK(due == queue.kept());
    std::map<RequestId, int> count;
    for (const OutputPtr& out : due) {
      Known& one = known.at(out->request_id);
      check_sums(one, *out, one.delivered);
      CHECK_EQ(++count[out->request_id], 1);
      sums += out->parts.size() > 1;
      one.delivered = out->sequence;
      one.ended = out->finish_reason != FinishReason::kNone;
      // Whoever has looked takes the rest.
      if (const OutputPtr rest = since(out, one.seen)) {
        check_sums(one, *rest, one.seen);
        one.from_looks.insert(one.from_looks.end(), rest->tokens.begin(), rest->tokens.end());
        one.seen = rest->sequence;
      } else {
        CHECK(one.seen >= out->sequence);
      }
      one.from_calls.insert(one.from_calls.end(), out->tokens.begin(), out->tokens.end());
    }
    for (auto& [id, one] : known) {
      if (one.all.empty()) continue;
      // Held are fewer than `most`, none before the first token was delivered.
      int held = 0;
      for (const StepOutput& out : one.all) held += out.sequence > one.delivered;
      CHECK(held < one.most);
      CHECK(held == 0 || !one.from_calls.empty());
      CHECK_EQ(queue.held(id, -1) == nullptr, held == 0);
      if (random() % 3 != 0) continue;
      if (const OutputPtr out = queue.held(id, one.seen)) {
        check_sums(one, *out, one.seen);
        one.from_looks.insert(one.from_looks.end(), out->tokens.begin(), out->tokens.end());
        one.seen = out->sequence;
      }
    }
    for (auto at = known.begin(); at != known.end();) {
      const Known& one = at->second;
      const bool dropped = !one.ended && random() % 200 == 0;
      if (dropped) queue.drop(at->first);
      if (one.ended) {
        CHECK(one.from_calls == tokens_after(one, -1));
        CHECK(one.from_looks == one.from_calls);
      }
      if (one.ended || dropped) CHECK(queue.held(at->first, -1) == nullptr);
      at = one.ended || dropped ? known.erase(at) : std::next(at);
    }
  }
  CHECK(sums > 1000);
}

}  // namespace specdec
