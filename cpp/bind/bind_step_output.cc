// What steps give to Python: StepOutput, and the trees whose scores the caller changes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind/array_argument.h"
#include "bind/registers.h"
#include "engine/executor.h"
#include "engine/output_queue.h"
#include "engine/token_mask.h"

namespace py = pybind11;

namespace specdec {
namespace {

py::list logprobs_list(const std::vector<TokenLogprobs>& entries) {
  py::list list;
  for (const TokenLogprobs& entry : entries) {
    list.append(py::make_tuple(entry.logprob, entry.rank, py::cast(entry.top)));
  }
  return list;
}

std::vector<int> source_numbers(SourceBits bits) {
  std::vector<int> numbers;
  for (int s = 0; s < static_cast<int>(kNumDraftSources); ++s) {
    if ((bits >> s & 1u) != 0) numbers.push_back(s);
  }
  return numbers;
}

std::optional<TokenId> best_allowed_of(const ArrayArgument<float>& scores,
                                       const ArrayArgument<std::int32_t>& mask) {
  if (scores.ndim() != 1 || scores.size() == 0 || mask.ndim() != 1 ||
      mask.size() * 32 < scores.size()) {
    throw py::value_error(
        "best_allowed: scores are [vocabulary], and a mask has a bit for each of them");
  }
  thread_local std::vector<float> masked;
  return best_allowed(reinterpret_cast<const std::uint32_t*>(mask.data()),
                      static_cast<int>(scores.size()), scores.data(), &masked);
}

// Calls `visit` with each step of an output.
template <typename Visit>
void each_step(const StepOutput& out, Visit visit) {
  if (out.parts.empty()) return visit(out);
  for (const OutputPtr& part : out.parts) visit(*part);
}

std::vector<std::tuple<std::optional<int>, int, int>> sources_list(const StepOutput& out) {
  std::array<StepOutput::SourceCount, kNumDraftSources> known{};
  StepOutput::SourceCount unknown;
  each_step(out, [&](const StepOutput& step) {
    bool any = false;
    for (std::size_t s = 0; s < known.size(); ++s) {
      any |= step.sources[s].drafts > 0;
      known[s].drafts += step.sources[s].drafts;
      known[s].accepted += step.sources[s].accepted;
    }
    if (any) return;
    unknown.drafts += step.num_drafts;
    unknown.accepted += step.num_accepted;
  });
  std::vector<std::tuple<std::optional<int>, int, int>> list;
  for (std::size_t s = 0; s < known.size(); ++s) {
    if (known[s].drafts == 0) continue;
    list.emplace_back(static_cast<int>(s), known[s].drafts, known[s].accepted);
  }
  if (unknown.drafts > 0) list.emplace_back(std::nullopt, unknown.drafts, unknown.accepted);
  return list;
}

py::object token_sources(const StepOutput& out) {
  if (out.num_accepted == 0) return py::none();
  py::list list;
  each_step(out, [&](const StepOutput& step) {
    const int tokens = static_cast<int>(step.tokens.size());
    const int named = static_cast<int>(step.accepted_by.size());
    for (int i = 0; i < tokens; ++i) {
      if (i >= step.num_accepted) {
        list.append(py::none());
      } else {
        const auto at = static_cast<std::size_t>(i);
        list.append(i < named ? std::countr_zero(step.accepted_by[at]) : -1);
      }
    }
  });
  return list;
}

py::list steps_list(const StepOutput& out) {
  py::list list;
  each_step(out, [&](const StepOutput& step) {
    list.append(py::make_tuple(step.is_prefill, step.num_rows, step.num_drafts, step.num_accepted,
                               step.tokens.size()));
  });
  return list;
}

}  // namespace

void register_step_output(py::module_& m) {
  py::class_<VerifiedDraft>(m, "VerifiedDraft", "A draft that a step verified.")
      .def_readonly("token", &VerifiedDraft::token)
      .def_readonly("parent", &VerifiedDraft::parent,
                    "Index of another draft; -1: it follows the golden token.")
      .def_readonly("accepted", &VerifiedDraft::accepted)
      .def_property_readonly(
          "sources", [](const VerifiedDraft& draft) { return source_numbers(draft.sources); },
          "Who proposed it, as indices of DRAFT_SOURCES; a draft may be of several.");

  // In the order of DraftSource.
  m.attr("DRAFT_SOURCES") = py::make_tuple("request", "prediction", "grammar", "suffix", "edits",
                                           "ngram", "model", "lookahead");
  py::class_<StepOutput, OutputPtr>(
      m, "StepOutput",
      "What one step delivered to one request, or several steps (outputs_at_once): then counts are "
      "sums, and the end is the last step's.")
      .def_readonly("request_id", &StepOutput::request_id)
      .def_readonly("step", &StepOutput::step)
      .def_readonly("sequence", &StepOutput::sequence, "Grows from output to output.")
      .def("since", &since, py::arg("sequence"),
           "What of it came after the output of that number; None: nothing.")
      .def_property_readonly("steps", steps_list,
                             "(is_prefill, rows, drafts, accepted drafts, tokens) of each step.")
      .def_readonly("is_prefill", &StepOutput::is_prefill)
      .def_readonly("tokens", &StepOutput::tokens)
      .def_readonly("num_rows", &StepOutput::num_rows)
      .def_readonly("num_cached_tokens", &StepOutput::num_cached_tokens)
      .def_readonly("num_drafts", &StepOutput::num_drafts)
      .def_readonly("num_accepted", &StepOutput::num_accepted)
      .def_property_readonly("sources", sources_list,
                             "(source, drafts, accepted drafts) of each source that has proposed "
                             "any; a draft may be of several. None: those of which the host does "
                             "not know whose they are.")
      .def_property_readonly(
          "token_sources", token_sources,
          "The source of each token: None where it was no accepted draft; of several sources the "
          "first in the order of DRAFT_SOURCES; -1 where the host does not know. None instead of "
          "the list: no token was an accepted draft.")
      .def_readonly("max_path", &StepOutput::max_path)
      .def_readonly("drafts", &StepOutput::drafts,
                    "The verified drafts, if asked for (return_drafts).")
      .def_readonly("last_logit_row", &StepOutput::last_logit_row)
      .def_readonly("logit_rows", &StepOutput::logit_rows)
      .def_property_readonly("finish_reason",
                             [](const StepOutput& out) -> std::optional<std::string> {
                               if (out.finish_reason == FinishReason::kNone) return std::nullopt;
                               return finish_reason_name(out.finish_reason);
                             })
      .def_readonly("stop_reason", &StepOutput::stop_token)
      .def_property_readonly("error",
                             [](const StepOutput& out) -> std::optional<std::string> {
                               if (out.error.empty()) return std::nullopt;
                               return out.error;
                             })
      .def_property_readonly("logprobs",
                             [](const StepOutput& out) { return logprobs_list(out.logprobs); })
      .def_property_readonly("prompt_logprobs", [](const StepOutput& out) {
        return logprobs_list(out.prompt_logprobs);
      });

  py::class_<ChoiceTree>(m, "ChoiceTree", "A tree whose scores the caller changes or masks.")
      .def_readonly("request_id", &ChoiceTree::request)
      .def_readonly("first", &ChoiceTree::first, "Its root among the step's rows of scores.")
      .def_readonly("fixed", &ChoiceTree::fixed, "Nodes from the root on that cut() leaves.")
      .def_readonly("processed", &ChoiceTree::processed, "The caller changes its scores.")
      .def_readonly("masked", &ChoiceTree::masked, "The caller gives masks of its nodes.")
      .def_readonly("greedy", &ChoiceTree::greedy,
                    "The best token that a mask allows follows each node, and nothing else changes "
                    "its scores: masks matter where the best of all tokens is not allowed.")
      .def(
          "output",
          [](const ChoiceTree& tree, int first) {
            const auto from = std::min<std::size_t>(tree.prompt_len + first, tree.history.size());
            return std::vector<TokenId>(tree.history.begin() + from, tree.history.end());
          },
          py::arg("first"), "The tokens of the output from index `first` on.")
      .def_readonly("history", &ChoiceTree::history, "Up to the root, which is its last token.")
      .def_readonly("tokens", &ChoiceTree::tokens)
      .def_readonly("parents", &ChoiceTree::parents, "Of node 0, the last decided token: -1.");

  m.def("best_allowed", &best_allowed_of, py::arg("scores"), py::arg("mask"),
        "The best token, first of equals, of those that `mask` has (int32 [words], 32 tokens each, "
        "least significant bit first). None where the best of their scores is not finite, or one "
        "is NaN. scores: float32 [vocabulary]");
}

}  // namespace specdec
