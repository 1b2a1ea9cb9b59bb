// The per-request algorithms for tests, studies and users with their own loop: lookahead, prompt
// lookup, acceptance and what is derived from a draft tree.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "algo/accept.h"
#include "algo/lookahead_host.h"
#include "algo/ngram_batch.h"
#include "algo/shared_ngram_pool.h"
#include "base/check.h"
#include "bind/array_argument.h"
#include "tree/draft_tree.h"

namespace py = pybind11;

namespace specdec {
namespace {

using Ids = ArrayArgument<TokenId>;
using ExactIds = py::array_t<TokenId, py::array::c_style>;

py::array_t<TokenId> copy_ids(const TokenId* data, py::ssize_t n) {
  return py::array_t<TokenId>(n, data);
}

std::int32_t checked_len(const Ids& ids, const char* name) {
  SPECDEC_REQUIRE(ids.ndim() == 1, name, " has ", ids.ndim(), " dimensions: give a flat array");
  return static_cast<std::int32_t>(ids.size());
}

// Length of `parents`, a valid tree's.
std::int32_t checked_tree(const Ids& tokens, const Ids& parents, std::int32_t vocab_size) {
  const std::int32_t size = checked_len(parents, "parents");
  SPECDEC_REQUIRE(checked_len(tokens, "tokens") == size, "tokens has ", tokens.size(),
                  " entries, parents ", size, ": one of each per node");
  validate_tree(tokens.data(), parents.data(), size, vocab_size);
  return size;
}

void register_tree(py::module_& m) {
  m.def(
      "validate_tree",
      [](const Ids& tokens, const Ids& parents, std::int32_t vocab_size) {
        checked_tree(tokens, parents, vocab_size);
      },
      py::arg("tokens"), py::arg("parents"), py::arg("vocab_size") = 0,
      "Raises ValueError naming the first entry that is not a draft tree's; vocab_size 0: any id.");
  m.def(
      "tree_depths",
      [](const Ids& parents) {
        const std::int32_t size = checked_tree(parents, parents, 0);
        py::array_t<std::int32_t> out(size);
        derive_depths(parents.data(), size, out.mutable_data());
        return out;
      },
      py::arg("parents"), "int32 [n]: edges from each node to the golden token.");
  m.def(
      "tree_mask",
      [](const Ids& parents) {
        const std::int32_t size = checked_tree(parents, parents, 0);
        py::array_t<std::uint32_t> out({py::ssize_t{size}, py::ssize_t{kMaskWords}});
        derive_mask(parents.data(), size, out.mutable_data());
        return out;
      },
      py::arg("parents"),
      "uint32 [n, 4]: bit j & 31 of word j >> 5 of row i is set if j is i or an ancestor of i.");
  m.def(
      "tree_path",
      [](const Ids& parents, std::int32_t node) {
        const std::int32_t size = checked_tree(parents, parents, 0);
        SPECDEC_REQUIRE(node >= 0 && node < size, "node = ", node, ": the tree has nodes 0..",
                        size - 1);
        std::int32_t path[kMaxStepTokens];
        return copy_ids(path, derive_path(parents.data(), node, path));
      },
      py::arg("parents"), py::arg("node"),
      "int32: the nodes from the golden token's child down to `node`; empty for node 0.");
  m.def(
      "accept_greedy",
      [](const Ids& tokens, const Ids& parents, const Ids& sampled,
         std::optional<std::int32_t> max_path) {
        const std::int32_t size = checked_tree(tokens, parents, 0);
        SPECDEC_REQUIRE(checked_len(sampled, "sampled") == size, "sampled has ", sampled.size(),
                        " entries, the tree ", size, " nodes: one per node");
        AcceptResult result;
        accept_greedy(SerialTeam{}, tokens.data(), parents.data(), size, sampled.data(),
                      max_path.value_or(kMaxDraftLen), &result);
        return py::make_tuple(copy_ids(result.path, result.path_len),
                              copy_ids(result.emitted, result.num_emitted), result.bad_row);
      },
      py::arg("tokens"), py::arg("parents"), py::arg("sampled"), py::arg("max_path") = py::none(),
      R"(Keep the longest path of a draft tree that the target model would have decoded itself.

tokens, parents, sampled: int32 [n]; sampled[i] is the target's choice after node i, -1 if its scores
were NaN. Returns (path, emitted, bad_row): the accepted nodes, the tokens to append (one more than
the path, or as many when the last choice is -1), and the node of that bad choice or -1.)");
}

LookaheadBudget make_budget(std::optional<std::int32_t> window_rows,
                            std::optional<std::int32_t> guesses,
                            std::optional<std::int32_t> guess_len,
                            std::optional<std::int32_t> max_drafts,
                            std::optional<std::int32_t> max_depth) {
  LookaheadBudget budget;
  budget.window_rows = window_rows.value_or(budget.window_rows);
  budget.guesses = guesses.value_or(budget.guesses);
  budget.guess_len = guess_len.value_or(budget.guess_len);
  budget.max_drafts = max_drafts.value_or(budget.max_drafts);
  budget.max_depth = max_depth.value_or(budget.max_depth);
  return budget;
}

void register_lookahead(py::module_& m) {
  m.def(
      "lookahead_max_draft_len",
      [](std::int32_t w, std::int32_t n, std::int32_t g) {
        SPECDEC_REQUIRE(lookahead_is_valid(w, n, g), "lookahead = [", w, ",", n, ",", g,
                        "]: needs W >= 1, N >= 1, G >= 0, and W == 1 and G == 0 if N == 1");
        return lookahead_max_draft_len(w, n, g);
      },
      py::arg("w"), py::arg("n"), py::arg("g"),
      "Draft tokens per step at most: (N == 1 ? 0 : N - 2) + (W - 1 + G) * (N - 1).");
  m.def(
      "check_lookahead_config",
      [](std::int32_t w, std::int32_t n, std::int32_t g, const std::string& what) {
        check_lookahead_config(LookaheadConfig{w, n, g}, what.c_str());
      },
      py::arg("w"), py::arg("n"), py::arg("g"), py::arg("what") = "lookahead",
      "Raises ValueError unless (w, n, g) is valid and needs no more draft tokens than a step "
      "has.");
  m.def(
      "lookahead_bytes",
      [](std::int32_t w, std::int32_t n, std::int32_t g, std::int32_t pool_grams) {
        check_lookahead_config(LookaheadConfig{w, n, g}, "lookahead");
        return lookahead_bytes_required(LookaheadConfig{w, n, g}, pool_grams);
      },
      py::arg("w"), py::arg("n"), py::arg("g"), py::arg("pool_grams"),
      "Bytes of one request's state.");

  py::class_<OwnedLookahead>(m, "Lookahead", "Lookahead decoding of one request.")
      .def(py::init([](std::int32_t w, std::int32_t n, std::int32_t g,
                       const std::vector<TokenId>& prompt, std::uint64_t seed,
                       std::int32_t pool_grams) {
             return std::make_unique<OwnedLookahead>(LookaheadConfig{w, n, g}, prompt, seed,
                                                     pool_grams);
           }),
           py::arg("w"), py::arg("n"), py::arg("g"), py::kw_only(), py::arg("prompt"),
           py::arg("seed") = 0, py::arg("pool_grams") = 4096)
      .def(
          "draft",
          [](OwnedLookahead& self, TokenId golden, std::optional<std::int32_t> window_rows,
             std::optional<std::int32_t> guesses, std::optional<std::int32_t> guess_len,
             std::optional<std::int32_t> max_drafts, std::optional<std::int32_t> max_depth) {
            const DraftTree& tree = self.draft(
                golden, make_budget(window_rows, guesses, guess_len, max_drafts, max_depth));
            return py::make_tuple(copy_ids(tree.tokens, tree.size),
                                  copy_ids(tree.parents, tree.size),
                                  copy_ids(self.state()->origin(), tree.size));
          },
          py::arg("golden"), py::kw_only(), py::arg("window_rows") = py::none(),
          py::arg("guesses") = py::none(), py::arg("guess_len") = py::none(),
          py::arg("max_drafts") = py::none(), py::arg("max_depth") = py::none(),
          R"(The draft tree of the next step: (tokens, parents, origin), int32 [n] each.

origin: bit 0 from the window, bit 1 from a guess, both if merged, 0 for the golden token.
Limits absent: the request's own triple.)")
      .def("update", &OwnedLookahead::update, py::arg("sampled"), py::arg("accepted"),
           "Target's choices per node of the last draft ([] if none), tokens the step decided.")
      .def("pool_entries", &OwnedLookahead::pool_entries, py::arg("key"),
           "The key's n-grams, least recently inserted first.")
      .def_property_readonly("window",
                             [](const OwnedLookahead& self) {
                               LookaheadState* s = self.state();
                               return py::array_t<TokenId>(
                                   {py::ssize_t{s->cfg.w}, py::ssize_t{s->gram_len()}},
                                   s->window());
                             })
      .def_property_readonly("fill",
                             [](const OwnedLookahead& self) {
                               return copy_ids(self.state()->fill(), self.state()->cfg.w);
                             })
      .def_property_readonly("prefill",
                             [](const OwnedLookahead& self) {
                               return copy_ids(self.state()->prefill(),
                                               self.state()->num_prefill());
                             })
      .def_property_readonly("tail",
                             [](const OwnedLookahead& self) {
                               return copy_ids(self.state()->tail(), self.state()->gram_len());
                             })
      .def_property_readonly("emitted_rows",
                             [](const OwnedLookahead& self) { return self.state()->emitted_rows; })
      .def_property_readonly(
          "pool_capacity", [](const OwnedLookahead& self) { return self.state()->pool_entries(); })
      .def_property_readonly("nbytes", &OwnedLookahead::bytes);
}

void register_ngram(py::module_& m) {
  py::class_<OwnedNgramIndex>(m, "NgramIndex",
                              "Where every n-gram of one history occurred first and last.")
      .def(py::init<std::int32_t, std::int32_t>(), py::arg("max_seq_len"), py::arg("max_ngram"))
      .def(
          "extend",
          [](OwnedNgramIndex& self, const Ids& history) {
            const std::int32_t len = checked_len(history, "history");
            SPECDEC_REQUIRE(len <= self.max_seq_len(), "history has ", len,
                            " tokens, max_seq_len is ", self.max_seq_len());
            ngram_extend(SerialTeam{}, self.get(), history.data(), len);
          },
          py::arg("history"),
          "Index a history that continues the one given before; only the new part is read.")
      .def(
          "lookup",
          [](OwnedNgramIndex& self, const Ids& history, std::int32_t max_draft_len, bool keep_all,
             bool use_oldest) {
            const std::int32_t len = checked_len(history, "history");
            const std::int32_t indexed = self.get()->indexed;
            SPECDEC_REQUIRE(len <= self.max_seq_len() && len - 1 <= indexed, "history has ", len,
                            " tokens, of which ", indexed + 1, " were given to extend(): call it");
            SPECDEC_REQUIRE(len - 1 == indexed || len == 0, "history has ", len,
                            " tokens, but extend() has seen ", indexed + 1,
                            ": a history only grows");
            NgramMatch match;
            ngram_lookup(SerialTeam{}, self.get(), history.data(), len,
                         NgramLookup{max_draft_len, keep_all, use_oldest}, &match);
            return py::make_tuple(match.source, match.length, match.match_len);
          },
          py::arg("history"), py::arg("max_draft_len"), py::kw_only(), py::arg("keep_all") = true,
          py::arg("use_oldest") = true,
          R"((source, length, match_len): the draft is history[source : source + length], found by the
last match_len tokens of the history; length 0: no draft.)")
      .def_property_readonly("nbytes", &OwnedNgramIndex::bytes);

  py::class_<NgramBatch>(m, "NgramBatch",
                         "Prompt lookup for several sequences, one call per step for all of them.")
      .def(py::init<std::int32_t, std::int32_t, std::int32_t>(), py::arg("num_sequences"),
           py::arg("max_seq_len"), py::arg("max_ngram"))
      .def(
          "propose",
          [](NgramBatch& self, const ExactIds& tokens, const ExactIds& counts, ExactIds& drafts,
             ExactIds& lengths, bool keep_all, bool use_oldest) {
            const py::ssize_t batch = self.num_sequences();
            SPECDEC_REQUIRE(tokens.ndim() == 2 && tokens.shape(0) == batch && counts.ndim() == 1 &&
                                counts.shape(0) == batch && drafts.ndim() == 2 &&
                                drafts.shape(0) == batch && lengths.ndim() == 1 &&
                                lengths.shape(0) == batch,
                            "expected tokens [B, T], counts [B], drafts [B, K], lengths [B] with "
                            "B = ",
                            batch, " sequences");
            SPECDEC_REQUIRE((tokens.flags() & counts.flags() & drafts.flags() & lengths.flags() &
                             kAligned) != 0,
                            "tokens, counts, drafts and lengths lie at multiples of 4 bytes: one "
                            "of them does not, copy it");
            for (py::ssize_t b = 0; b < batch; ++b) {
              SPECDEC_REQUIRE(counts.data()[b] <= tokens.shape(1), "counts[", b,
                              "] = ", counts.data()[b], ": tokens has ", tokens.shape(1),
                              " columns");
            }
            const NgramLookup how{static_cast<std::int32_t>(drafts.shape(1)), keep_all, use_oldest};
            TokenId* const drafts_out = drafts.mutable_data();
            std::int32_t* const lengths_out = lengths.mutable_data();
            const TokenId* const tokens_in = tokens.data();
            const std::int32_t* const counts_in = counts.data();
            const std::int64_t stride = tokens.shape(1);
            py::gil_scoped_release unlocked;
            self.propose(tokens_in, stride, counts_in, how, drafts_out, lengths_out);
          },
          py::arg("tokens").noconvert(), py::arg("counts").noconvert(),
          py::arg("drafts").noconvert(), py::arg("lengths").noconvert(), py::kw_only(),
          py::arg("keep_all") = true, py::arg("use_oldest") = true,
          R"(Append counts[b] tokens of tokens[b] to every sequence b, then look up all of them.

tokens [B, T], counts [B]: int32, C-contiguous. Writes drafts [B, K] and lengths [B] in place; only
the first lengths[b] entries of drafts[b] are written. Raises ValueError before any change.)")
      .def(
          "clear",
          [](NgramBatch& self, std::int32_t sequence) {
            SPECDEC_REQUIRE(sequence >= 0 && sequence < self.num_sequences(),
                            "sequence = ", sequence, ": there are 0..", self.num_sequences() - 1);
            self.clear(sequence);
          },
          py::arg("sequence"), "Forget a sequence's history.");

  py::class_<SharedNgramPool>(m, "SharedNgramPool",
                              "Prompt lookup across requests that carry the same salt; bounded.")
      .def(py::init(
               [](std::int32_t capacity_tokens, std::int32_t max_ngram, std::int32_t max_salts) {
                 return std::make_unique<SharedNgramPool>(
                     SharedNgramPool::Options{capacity_tokens, max_ngram, max_salts});
               }),
           py::kw_only(), py::arg("capacity_tokens") = 65536, py::arg("max_ngram") = 2,
           py::arg("max_salts") = 8)
      .def(
          "publish",
          [](SharedNgramPool& self, const std::string& salt, const Ids& text, std::int32_t begin,
             std::optional<std::int32_t> end) {
            const std::int32_t len = checked_len(text, "text");
            const std::int32_t to = end.value_or(len);
            SPECDEC_REQUIRE(begin >= 0 && begin <= to && to <= len, "text[", begin, ":", to,
                            "]: text has ", len, " tokens");
            for (std::int32_t i = 0; i < to; ++i) {
              SPECDEC_REQUIRE(text.data()[i] >= 0, "text[", i, "] = ", text.data()[i],
                              ": token ids are not negative");
            }
            self.publish(salt, text.data(), begin, to);
          },
          py::arg("salt"), py::arg("text"), py::arg("begin") = 0, py::arg("end") = py::none(),
          "Add text[begin:end] of one request, with the tokens before `begin` as context.")
      .def(
          "lookup",
          [](SharedNgramPool& self, const std::string& salt, const Ids& history,
             std::int32_t max_draft_len) {
            SPECDEC_REQUIRE(max_draft_len >= 0 && max_draft_len <= kMaxDraftLen,
                            "max_draft_len = ", max_draft_len, ": use 0..", kMaxDraftLen);
            TokenId draft[kMaxStepTokens];
            std::int32_t match_len = 0;
            const std::int32_t length =
                self.lookup(salt, history.data(), checked_len(history, "history"), max_draft_len,
                            draft, &match_len);
            return py::make_tuple(copy_ids(draft, length), match_len);
          },
          py::arg("salt"), py::arg("history"), py::arg("max_draft_len"),
          "(draft, match_len): what followed the most recent occurrence of the longest suffix.")
      .def_property_readonly("num_salts", &SharedNgramPool::num_salts)
      .def_property_readonly("nbytes", &SharedNgramPool::bytes)
      .def_property_readonly("max_nbytes", &SharedNgramPool::max_bytes);
}

}  // namespace

void register_algo(py::module_& m) {
  register_tree(m);
  register_lookahead(m);
  register_ngram(m);
}

}  // namespace specdec
