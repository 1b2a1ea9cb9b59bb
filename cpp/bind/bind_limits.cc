// What Python reads from C++: limits, defaults and names that stand once; random numbers.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "algo/accept_rules.h"
#include "algo/beam_search_host.h"
#include "base/check.h"
#include "base/pages.h"
#include "base/philox.h"
#include "base/types.h"
#include "bind/dlpack_convert.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

RandomPurpose parse_purpose(const std::string& name) {
  if (name == "token") return RandomPurpose::kToken;
  if (name == "accept") return RandomPurpose::kAccept;
  SPECDEC_REQUIRE(name == "draft", "purpose = '", name, "': give 'token', 'accept' or 'draft'");
  return RandomPurpose::kDraft;
}

DType kv_dtype_named(const std::string& name) {
  const DType dtype = dtype_named(name);
  SPECDEC_REQUIRE(is_kv_dtype(dtype), "dtype = '", name, "': pages of K/V hold float32, float16, ",
                  "bfloat16, float8_e4m3fn or int8");
  return dtype;
}

}  // namespace

void register_limits(py::module_& m) {
  m.attr("MAX_STEP_TOKENS") = kMaxStepTokens;
  m.attr("MASK_WORDS") = kMaskWords;
  m.attr("BEAM_SCORES") = BeamSearch::kKept;
  m.def(
      "kv_row_width",
      [](const std::string& dtype, int head_dim) {
        return kv_row_width(kv_dtype_named(dtype), head_dim);
      },
      py::arg("dtype"), py::arg("head_dim"),
      "The last axis of K/V pages of this dtype, in elements: an int8 vector is followed by its "
      "scale, float32.");
  m.def(
      "kv_row_bytes",
      [](const std::string& dtype, int head_dim) {
        return kv_row_bytes(kv_dtype_named(dtype), head_dim);
      },
      py::arg("dtype"), py::arg("head_dim"),
      "Bytes that a token's K (or V) of one head takes in pages of this dtype.");
  m.def(
      "acceptance_rules",
      [] {
        py::typing::Dict<py::str, py::bool_> rules;
        for (const AcceptanceRuleName& rule : kAcceptanceRules) {
          rules[rule.name] = py::bool_(rule.lossless);
        }
        return rules;
      },
      "{name: whether it is lossless} of each acceptance rule, in the order of their numbers.");
  m.def(
      "random_uniform",
      [](std::uint64_t seed, std::uint64_t position, const std::string& purpose,
         std::uint32_t draw) {
        return philox_uniform(seed, position, parse_purpose(purpose), draw);
      },
      py::arg("seed"), py::arg("position"), py::arg("purpose"), py::arg("draw") = 0,
      "A number in [0, 1) of the counter generator. purpose: 'token' decides the token at an "
      "absolute position, 'accept' whether sibling number `draw` at it is kept, 'draft' is for "
      "drafters that draw their drafts.");
}

}  // namespace specdec
