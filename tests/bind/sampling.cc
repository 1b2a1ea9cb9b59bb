// Drawing tokens and accepting drafts, for tests, studies and users with their own loop.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algo/acceptance.h"
#include "base/check.h"
#include "bind/acceptance_arguments.h"
#include "bind/array_argument.h"

namespace py = pybind11;

namespace specdec {
namespace {

using Scores = py::array_t<float, py::array::c_style | kAligned>;

SamplingLaw checked_law(float temperature, std::int32_t top_k, float top_p, float min_p) {
  SPECDEC_REQUIRE(temperature > 0.0f, "temperature = ", temperature,
                  ": a number above 0 is needed; for greedy decoding use ops.argmax");
  SPECDEC_REQUIRE(top_k >= 0 && top_p > 0.0f && top_p <= 1.0f && min_p >= 0.0f && min_p <= 1.0f,
                  "top_k = ", top_k, ", top_p = ", top_p, ", min_p = ", min_p,
                  ": top_k >= 0, top_p in (0, 1] and min_p in [0, 1] are needed");
  return {temperature, top_k, top_p, min_p};
}

// Accepted drafts and the token after them, for one tree whose scores are at hand.
std::pair<std::vector<std::int32_t>, TokenId> accept_drafts(
    const std::vector<TokenId>& tokens, const std::vector<std::int32_t>& parents,
    const Scores& scores, std::uint64_t seed, std::int64_t position, const std::string& acceptance,
    float temperature, std::int32_t top_k, float top_p, float min_p, const py::object& probs,
    const py::object& vocab_ids, bool replacement, float posterior_threshold, float posterior_alpha,
    float acceptance_threshold) {
  const auto drafts = static_cast<std::int32_t>(tokens.size());
  SPECDEC_REQUIRE(tokens.size() == parents.size() && drafts <= kMaxDraftLen, "tokens has ",
                  tokens.size(), " entries, parents ", parents.size(), ": one of each per draft, ",
                  kMaxDraftLen, " at most");
  SPECDEC_REQUIRE(scores.ndim() == 2 && scores.shape(0) == drafts + 1 && scores.shape(1) > 0,
                  "scores: float32 [", drafts + 1, ", V] is needed, a row per node");
  const auto vocab = static_cast<int>(scores.shape(1));
  DraftTree tree;
  tree.reset(0);
  std::int32_t source[kMaxStepTokens] = {};
  for (std::int32_t i = 0; i < drafts; ++i) source[tree.add(tokens[i], parents[i] + 1)] = i;
  validate_tree(tree.tokens, tree.parents, tree.size, vocab);
  const AcceptanceParams params =
      to_acceptance(acceptance, posterior_threshold, posterior_alpha, acceptance_threshold);
  const SamplingLaw law = checked_law(temperature, top_k, top_p, min_p);
  DraftProbs q;
  const BorrowedProbs borrowed(probs, vocab_ids, replacement);
  if (const ProposedProbs& given = borrowed.proposed(); given.data != nullptr) {
    SPECDEC_REQUIRE(given.rows == drafts, "probs has ", given.rows, " rows for ", drafts,
                    " drafts: give one row per draft");
    std::vector<std::int32_t> scratch;
    q.assign(given.data, given.row_stride, given.columns, given.vocab_ids, replacement,
             tokens.data(), parents.data(), drafts, vocab, scratch);
  }
  SPECDEC_REQUIRE(params.rule != AcceptanceRule::kExactMatch &&
                      (params.rule != AcceptanceRule::kRejection || q.given()),
                  "acceptance = '", acceptance,
                  "' without probs is decided by sample_token and accept_greedy");
  TokenSampler sampler;
  TreeAcceptor acceptor;
  AcceptResult result;
  TokenId decided[kMaxStepTokens] = {};
  acceptor.accept(
      {&tree, &q, source, law, seed, position}, params, vocab,
      [&](std::int32_t node) { return scores.data(node, 0); }, sampler, decided, &result);
  std::vector<std::int32_t> path;
  for (std::int32_t i = 0; i < result.path_len; ++i) path.push_back(result.path[i] - 1);
  const TokenId last = decided[path.empty() ? 0 : path.back() + 1];
  return {std::move(path), last};
}

}  // namespace

void register_sampling(py::module_& m) {
  m.def(
      "sample_token",
      [](const Scores& scores, double u, float temperature, std::int32_t top_k, float top_p,
         float min_p) {
        SPECDEC_REQUIRE(scores.ndim() == 1 && scores.size() > 0, "scores has ", scores.ndim(),
                        " dimensions: give a flat float32 array of at least one score");
        SPECDEC_REQUIRE(u >= 0.0 && u < 1.0, "u = ", u, ": a number in [0, 1) is needed");
        const SamplingLaw law = checked_law(temperature, top_k, top_p, min_p);
        TokenSampler sampler;
        return sampler.draw(scores.data(), static_cast<int>(scores.size()), law, u);
      },
      py::arg("scores"), py::arg("u"), py::kw_only(), py::arg("temperature"), py::arg("top_k") = 0,
      py::arg("top_p") = 1.0f, py::arg("min_p") = 0.0f,
      "The token that u in [0, 1) selects from one row of scores (cpp/algo/sample.h); -1 for a row "
      "with a NaN or +infinity, -2 if every score is -infinity.");
  m.def("token_uniform", &token_uniform, py::arg("seed"), py::arg("position"),
        "The number in [0, 1) that decides the token at an absolute position.");
  m.def("accept_drafts", &accept_drafts, py::arg("tokens"), py::arg("parents"), py::arg("scores"),
        py::kw_only(), py::arg("seed"), py::arg("position"), py::arg("acceptance"),
        py::arg("temperature"), py::arg("top_k") = 0, py::arg("top_p") = 1.0f,
        py::arg("min_p") = 0.0f, py::arg("probs") = py::none(), py::arg("vocab_ids") = py::none(),
        py::arg("replacement") = false, py::arg("posterior_threshold") = kPosteriorThreshold,
        py::arg("posterior_alpha") = kPosteriorAlpha, py::arg("acceptance_threshold") = 1.0f,
        R"(Accept drafts by probabilities (cpp/algo/acceptance.h).

tokens, parents: drafts as in Executor.propose; scores: float32 [n + 1, V], row 0 follows the golden
token, row i + 1 draft i; position: absolute position of the token after the golden one. Returns
(path, token): the accepted drafts, downwards, and the token after the last of them; -1 for a row
with a NaN, -2 if every score of it is -infinity.)");
}

}  // namespace specdec
