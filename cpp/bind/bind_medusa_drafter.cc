// _core.MedusaHeads and _core.MedusaDrafter: heads over packed linear layers, and their trees for
// the requests of a step.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "algo/guess_tree.h"
#include "backend/cpu/drafter/medusa_drafter.h"
#include "backend/cpu/drafter/medusa_heads.h"
#include "base/check.h"
#include "bind/array_argument.h"
#include "bind/drafter_arguments.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

using cpu::MedusaDrafter;
using cpu::MedusaHeads;
using Choices = std::vector<std::vector<std::int32_t>>;
using Rates = ArrayArgument<double>;

constexpr std::int64_t kMaxHeadWidth = 1 << 24;
constexpr std::int32_t kMaxMedusaHeads = 64, kMaxMedusaRequests = 1 << 20;

// The heads and the Python objects that their layers live in.
struct MedusaHeadsObject {
  std::vector<py::object> kept;
  std::unique_ptr<MedusaHeads> heads;
};

// Python keeps the heads that it asks. What is measured is read by threads that do not step.
struct MedusaDrafterObject {
  std::int64_t hidden_size;
  std::unique_ptr<MedusaDrafter> drafter;
  std::mutex mutex;
};

const cpu::PackedLinear* keep(MedusaHeadsObject* self, py::handle layer, const char* name) {
  self->kept.push_back(py::reinterpret_borrow<py::object>(layer));
  return layer_argument(layer, name);
}

std::unique_ptr<MedusaHeadsObject> make_medusa_heads(
    std::int64_t hidden_size, std::int32_t num_heads, std::int64_t num_scores,
    const py::object& first, const std::vector<std::vector<py::object>>& deeper,
    const std::vector<py::object>& lm_heads, const py::object& target,
    const py::object& token_ids) {
  SPECDEC_REQUIRE(hidden_size >= 1 && hidden_size <= kMaxHeadWidth && num_scores >= 1 &&
                      num_scores <= kMaxHeadWidth && num_heads >= 1 && num_heads <= kMaxMedusaHeads,
                  "hidden_size = ", hidden_size, ", num_scores = ", num_scores, ": give 1..",
                  kMaxHeadWidth, " of each; num_heads = ", num_heads, ": give 1..",
                  kMaxMedusaHeads);
  auto self = std::make_unique<MedusaHeadsObject>();
  cpu::MedusaLayers layers;
  if (!first.is_none()) layers.first = keep(self.get(), first, "first");
  for (const std::vector<py::object>& head : deeper) {
    layers.deeper.emplace_back();
    for (const py::object& layer : head) {
      layers.deeper.back().push_back(keep(self.get(), layer, "deeper"));
    }
  }
  for (const py::object& layer : lm_heads) {
    layers.lm_heads.push_back(keep(self.get(), layer, "lm_heads"));
  }
  MedusaHeads::ScoreRows scores;
  if (!target.is_none()) {
    self->kept.push_back(target);
    scores = target_scores(target_argument(target), hidden_size, num_scores);
  }
  self->heads =
      std::make_unique<MedusaHeads>(hidden_size, num_heads, num_scores, std::move(layers),
                                    std::move(scores), token_ids_argument(token_ids, num_scores));
  return self;
}

// hidden float32 [B, H] row by row.
std::vector<const float*> hidden_rows(const BorrowedTensor& hidden, const MedusaHeads& heads,
                                      std::int32_t num_heads) {
  check_cpu(hidden.view(), "hidden");
  check_contiguous(hidden.view(), "hidden");
  check_dtype(hidden.view(), "hidden", {DType::kF32});
  check_shape(hidden.view(), "hidden", "[B, H]", {kAny, heads.hidden_size()});
  SPECDEC_REQUIRE(hidden->shape[0] >= 1, "hidden has no rows");
  SPECDEC_REQUIRE(num_heads >= 1 && num_heads <= heads.num_heads(), "num_heads = ", num_heads,
                  ": give 1..", heads.num_heads());
  std::vector<const float*> rows;
  for (std::int64_t r = 0; r < hidden->shape[0]; ++r) {
    rows.push_back(static_cast<const float*>(hidden->data) + r * heads.hidden_size());
  }
  return rows;
}

py::array_t<float> scores_of(MedusaHeadsObject& self, py::handle given, std::int32_t num_heads) {
  const BorrowedTensor hidden(given, "hidden");
  MedusaHeads& heads = *self.heads;
  const std::vector<const float*> rows = hidden_rows(hidden, heads, num_heads);
  return py::array_t<float>({std::int64_t{num_heads}, hidden->shape[0], heads.num_scores()},
                            heads.scores(rows, num_heads));
}

py::array_t<std::int32_t> best_of(MedusaHeadsObject& self, py::handle given, std::int32_t num_heads,
                                  std::int32_t top_k) {
  const BorrowedTensor hidden(given, "hidden");
  MedusaHeads& heads = *self.heads;
  const std::vector<const float*> rows = hidden_rows(hidden, heads, num_heads);
  SPECDEC_REQUIRE(top_k >= 1 && top_k <= kMaxTopScores && top_k <= heads.num_scores(),
                  "top_k = ", top_k, ": give 1..", kMaxTopScores,
                  ", at most num_scores = ", heads.num_scores());
  py::array_t<std::int32_t> ids({hidden->shape[0], std::int64_t{num_heads}, std::int64_t{top_k}});
  std::int32_t* const to = ids.mutable_data();
  const py::gil_scoped_release release;
  heads.best(rows, num_heads, top_k, to);
  return ids;
}

std::vector<double> values_of(const Rates& rates) {
  SPECDEC_REQUIRE(rates.ndim() == 2 && rates.size() > 0, "rates: give [heads, ranks]");
  for (py::ssize_t i = 0; i < rates.size(); ++i) {
    SPECDEC_REQUIRE(rates.data()[i] >= 0.0 && rates.data()[i] <= 1.0, "rates: ", rates.data()[i],
                    " is no rate: give 0..1");
  }
  return {rates.data(), rates.data() + rates.size()};
}

std::unique_ptr<MedusaDrafterObject> make_medusa_drafter(MedusaHeadsObject& heads,
                                                         const Rates& rates,
                                                         std::int32_t max_requests,
                                                         std::int32_t vocab_size) {
  auto* const network = heads.heads.get();
  std::vector<double> prior = values_of(rates);
  SPECDEC_REQUIRE(rates.shape(0) == network->num_heads() && rates.shape(1) <= kMaxTopScores,
                  "rates are of ", rates.shape(0), " heads and ", rates.shape(1),
                  " ranks, expected ", network->num_heads(), " and up to ", kMaxTopScores);
  SPECDEC_REQUIRE(max_requests >= 1 && max_requests <= kMaxMedusaRequests && vocab_size >= 1,
                  "max_requests = ", max_requests, ", vocab_size = ", vocab_size, ": give 1..",
                  kMaxMedusaRequests, " and at least 1");
  auto self = std::make_unique<MedusaDrafterObject>();
  self->hidden_size = network->hidden_size();
  self->drafter = std::make_unique<MedusaDrafter>(network, std::move(prior),
                                                  static_cast<std::int32_t>(rates.shape(1)),
                                                  max_requests, vocab_size);
  return self;
}

void draft_guesses(MedusaDrafterObject& self, const SlotLayout& layout, py::handle slots,
                   py::handle slot_ids, py::handle max_drafts, py::handle hidden) {
  const SlotRequestsArgument step("MedusaDrafter.draft", layout, slots, slot_ids, max_drafts,
                                  hidden, self.hidden_size);
  const py::gil_scoped_release release;
  const std::scoped_lock lock(self.mutex);
  self.drafter->draft(step.view());
}

py::dict stats_of(MedusaDrafterObject& self) {
  cpu::MedusaStats stats;
  {
    const py::gil_scoped_release release;
    const std::scoped_lock lock(self.mutex);
    stats = self.drafter->stats();
  }
  py::dict result;
  result["steps"] = stats.steps;
  result["proposals"] = stats.proposals;
  result["nodes"] = stats.nodes;
  result["idle"] = stats.idle;
  result["head_seconds"] = stats.head_seconds;
  result["head_thread_seconds"] = stats.head_thread_seconds;
  return result;
}

std::pair<std::vector<std::vector<double>>, std::vector<double>> measured_of(
    MedusaDrafterObject& self) {
  const py::gil_scoped_release release;
  const std::scoped_lock lock(self.mutex);
  const GuessRates& measured = self.drafter->measured();
  std::vector<std::vector<double>> rates;
  std::vector<double> trials;
  for (std::int32_t head = 0; head < measured.num_heads(); ++head) {
    rates.emplace_back();
    for (std::int32_t rank = 0; rank < self.drafter->seen_ranks(); ++rank) {
      rates.back().push_back(measured.rate(head, rank));
    }
    trials.push_back(measured.trials(head));
  }
  return {rates, trials};
}

template <typename T, typename Get>
py::array_t<T> column(const std::vector<GuessNode>& nodes, Get get) {
  py::array_t<T> values(static_cast<py::ssize_t>(nodes.size()));
  for (std::size_t i = 0; i < nodes.size(); ++i) values.mutable_data()[i] = get(nodes[i]);
  return values;
}

py::tuple guess_tree(const Choices& choices, const Rates& rates, bool likeliest) {
  const std::vector<double> prior = values_of(rates);
  const auto heads = static_cast<std::int32_t>(rates.shape(0));
  const auto ranks = static_cast<std::int32_t>(rates.shape(1));
  std::vector<GuessNode> nodes = guess_nodes(choices, heads, ranks);
  const GuessRates known(heads, ranks, prior.data(), 1.0, 1.0);
  std::vector<double> worth = guess_worth(nodes, known);
  if (likeliest) nodes = likeliest_first(nodes, &worth);
  return py::make_tuple(
      column<std::int32_t>(nodes, [](const GuessNode& node) { return node.head; }),
      column<std::int32_t>(nodes, [](const GuessNode& node) { return node.rank; }),
      column<std::int32_t>(nodes, [](const GuessNode& node) { return node.parent; }),
      py::array_t<double>(static_cast<py::ssize_t>(worth.size()), worth.data()));
}

constexpr const char* kHeadsDoc = R"(Medusa heads over packed linear layers.

Layers are PackedLinear: ``first`` [num_heads * H, H], the first residual layers of all heads, or None;
``deeper``, a list of [H, H] for each head; ``lm_heads`` [num_scores, H], one of each head, one for
all, or none: then ``target``, the target's LlamaDecoder, gives its head. ``token_ids`` int32
[num_scores]: the token of each score, None: the same number. Raises ValueError naming the layer that
does not fit.)";

constexpr const char* kDraftGuessesDoc =
    R"(Ask the heads for a step's requests and put their trees into the slots.

layout, slots  of the pool, uint8 [num_slots, slot_bytes]
slot_ids       int32 [B], -1: nobody
max_drafts     int32 [B] drafts of this step, 0: none
hidden         float32 [num_slots, H]: the head's input that each slot's last token was chosen from

Guesses of earlier steps are held against the texts. Releases the GIL.)";

}  // namespace

void register_medusa_drafter(py::module_& m) {
  m.def(
      "guess_tree", &guess_tree, py::arg("choices"), py::arg("rates"), py::arg("likeliest"),
      "(heads, ranks, parents, worth) of the nodes of Medusa choices, int32 and float64 [n]: what "
      "rank of which head each is, its parent (-1: the golden token), and the probability that it "
      "is accepted by ``rates`` float64 [heads, ranks]. ``likeliest``: those that are worth most "
      "first, else in their own order.");
  py::class_<MedusaHeadsObject>(m, "MedusaHeads", kHeadsDoc)
      .def(py::init(&make_medusa_heads), py::kw_only(), py::arg("hidden_size"),
           py::arg("num_heads"), py::arg("num_scores"), py::arg("first"), py::arg("deeper"),
           py::arg("lm_heads"), py::arg("target") = py::none(), py::arg("token_ids") = py::none())
      .def("scores", &scores_of, py::arg("hidden"), py::arg("num_heads"),
           "float32 [num_heads, B, num_scores] of the first heads, for float32 hidden [B, H].")
      .def("best", &best_of, py::arg("hidden"), py::arg("num_heads"), py::arg("top_k"),
           "Token ids int32 [B, num_heads, top_k] of the best guesses, best first; -1 after the "
           "last, and for a row of scores with NaN or +infinity.");
  py::class_<MedusaDrafterObject>(m, "MedusaDrafter",
                                  "Drafts a MedusaHeads' trees for the requests of a step.")
      .def(py::init(&make_medusa_drafter), py::keep_alive<1, 2>(), py::arg("heads"), py::kw_only(),
           py::arg("rates"), py::arg("max_requests"), py::arg("vocab_size"),
           "``rates`` float64 [heads, ranks]: how often each guess is right, to start from.")
      .def(
          "enter",
          [](MedusaDrafterObject& self, std::int32_t slot, const Choices& choices, bool adaptive) {
            const std::scoped_lock lock(self.mutex);
            self.drafter->enter(slot, choices, adaptive);
          },
          py::arg("slot"), py::arg("choices"), py::arg("adaptive"),
          "A request takes a slot; no choices: it wants no drafts. An adaptive one drafts the "
          "likeliest nodes first, any other its choices in their order.")
      .def("draft", &draft_guesses, py::arg("layout"), py::arg("slots"), py::arg("slot_ids"),
           py::arg("max_drafts"), py::arg("hidden"), kDraftGuessesDoc)
      .def("stats", &stats_of,
           "Counts: steps that asked the heads, proposals and their nodes, idle requests of steps; "
           "head_seconds, head_thread_seconds.")
      .def("measured", &measured_of,
           "(how often each head's guess of each rank was right, over all steps so far [heads] "
           "[ranks], observations of each head)");
}

}  // namespace specdec
