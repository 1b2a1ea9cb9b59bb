// Accepted drafts of each request, and the token after them, by probabilities.
//
// Grid     all rows together (row_laws.cu): largest scores, masses and tokens drawn, and where
//          drafts have a probability for each token what rejection makes of them. Then one block
//          for each request, which walks its tree along what is known. Only where something is not
//          (a cut beyond its row's list, probabilities of fewer tokens or that are none, a lossy
//          rule) it looks at rows and probabilities itself.
// Bytes    row_laws.cu. Of a row that the walk looks at itself: the probabilities of each draft
//          held once (their sum), and of a rejected one, with the row and 8 V bytes of scratch,
//          again (what is left).
// Limit    the first kernel: row_laws.cu. The second: latency, and where it passes over a row one
//          multiprocessor's arithmetic, row after row; requests do not wait for each other.
#include "accept/accept.h"
#include "accept/accept_result.cuh"
#include "accept/block_row.cuh"
#include "accept/row_laws.cuh"

namespace specdec::cuda {
namespace {

struct AcceptShared {
  AcceptScratch scratch;
  AcceptResult result;
  TokenId tokens[kMaxStepTokens];
  std::int32_t parents[kMaxStepTokens];
  TokenId best[kMaxStepTokens];     // largest score of each row
  TokenId decided[kMaxStepTokens];  // the same, and what was decided
  // Where row_laws.cu has found them: the token after each row, and the draft that it keeps.
  TokenId drawn[kMaxStepTokens];
  std::int32_t next[kMaxStepTokens];
  bool known;
};
static_assert(sizeof(AcceptShared) % alignof(LawShared) == 0);

// The laws of one request's rows, for algo/accept_rules.h. What passes over a row is a function of
// its own: the rules call each in several places, and inlined they take minutes to compile.
template <class T>
class BlockLaws {
 public:
  __device__ BlockLaws(const AcceptStepParams& p, const RowLaws& all, int b, AcceptShared* shared)
      : p_(p),
        all_(all),
        b_(b),
        first_(p.rows.cu_logits[b]),
        shared_(*shared),
        row_(reinterpret_cast<LawShared*>(shared + 1), p.rows.vocab),
        law_(p.sampling.law(b)),
        drawn_(all && RowLaws::draws(law_)) {}

  [[gnu::noinline]] __device__ TokenId weigh(std::int32_t node) {
    const std::int32_t at = first_ + node;
    const T* scores = static_cast<const T*>(p_.rows.scores) + at * p_.rows.row_stride;
    token_ = drawn_ ? all_.drawn[at] : kCutUnknown;
    if (token_ != kCutUnknown) {
      if (token_ < 0) return token_;
      row_.adopt(scores, shared_.best[node], law_, all_.cut_of(at, law_, p_.rows.vocab),
                 all_.masses_of(at));
      return 0;
    }
    BlockRow<T> row = row_;  // in registers
    const TokenId status = row.weigh(scores, shared_.best[node], law_);
    row_ = row;
    return status;
  }
  __device__ double weight(TokenId token) const { return static_cast<double>(row_.weight(token)); }
  __device__ double total() const { return weight_of(row_.total()); }
  [[gnu::noinline]] __device__ TokenId draw(double u) {
    if (token_ >= 0) return token_;  // u is the row's own number, which row_laws.cu has drawn by
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
  // Is the rule exact match, and are tokens drawn? Those of rows on no path may not be.
  __device__ bool matches_drawn(AcceptanceRule rule) const {
    const bool by_probs = rule == AcceptanceRule::kRejection || rule == AcceptanceRule::kBestBeam;
    return drawn_ && (rule == AcceptanceRule::kExactMatch || (by_probs && !has_probs()));
  }
  // Is it rejection, and are drafts held?
  __device__ bool holds(AcceptanceRule rule) const {
    return drawn_ && rule == AcceptanceRule::kRejection && has_probs();
  }
  __device__ bool has_probs() const { return p_.drawn_from_probs(b_); }
  __device__ bool replacement() const { return p_.with_replacement(b_); }

  [[gnu::noinline]] __device__ DraftLaw draft(std::int32_t node) {
    DraftLaw law = p_.law_of(b_, node);
    const std::int32_t columns = law.column < 0 ? 0 : law.columns;
    Mass sums[2] = {};  // mass, columns that hold no probability
    const HeldDraft* held = drawn_ ? all_.held + first_ + node : nullptr;
    if (held != nullptr && held->known != 0) {
      sums[0] = held->mass;
      sums[1] = held->faults;
    } else {
      for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < columns; i += threads()) {
        const float q = law.probs[i];
        if (is_probability(q)) {
          sums[0] += mass_of(to_grid(q));
        } else {
          ++sums[1];
        }
      }
      row_.sum(sums);
    }
    law.mass = weight_of(sums[0]);
    if (columns == 0 || sums[1] != 0 || !sums_to_one(law.mass) || !(law.probs[law.column] > 0.0f)) {
      if (threadIdx.x == 0) report(p_.exec.status, b_, kStatusBadProbs);
      return {};
    }
    return law;
  }

  [[gnu::noinline]] __device__ void subtract(const DraftLaw& q, double mass) {
    char* residuals = static_cast<char*>(p_.exec.workspace);
    token_ = kCutUnknown;
    BlockRow<T> row = row_;
    row.subtract(q.probs, q.ids, q.columns, total() / mass,
                 reinterpret_cast<float*>(residuals + b_ * residual_bytes(p_.rows.vocab)));
    row_ = row;
  }

 private:
  const AcceptStepParams& p_;
  const RowLaws& all_;
  const int b_;
  const std::int32_t first_;
  AcceptShared& shared_;
  BlockRow<T> row_;
  const SamplingLaw law_;
  const bool drawn_;
  TokenId token_ = kCutUnknown;  // drawn from the current law; below 0: nobody has
};

// Exact match where the tokens have been drawn: accept_drawn() of algo/accept_rules.h for all nodes
// at once. A node is kept if each token on the way to it is the one drawn after its parent. False:
// the token after such a node is not known.
__device__ bool accept_all_drawn(const BlockTeam& team, const DraftedTree& tree,
                                 const TokenId* drawn, AcceptShared* shared) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < tree.size) shared->drawn[i] = drawn[i];
  team.sync();
  bool kept = false;
  if (i < tree.size) {
    std::int32_t node = i;
    while (node > 0 && tree.tokens[node] == shared->drawn[tree.parents[node]]) {
      node = tree.parents[node];
    }
    kept = node == 0;
  }
  if (__syncthreads_or(kept && shared->drawn[i] == kCutUnknown ? 1 : 0) != 0) return false;
  if (kept) shared->decided[i] = shared->drawn[i];
  team.sync();
  accept_greedy(team, tree.tokens, tree.parents, tree.size, shared->decided, kMaxDraftLen,
                &shared->result);
  return true;
}

// Rejection where the drafts have been held: accept_by_rejection() along what each row of the path
// keeps. False: of one of them that is not known.
__device__ bool accept_held(const BlockTeam& team, const DraftedTree& tree,
                            const RowOutcome* outcomes, AcceptShared* shared) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < tree.size) {
    const RowOutcome outcome = outcomes[i];
    shared->next[i] = outcome.next;
    shared->drawn[i] = outcome.token;
  }
  team.sync();
  if (i == 0) {
    std::int32_t node = 0, length = 0;
    for (; shared->next[node] > 0; node = shared->next[node]) {
      shared->result.path[length++] = shared->next[node];
    }
    shared->result.path_len = length;
    shared->known = shared->next[node] == kNoDraft;
  }
  team.sync();
  if (!shared->known) return false;
  if (i == 0) shared->decided[0] = shared->drawn[0];
  if (i < shared->result.path_len) {
    const std::int32_t node = shared->result.path[i];
    shared->decided[node] = shared->drawn[node];
  }
  emit_path(team, shared->decided, &shared->result);
  return true;
}

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
    accept_kernel(const __grid_constant__ AcceptStepParams p, const __grid_constant__ RowLaws all) {
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
    BlockLaws<T> laws(p, all, b, &shared);
    const AcceptanceRule rule = p.acceptance(b).rule;
    if (p.synthetic.given()) {
      const auto choose = [&](std::int32_t node, std::int32_t depth) {
        return greedy ? shared.decided[node] : laws.sample(node, token_uniform_at(tree, depth));
      };
      accept_synthetic(team, tree, p.synthetic, p.rows.vocab, choose, shared.decided,
                       &shared.result);
    } else if (!(laws.matches_drawn(rule) &&
                 accept_all_drawn(team, tree, all.drawn + first, &shared)) &&
               !(laws.holds(rule) && accept_held(team, tree, all.outcome + first, &shared))) {
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
void launch_accept(const AcceptStepParams& p, const RowLaws& all) {
  gpu::launch(accept_kernel<T>, dim3(static_cast<unsigned>(p.rows.num_requests)),
              dim3(law_threads(p.rows.vocab, kMaxStepTokens)),
              sizeof(AcceptShared) + law_shared_bytes(p.rows.vocab), p.exec.stream,
              gpu::LaunchOptions{.dependent = true}, p, all);
}

}  // namespace

void accept_step(const AcceptStepParams& p) {
  if (p.rows.num_requests == 0) return;
  RowLawsParams search;
  search.rows = p.rows;
  search.sampling = p.sampling;
  search.parents = p.parents;
  search.accept = p;
  search.ids = p.sampled;
  const RowLaws all = search_rows(
      search, p.exec, accept_scratch_bytes(p.rows.num_requests, p.rows.vocab, p.probs != nullptr));
  switch (p.rows.dtype) {
    case DType::kBF16:
      return launch_accept<__nv_bfloat16>(p, all);
    case DType::kF16:
      return launch_accept<__half>(p, all);
    default:
      return launch_accept<float>(p, all);
  }
}

}  // namespace specdec::cuda
