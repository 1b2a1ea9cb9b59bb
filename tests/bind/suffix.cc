// Suffix decoding by itself, for tests and the benchmark of its cost.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "algo/slot_host.h"
#include "algo/suffix_draft.h"
#include "base/check.h"

namespace py = pybind11;

namespace specdec {
namespace {

// A suffix index with its text and the memory that it lives in.
class OwnedSuffix {
 public:
  explicit OwnedSuffix(std::int32_t max_seq_len) : max_seq_len_(max_seq_len) {
    SPECDEC_REQUIRE(max_seq_len >= 1, "suffix.max_seq_len = ", max_seq_len, ": use 1 or more");
    block_ = std::make_unique_for_overwrite<std::uint64_t[]>((bytes() + 7) / 8);
    suffix_init(SerialTeam{}, state(), max_seq_len);
  }

  std::size_t bytes() const { return suffix_bytes_required(max_seq_len_); }

  void extend(const std::vector<TokenId>& tokens) {
    const auto room = static_cast<std::size_t>(max_seq_len_) - text_.size();
    SPECDEC_REQUIRE(tokens.size() <= room, tokens.size(), " tokens more, there is room for ", room);
    text_.insert(text_.end(), tokens.begin(), tokens.end());
    suffix_extend(SerialTeam{}, state(), text_.data(), len());
  }

  py::tuple draft(std::int32_t max_draft_len, std::int32_t max_tree_depth, std::uint32_t min_prob,
                  std::uint32_t spec_factor, std::int32_t max_depth) {
    const SuffixLookup how{max_draft_len, max_tree_depth, min_prob, spec_factor};
    check_suffix_lookup(how, "suffix");
    SPECDEC_REQUIRE(!text_.empty(), "suffix: there is no text yet");
    DraftTree tree;
    suffix_draft(SerialTeam{}, state(), text_.data(), len(), how, max_draft_len, max_depth, &tree);
    std::vector<std::int32_t> tokens, parents, matches;
    std::vector<std::uint32_t> probs, shares;
    for (std::int32_t i = 1; i < tree.size; ++i) {
      const SuffixNode& node = state()->nodes[i - 1];
      tokens.push_back(tree.tokens[i]);
      parents.push_back(tree.parents[i] - 1);
      probs.push_back(node.prob);
      shares.push_back(node.share);
      matches.push_back(node.match);
    }
    return py::make_tuple(tokens, parents, probs, shares, matches);
  }

  std::int64_t replay(const std::vector<TokenId>& tokens, std::int32_t max_draft_len) {
    const SuffixLookup how{max_draft_len, SuffixLookup{}.max_tree_depth, kSuffixOne / 10, 0};
    SPECDEC_REQUIRE(tokens.size() <= static_cast<std::size_t>(max_seq_len_) - text_.size(),
                    tokens.size(), " tokens do not fit into ", max_seq_len_);
    std::int64_t drafts = 0;
    DraftTree tree;
    text_.reserve(text_.size() + tokens.size());
    for (const TokenId token : tokens) {
      text_.push_back(token);
      suffix_extend(SerialTeam{}, state(), text_.data(), len());
      suffix_draft(SerialTeam{}, state(), text_.data(), len(), how, max_draft_len, kMaxDraftLen,
                   &tree);
      drafts += tree.num_drafts();
    }
    return drafts;
  }

 private:
  SuffixState* state() const { return reinterpret_cast<SuffixState*>(block_.get()); }
  std::int32_t len() const { return static_cast<std::int32_t>(text_.size()); }

  std::int32_t max_seq_len_;
  std::unique_ptr<std::uint64_t[]> block_;
  std::vector<TokenId> text_;
};

}  // namespace

void register_suffix(py::module_& m) {
  py::class_<OwnedSuffix>(m, "SuffixIndex", "Suffix decoding of one text.")
      .def(py::init<std::int32_t>(), py::arg("max_seq_len"))
      .def("extend", &OwnedSuffix::extend, py::arg("tokens"), "Appends tokens to the text.")
      .def(
          "draft", &OwnedSuffix::draft, py::arg("max_draft_len"), py::kw_only(),
          py::arg("max_tree_depth") = 24, py::arg("min_prob") = 0, py::arg("spec_factor") = 0,
          py::arg("max_depth") = kMaxDraftLen,
          R"((tokens, parents, probs, shares, matches) of the drafts behind the text: parents -1 for
its last token; probs and shares of 65536.)")
      .def("replay", &OwnedSuffix::replay, py::arg("tokens"), py::arg("max_draft_len"),
           py::call_guard<py::gil_scoped_release>(),
           "Appends the tokens one by one and drafts after each; returns the number of drafts.")
      .def_property_readonly("nbytes", &OwnedSuffix::bytes);
}

}  // namespace specdec
