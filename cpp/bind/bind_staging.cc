// The layouts of what an executor stages for a step.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "bind/registers.h"
#include "engine/staging.h"

namespace py = pybind11;

namespace specdec {

void register_staging(py::module_& m) {
  py::class_<StagingLayout>(m, "StagingLayout",
                            "Offsets, in int32 words, of the parts of one place of the staging "
                            "ring (cpp/engine/staging.h).")
      .def_readonly("requests", &StagingLayout::requests)
      .def_readonly("rows", &StagingLayout::rows)
      .def_readonly("pages_per_request", &StagingLayout::pages_per_request)
      .def_readonly("slot_ids", &StagingLayout::slot_ids)
      .def_readonly("commit_ids", &StagingLayout::commit_ids)
      .def_readonly("max_drafts", &StagingLayout::max_drafts)
      .def_readonly("window_rows", &StagingLayout::window_rows)
      .def_readonly("guesses", &StagingLayout::guesses)
      .def_readonly("kv_len", &StagingLayout::kv_len)
      .def_readonly("cu_rows", &StagingLayout::cu_rows)
      .def_readonly("cu_logits", &StagingLayout::cu_logits)
      .def_readonly("temperature", &StagingLayout::temperature)
      .def_readonly("top_p", &StagingLayout::top_p)
      .def_readonly("min_p", &StagingLayout::min_p)
      .def_readonly("top_k", &StagingLayout::top_k)
      .def_readonly("seed", &StagingLayout::seed)
      .def_readonly("acceptance", &StagingLayout::acceptance)
      .def_readonly("posterior_threshold", &StagingLayout::posterior_threshold)
      .def_readonly("posterior_alpha", &StagingLayout::posterior_alpha)
      .def_readonly("acceptance_threshold", &StagingLayout::acceptance_threshold)
      .def_readonly("page_table", &StagingLayout::page_table)
      .def_readonly("narrow", &StagingLayout::narrow, "Windows with tables of their own.")
      .def_readonly("narrow_tables", &StagingLayout::narrow_tables)
      .def_readonly("logit_rows", &StagingLayout::logit_rows)
      .def_readonly("prompt_tokens", &StagingLayout::prompt_tokens)
      .def_readonly("prompt_parents", &StagingLayout::prompt_parents)
      .def_readonly("choice_parents", &StagingLayout::choice_parents)
      .def_readonly("move_kv_len", &StagingLayout::move_kv_len)
      .def_readonly("move_cu_rows", &StagingLayout::move_cu_rows)
      .def_readonly("move_path", &StagingLayout::move_path)
      .def_readonly("move_path_len", &StagingLayout::move_path_len)
      .def_readonly("words", &StagingLayout::words);
  py::class_<SlotEntry>(m, "SlotEntry", "The start of a slot, within the ring of entries.")
      .def_readonly("slot", &SlotEntry::slot)
      .def_readonly("request_id", &SlotEntry::request)
      .def_readonly("offset", &SlotEntry::offset)
      .def_readonly("bytes", &SlotEntry::bytes)
      .def_readonly("at", &SlotEntry::at, "Where in the slot.")
      .def_readonly("enters", &SlotEntry::enters, "False: the slot is the request's already.");
  py::class_<StagedChoices>(m, "StagedChoices", "Rows of scores that the host reads.")
      .def_readonly("first", &StagedChoices::first, "Among the step's choices.")
      .def_readonly("count", &StagedChoices::count)
      .def_readonly("slot", &StagedChoices::slot, "Whose drafter goes on from them; -1: nobody's.");
  py::class_<StagedTree>(m, "StagedTree", "A tree of the device's that the host decides on.")
      .def_readonly("decode", &StagedTree::decode, "Among the step's decoding requests.")
      .def_readonly("rows", &StagedTree::rows, "At most.")
      .def_readonly("slot", &StagedTree::slot);
  py::class_<StagedStep>(m, "StagedStep", "What the host knows of a step that it enqueues.")
      .def_readonly("index", &StagedStep::index)
      .def_readonly("ring", &StagedStep::ring, "Its place in the rings.")
      .def_readonly("num_prompts", &StagedStep::num_prompts)
      .def_readonly("num_decodes", &StagedStep::num_decodes)
      .def_readonly("num_prompt_rows", &StagedStep::num_prompt_rows)
      .def_readonly("num_prompt_logits", &StagedStep::num_prompt_logits)
      .def_readonly("max_decode_rows", &StagedStep::max_decode_rows,
                    "Rows of all decoding requests, an upper bound.")
      .def_readonly("most_asked", &StagedStep::most_asked,
                    "Drafts of any one request that its drafter is to make.")
      .def_readonly("max_rows", &StagedStep::max_rows, "Of any one request, an upper bound.")
      .def_readonly("max_kv_len", &StagedStep::max_kv_len,
                    "Tokens and rows of any one request, an upper bound.")
      .def_readonly("second_worth", &StagedStep::second_worth,
                    "Tokens that a second of drafting has to bring; 0: any.")
      .def_readonly("needs_scores", &StagedStep::needs_scores,
                    "Somebody samples: the model's best tokens are not enough.")
      .def_readonly("host_choices", &StagedStep::host_choices,
                    "Of requests whose rows the host knows; their scores come first in the ring.")
      .def_readonly("host_trees", &StagedStep::host_trees, "Their scores follow.")
      .def_readonly("kept_rows", &StagedStep::kept_rows,
                    "(slot, row of its part of the last step) that a drafter goes on from.")
      .def_readonly("moves", &StagedStep::moves, "K/V is to be moved before the step.")
      .def_readonly("entries", &StagedStep::entries)
      .def_property_readonly(
          "page_orders",
          [](const StagedStep& step) {
            std::vector<std::tuple<bool, std::int32_t, std::int32_t, std::vector<std::int32_t>>>
                copies;
            for (const PageOrder& copy : step.page_orders) {
              copies.emplace_back(copy.to_host, copy.page, copy.host_page, copy.parts);
            }
            return copies;
          },
          "Copies to be made before everything else, in this order: (to the host's pool or from "
          "there, page, page of the host's pool, the page's parts by narrow window, -1: none).");
}

}  // namespace specdec
