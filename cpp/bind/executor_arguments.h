// Python's words for what both executors take: methods, and the parameters of a request.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "bind/acceptance_arguments.h"
#include "engine/executor.h"

namespace specdec {

using LookaheadTriple = std::tuple<int, int, int>;

// ValueError for what is unknown.
DraftMethod parse_method(const std::string& name);
SchedulerPolicy parse_policy(const std::string& name);
NgramParams parse_ngram(const pybind11::dict& dict);
SuffixLookup parse_suffix(const pybind11::dict& dict);
LookaheadConfig to_lookahead(const LookaheadTriple& triple);

pybind11::dict stats_dict(const ExecutorStats& stats);

// submit(prompt_ids, *, max_tokens, ...) of a class whose C++ type has submit(RequestParams,
// ProposedProbs).
template <typename Class>
void def_submit(Class& cls) {
  namespace py = pybind11;
  using Bound = typename Class::type;
  cls.def(
      "submit",
      [](Bound& self, std::vector<TokenId> prompt_ids, int max_tokens, int min_tokens,
         std::vector<TokenId> eos_token_ids, std::vector<TokenId> stop_token_ids, bool ignore_eos,
         bool speculative, const std::optional<LookaheadTriple>& lookahead,
         std::optional<int> max_draft_len, std::optional<int> suffix_draft_len,
         std::optional<bool> adaptive, std::uint64_t seed, float temperature, int top_k,
         float top_p, float min_p, const std::string& acceptance, float posterior_threshold,
         float posterior_alpha, float acceptance_threshold, float repetition_penalty,
         float presence_penalty, float frequency_penalty,
         const std::map<TokenId, float>& logit_bias, std::vector<std::vector<TokenId>> bad_words,
         std::optional<std::vector<TokenId>> allowed_token_ids, std::optional<int> logprobs,
         std::optional<int> prompt_logprobs, bool processes_scores, std::string cache_salt,
         int priority, bool return_logits, std::vector<TokenId> external_drafts,
         bool end_after_drafts, const py::object& external_probs, bool compute_whole_prompt,
         std::vector<TokenId> prediction, bool grammar, std::vector<TokenId> forced,
         bool return_drafts, int outputs_at_once, RequestId id) {
        RequestParams p;
        p.id = id;
        p.prompt = std::move(prompt_ids);
        p.max_tokens = max_tokens;
        p.min_tokens = min_tokens;
        p.eos_token_ids = std::move(eos_token_ids);
        p.stop_token_ids = std::move(stop_token_ids);
        p.ignore_eos = ignore_eos;
        p.speculative = speculative;
        if (lookahead) p.lookahead = to_lookahead(*lookahead);
        p.max_draft_len = max_draft_len;
        p.suffix_draft_len = suffix_draft_len;
        p.adaptive = adaptive;
        p.seed = seed;
        p.sampling = SamplingLaw{temperature, top_k, top_p, min_p};
        p.acceptance =
            to_acceptance(acceptance, posterior_threshold, posterior_alpha, acceptance_threshold);
        p.processors.repetition_penalty = repetition_penalty;
        p.processors.presence_penalty = presence_penalty;
        p.processors.frequency_penalty = frequency_penalty;
        p.processors.logit_bias.assign(logit_bias.begin(), logit_bias.end());
        p.processors.bad_words = std::move(bad_words);
        SPECDEC_REQUIRE(!allowed_token_ids || !allowed_token_ids->empty(),
                        "allowed_token_ids is empty: name at least one token, or leave it out");
        if (allowed_token_ids) p.processors.allowed_token_ids = std::move(*allowed_token_ids);
        p.logprobs = logprobs;
        p.prompt_logprobs = prompt_logprobs;
        p.processes_scores = processes_scores;
        p.cache_salt = std::move(cache_salt);
        p.priority = priority;
        p.return_logits = return_logits;
        p.external_drafts = std::move(external_drafts);
        p.end_after_drafts = end_after_drafts;
        p.compute_whole_prompt = compute_whole_prompt;
        p.prediction = std::move(prediction);
        p.grammar = grammar;
        p.forced = std::move(forced);
        p.return_drafts = return_drafts;
        p.outputs_at_once = outputs_at_once;
        const BorrowedProbs borrowed(external_probs, py::none(), false);
        py::gil_scoped_release release;
        return self.submit(std::move(p), borrowed.proposed());
      },
      py::arg("prompt_ids"), py::kw_only(), py::arg("max_tokens"), py::arg("min_tokens") = 0,
      py::arg("eos_token_ids") = std::vector<TokenId>{},
      py::arg("stop_token_ids") = std::vector<TokenId>{}, py::arg("ignore_eos") = false,
      py::arg("speculative") = true, py::arg("lookahead") = py::none(),
      py::arg("max_draft_len") = py::none(), py::arg("suffix_draft_len") = py::none(),
      py::arg("adaptive") = py::none(), py::arg("seed") = 0, py::arg("temperature") = 0.0f,
      py::arg("top_k") = 0, py::arg("top_p") = 1.0f, py::arg("min_p") = 0.0f,
      py::arg("acceptance") = "exact_match", py::arg("posterior_threshold") = kPosteriorThreshold,
      py::arg("posterior_alpha") = kPosteriorAlpha, py::arg("acceptance_threshold") = 1.0f,
      py::arg("repetition_penalty") = 1.0f, py::arg("presence_penalty") = 0.0f,
      py::arg("frequency_penalty") = 0.0f, py::arg("logit_bias") = std::map<TokenId, float>{},
      py::arg("bad_words") = std::vector<std::vector<TokenId>>{},
      py::arg("allowed_token_ids") = py::none(), py::arg("logprobs") = py::none(),
      py::arg("prompt_logprobs") = py::none(), py::arg("processes_scores") = false,
      py::arg("cache_salt") = "", py::arg("priority") = 0, py::arg("return_logits") = false,
      py::arg("external_drafts") = std::vector<TokenId>{}, py::arg("end_after_drafts") = false,
      py::arg("external_probs") = py::none(), py::arg("compute_whole_prompt") = false,
      py::arg("prediction") = std::vector<TokenId>{}, py::arg("grammar") = false,
      py::arg("forced") = std::vector<TokenId>{}, py::arg("return_drafts") = false,
      py::arg("outputs_at_once") = 1, py::arg("id") = 0);
  cls.def(
      "reserve", [](Bound& self) { return self.executor.reserve(); },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace specdec
