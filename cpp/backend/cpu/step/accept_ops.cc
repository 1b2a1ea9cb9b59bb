#include "backend/cpu/step/accept_ops.h"

#include <algorithm>
#include <vector>

#include "algo/acceptance.h"
#include "backend/cpu/attention/cpu_attention.h"
#include "backend/cpu/decoder/row_ops.h"
#include "tree/draft_tree.h"

namespace specdec::cpu {
namespace {

// Rows as float32; 16-bit ones are widened into a buffer that the next call overwrites.
class RowReader {
 public:
  explicit RowReader(const ScoreRows& rows) : rows_(rows) {
    if (rows.dtype != DType::kF32) wide_.resize(static_cast<std::size_t>(rows.vocab));
  }
  const float* operator()(std::int64_t row) const {
    if (rows_.dtype == DType::kF32) {
      return static_cast<const float*>(rows_.scores) + row * rows_.row_stride;
    }
    const auto* from = static_cast<const std::uint16_t*>(rows_.scores) + row * rows_.row_stride;
    const auto widen = rows_.dtype == DType::kBF16 ? row_ops().bf16_to_f32 : row_ops().f16_to_f32;
    widen(from, rows_.vocab, wide_.data());
    return wide_.data();
  }

 private:
  const ScoreRows& rows_;
  mutable std::vector<float> wide_;
};

void find_best(const ScoreRows& rows, const ExecutionContext& exec, TokenId* ids) {
  ArgmaxParams best;
  best.scores = rows.scores;
  best.row_stride = rows.row_stride;
  best.rows = rows.rows;
  best.vocab = rows.vocab;
  best.ids = ids;
  best.dtype = rows.dtype;
  best.exec = exec;
  argmax(best);
}

// A draw, with the law that it was drawn from.
TokenId draw_with_law(const SampleRowsParams& p, const float* scores, const SamplingLaw& law,
                      double u, std::int32_t b, TokenSampler& sampler) {
  const TokenId status = sampler.weigh(scores, p.rows.vocab, law);
  if (status < 0) return status;
  write_law(sampler.law(), p.probs + b * p.probs_stride);
  return draw_from_law(sampler.law(), u);
}

// The laws of a request whose drafts' probabilities lie in the caller's tensors.
template <typename ScoresOf>
class OpLaws : public HostLaws<ScoresOf> {
 public:
  OpLaws(const AcceptStepParams& p, std::int32_t b, const AcceptanceInput& input,
         const ScoresOf& scores_of, TokenSampler& sampler)
      : HostLaws<ScoresOf>(input, p.rows.vocab, scores_of, sampler), p_(p), b_(b) {}

  bool has_probs() const { return p_.drawn_from_probs(b_); }
  bool replacement() const { return p_.with_replacement(b_); }
  DraftLaw draft(std::int32_t node) const {
    DraftLaw law = p_.law_of(b_, node);
    const float* probs = law.probs;
    const bool good = law.column >= 0 && std::all_of(probs, probs + law.columns, is_probability);
    Mass total = 0;
    for (std::int32_t first = 0; good && first < law.columns; first += kMassBlock) {
      total += block_mass(probs + first, std::min(kMassBlock, law.columns - first));
    }
    law.mass = weight_of(total);
    if (!good || !sums_to_one(law.mass) || !(probs[law.column] > 0.0f)) {
      report(p_.exec, b_, kStatusBadProbs);
      return {};
    }
    return law;
  }

 private:
  const AcceptStepParams& p_;
  const std::int32_t b_;
};

// Working memory of accept_step.
struct AcceptWork {
  TokenSampler sampler;
  AcceptScratch scratch;
  AcceptResult result;
  DraftTree tree;
};

// False: the request is left out, and why is reported.
bool accept_request(const AcceptStepParams& p, std::int32_t b, const RowReader& read,
                    AcceptWork& work) {
  if (!has_rows(p.rows, b)) {
    report(p.exec, b, kStatusBadLength);
    return false;
  }
  const std::int32_t first = p.rows.cu_logits[b], size = p.rows.cu_logits[b + 1] - first;
  if (size == 0) return false;
  const SamplingLaw law = p.sampling.law(b);
  const AcceptanceParams rule = p.acceptance(b);
  const DraftedTree tree{p.tokens + first, p.parents + first, size, p.sampling.seed[b],
                         std::int64_t{p.rows.positions[first]} + 1};
  const bool drafted = is_drafted_tree(tree, p.rows.vocab);
  const bool known =
      size > kMaxStepTokens || (law.valid() && rule.valid() && are_rates(p.synthetic));
  report(p.exec, b, (drafted ? 0u : kStatusBadTree) | (known ? 0u : kStatusBadLaw));
  if (!drafted || !known) return false;
  TokenId* decided = p.sampled + first;
  const SerialTeam team;
  if (law.greedy() && p.synthetic.given()) {
    const auto choose = [&](std::int32_t node, std::int32_t) { return decided[node]; };
    accept_synthetic(team, tree, p.synthetic, p.rows.vocab, choose, decided, &work.result);
  } else if (law.greedy()) {
    accept_greedy(team, tree.tokens, tree.parents, size, decided, kMaxDraftLen, &work.result);
  } else {
    work.tree.size = size;
    std::copy_n(tree.parents, size, work.tree.parents);
    const AcceptanceInput input{&work.tree, nullptr, nullptr, law, tree.seed, tree.position};
    const auto scores_of = [&](std::int32_t node) { return read(std::int64_t{first} + node); };
    OpLaws laws(p, b, input, scores_of, work.sampler);
    if (p.synthetic.given()) {
      const auto choose = [&](std::int32_t node, std::int32_t depth) {
        return laws.sample(node, token_uniform_at(tree, depth));
      };
      accept_synthetic(team, tree, p.synthetic, p.rows.vocab, choose, decided, &work.result);
    } else {
      accept_by_rule(team, tree, rule, laws, &work.scratch, decided, &work.result);
    }
  }
  const std::int32_t bad = work.result.bad_row;
  if (bad >= 0 && decided[bad] == kBadRow) report(p.exec, b, kStatusNaN);
  return true;
}

}  // namespace

void sample_rows(const SampleRowsParams& p) {
  find_best(p.rows, p.exec, p.ids);
  const RowReader read(p.rows);
  TokenSampler sampler;
  std::int32_t b = 0;
  for (std::int32_t row = 0; row < p.rows.rows; ++row) {
    while (b < p.rows.num_requests && p.rows.cu_logits[b + 1] <= row) ++b;
    if (b == p.rows.num_requests) {
      p.ids[row] = kBadRow;
      continue;
    }
    const SamplingLaw law = p.sampling.law(b);
    if (!law.valid()) {
      p.ids[row] = kBadRow;
      report(p.exec, b, kStatusBadLaw);
      continue;
    }
    if (!law.greedy()) {
      const auto position = static_cast<std::uint64_t>(std::int64_t{p.rows.positions[row]} + 1);
      const double u = philox_uniform(p.sampling.seed[b], position, p.purpose, 0);
      p.ids[row] = p.probs == nullptr ? sampler.draw(read(row), p.rows.vocab, law, u)
                                      : draw_with_law(p, read(row), law, u, b, sampler);
    }
    if (p.ids[row] == kBadRow) report(p.exec, b, kStatusNaN);
  }
}

void accept_step(const AcceptStepParams& p) {
  find_best(p.rows, p.exec, p.sampled);
  const RowReader read(p.rows);
  AcceptWork work;
  for (std::int32_t b = 0; b < p.rows.num_requests; ++b) {
    write_result(p, b, accept_request(p, b, read, work) ? &work.result : nullptr);
  }
}

}  // namespace specdec::cpu
