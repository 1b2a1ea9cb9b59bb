// Accepted drafts of each request, and the token after them, by probabilities.
//
// Grid     argmax over all rows (step/argmax.cu), then one block for each request, which walks its
//          tree. A row's law is drawn up only when the walk comes to it.
// Bytes    all rows once; each row that the walk comes to once more (its masses), with cuts twice;
//          the probabilities of each draft it holds against a row once (their sum), and of a
//          rejected one, with the row and 8 V bytes of scratch, again (what is left).
// Limit    the first kernel: bandwidth. The second: one multiprocessor's bandwidth times the rows
// of
//          the longest walk; requests do not wait for each other.
#include "accept/accept.h"
#include "accept/accept_result.cuh"
#include "accept/block_row.cuh"
#include "step/step.h"

namespace specdec::cuda {
namespace {

struct AcceptShared {
  AcceptScratch scratch;
  AcceptResult result;
  TokenId tokens[kMaxStepTokens];
  std::int32_t parents[kMaxStepTokens];
  TokenId best[kMaxStepTokens];     // largest score of each row
  TokenId decided[kMaxStepTokens];  // the same, and what was decided
};
static_assert(sizeof(AcceptShared) % alignof(LawShared) == 0);

// The laws of one request's rows, for algo/accept_rules.h. What passes over a row is a function of
// its own: the rules call each in several places, and inlined they take minutes to compile.
template <class T>
class BlockLaws {
 public:
  __device__ BlockLaws(const AcceptStepParams& p, int b, AcceptShared* shared)
      : p_(p),
        b_(b),
        first_(p.rows.cu_logits[b]),
        shared_(*shared),
        row_(reinterpret_cast<LawShared*>(shared + 1), p.rows.vocab),
        law_(p.sampling.law(b)) {}

  [[gnu::noinline]] __device__ TokenId weigh(std::int32_t node) {
    const T* scores =
        static_cast<const T*>(p_.rows.scores) + (std::int64_t{first_} + node) * p_.rows.row_stride;
    BlockRow<T> row = row_;  // in registers
    const TokenId status = row.weigh(scores, shared_.best[node], law_);
    row_ = row;
    return status;
  }
  __device__ double weight(TokenId token) const { return static_cast<double>(row_.weight(token)); }
  __device__ double total() const { return weight_of(row_.total()); }
  [[gnu::noinline]] __device__ TokenId draw(double u) {
    BlockRow<T> row = row_;
    const TokenId token = row.draw(u);
    row_ = row;
    return token;
  }
  __device__ TokenId sample(std::int32_t node, double u) {
    const TokenId status = weigh(node);
    return status < 0 ? status : draw(u);
  }
  [[gnu::noinline]] __device__ double spread() {
    BlockRow<T> row = row_;
    const double spread = row.spread();
    row_ = row;
    return spread;
  }
  __device__ bool has_probs() const { return p_.drawn_from_probs(b_); }
  __device__ bool replacement() const { return p_.with_replacement(b_); }

  [[gnu::noinline]] __device__ DraftLaw draft(std::int32_t node) {
    DraftLaw law = p_.law_of(b_, node);
    const std::int32_t columns = law.column < 0 ? 0 : law.columns;
    Mass sums[2] = {};  // mass, columns that hold no probability
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < columns; i += threads()) {
      const float q = law.probs[i];
      if (is_probability(q)) {
        sums[0] += mass_of(to_grid(q));
      } else {
        ++sums[1];
      }
    }
    row_.sum(sums);
    law.mass = weight_of(sums[0]);
    if (columns == 0 || sums[1] != 0 || !sums_to_one(law.mass) || !(law.probs[law.column] > 0.0f)) {
      if (threadIdx.x == 0) report(p_.exec.status, b_, kStatusBadProbs);
      return {};
    }
    return law;
  }

  [[gnu::noinline]] __device__ void subtract(const DraftLaw& q, double mass) {
    char* residuals = static_cast<char*>(p_.exec.workspace);
    BlockRow<T> row = row_;
    row.subtract(q.probs, q.ids, q.columns, total() / mass,
                 reinterpret_cast<float*>(residuals + b_ * residual_bytes(p_.rows.vocab)));
    row_ = row;
  }

 private:
  const AcceptStepParams& p_;
  const int b_;
  const std::int32_t first_;
  AcceptShared& shared_;
  BlockRow<T> row_;
  const SamplingLaw law_;
};

// What is wrong with a request before its walk: flags, for all threads.
__device__ std::uint32_t check_request(const AcceptStepParams& p, int b, const DraftedTree& tree) {
  const int i = static_cast<int>(threadIdx.x);
  const bool bad = i < tree.size && !is_drafted_node(tree, i, p.rows.vocab);
  std::uint32_t flags = __syncthreads_or(bad ? 1 : 0) != 0 ? kStatusBadTree : 0u;
  if (!p.sampling.law(b).valid() || !p.acceptance(b).valid()) flags |= kStatusBadLaw;
  if (p.synthetic.given()) {
    const bool good = are_rates(BlockTeam{}, p.synthetic);
    if (__syncthreads_or(good ? 0 : 1) != 0) flags |= kStatusBadLaw;
  }
  return flags;
}

template <class T>
__global__ void __launch_bounds__(kMaxLawThreads, 1)
    accept_kernel(const __grid_constant__ AcceptStepParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  AcceptShared& shared = *gpu::dynamic_shared<AcceptShared>();
  const BlockTeam team;
  const int b = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const std::int32_t first = p.rows.cu_logits[b];
  const bool valid = has_rows(p.rows, b);
  const std::int32_t size = valid ? p.rows.cu_logits[b + 1] - first : 0;
  if (!valid || size == 0 || size > kMaxStepTokens) {
    if (thread == 0 && !valid) report(p.exec.status, b, kStatusBadLength);
    if (thread == 0 && size > kMaxStepTokens) report(p.exec.status, b, kStatusBadTree);
    return write_result(team, p, b, nullptr);
  }
  if (thread < size) {
    shared.tokens[thread] = p.tokens[first + thread];
    shared.parents[thread] = p.parents[first + thread];
    shared.decided[thread] = shared.best[thread] = p.sampled[first + thread];
  }
  __syncthreads();
  const DraftedTree tree{shared.tokens, shared.parents, size, p.sampling.seed[b],
                         std::int64_t{p.rows.positions[first]} + 1};
  if (const std::uint32_t flags = check_request(p, b, tree); flags != 0) {
    if (thread == 0) report(p.exec.status, b, flags);
    return write_result(team, p, b, nullptr);
  }
  const bool greedy = p.sampling.law(b).greedy();
  if (greedy && !p.synthetic.given()) {
    accept_greedy(team, tree.tokens, tree.parents, size, shared.decided, kMaxDraftLen,
                  &shared.result);
  } else {
    BlockLaws<T> laws(p, b, &shared);
    if (p.synthetic.given()) {
      const auto choose = [&](std::int32_t node, std::int32_t depth) {
        return greedy ? shared.decided[node] : laws.sample(node, token_uniform_at(tree, depth));
      };
      accept_synthetic(team, tree, p.synthetic, p.rows.vocab, choose, shared.decided,
                       &shared.result);
    } else {
      accept_by_rule(team, tree, p.acceptance(b), laws, &shared.scratch, shared.decided,
                     &shared.result);
    }
  }
  if (thread < size) p.sampled[first + thread] = shared.decided[thread];
  const std::int32_t bad = shared.result.bad_row;
  if (thread == 0 && bad >= 0 && shared.decided[bad] == kBadRow) {
    report(p.exec.status, b, kStatusNaN);
  }
  write_result(team, p, b, &shared.result);
}

template <class T>
void launch_accept(const AcceptStepParams& p) {
  gpu::launch(accept_kernel<T>, dim3(static_cast<unsigned>(p.rows.num_requests)),
              dim3(law_threads(p.rows.vocab, kMaxStepTokens)),
              sizeof(AcceptShared) + law_shared_bytes(p.rows.vocab), p.exec.stream,
              gpu::LaunchOptions{.dependent = true}, p);
}

}  // namespace

void accept_step(const AcceptStepParams& p) {
  if (p.rows.num_requests == 0) return;
  if (p.rows.rows > 0) {
    ArgmaxParams best;
    best.scores = p.rows.scores;
    best.row_stride = p.rows.row_stride;
    best.rows = p.rows.rows;
    best.vocab = p.rows.vocab;
    best.ids = p.sampled;
    best.dtype = p.rows.dtype;
    best.exec = p.exec;
    const std::int64_t scratch =
        accept_scratch_bytes(p.rows.num_requests, p.rows.vocab, p.probs != nullptr);
    best.exec.workspace_bytes = p.exec.workspace_bytes - scratch;
    best.exec.workspace =
        best.exec.workspace_bytes > 0 ? static_cast<char*>(p.exec.workspace) + scratch : nullptr;
    argmax(best);
  }
  switch (p.rows.dtype) {
    case DType::kBF16:
      return launch_accept<__nv_bfloat16>(p);
    case DType::kF16:
      return launch_accept<__half>(p);
    default:
      return launch_accept<float>(p);
  }
}

}  // namespace specdec::cuda
