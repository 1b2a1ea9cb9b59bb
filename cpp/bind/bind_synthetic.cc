// Synthetic acceptance of a step whose choices are known.
#include <pybind11/pybind11.h>

#include <utility>

#include "base/check.h"
#include "bind/decided_argument.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

// cu_logits [B + 1]; tokens, parents, positions [R]; seed [B].
struct SyntheticTensors {
  py::handle cu_logits, positions, tokens, parents, seed, rates;
};

void synthetic_step(const SyntheticTensors& given, std::int64_t vocab,
                    const DecidedTensors& results, const CallOptions& where) {
  OpCall call("synthetic_step", where);
  const BorrowedTensor firsts(given.cu_logits, "cu_logits"), nodes(given.tokens, "tokens");
  check_shape(firsts.view(), "cu_logits", "[B + 1]", {kAny});
  check_shape(nodes.view(), "tokens", "[R]", {kAny});
  SPECDEC_REQUIRE(firsts->shape[0] >= 1 && firsts->shape[0] <= 65536, "cu_logits has ",
                  firsts->shape[0], " entries: one more than requests, of which 65535 are served");
  SPECDEC_REQUIRE(vocab >= 1 && vocab <= INT32_MAX, "vocab_size = ", vocab, ": give 1..",
                  INT32_MAX);
  const std::int64_t requests = firsts->shape[0] - 1, rows = nodes->shape[0];
  SPECDEC_REQUIRE(rows <= INT32_MAX, "tokens has ", rows, " rows");
  const auto of_rows = [&](py::handle tensor, const char* name) {
    return vector_argument(call, tensor, name, DType::kI32, "[R]", rows);
  };
  const BorrowedTensor cu_logits =
      vector_argument(call, given.cu_logits, "cu_logits", DType::kI32, "[B + 1]", requests + 1);
  const BorrowedTensor positions = of_rows(given.positions, "positions"),
                       tokens = of_rows(given.tokens, "tokens"),
                       parents = of_rows(given.parents, "parents");
  const BorrowedTensor seed =
      vector_argument(call, given.seed, "seed", DType::kI64, "[B]", requests);
  SyntheticStepParams p;
  const BorrowedTensor rates = rates_argument(call, given.rates, &p.rates);
  const DecidedArgument accepted(call, results, rows, requests, &p);
  p.rows = static_cast<std::int32_t>(rows);
  p.vocab = static_cast<std::int32_t>(vocab);
  p.num_requests = static_cast<std::int32_t>(requests);
  p.cu_logits = static_cast<const std::int32_t*>(cu_logits->data);
  p.positions = static_cast<const std::int32_t*>(positions->data);
  p.tokens = static_cast<const TokenId*>(tokens->data);
  p.parents = static_cast<const std::int32_t*>(parents->data);
  p.seed = static_cast<const std::uint64_t*>(seed->data);
  if (call.reads_values()) {
    SPECDEC_REQUIRE(p.cu_logits[0] == 0, "cu_logits[0] = ", p.cu_logits[0], ": it begins with 0");
    for (std::int32_t b = 0; b < p.num_requests; ++b) {
      SPECDEC_REQUIRE(has_rows(p.cu_logits, p.rows, b), "cu_logits[", b + 1,
                      "] = ", p.cu_logits[b + 1], ": it never decreases and ends within the ",
                      p.rows, " rows of tokens");
    }
  }
  p.exec = call.context(requests, 0, 0);
  call.run(&Backend::synthetic_step, p);
}

}  // namespace

void register_synthetic(py::module_& m) {
  m.def(
      "synthetic_step",
      [](py::handle cu_logits, py::handle positions, py::handle tokens, py::handle parents,
         py::handle seed, py::handle synthetic_rates, std::int64_t vocab_size, py::handle sampled,
         py::handle path, py::handle path_len, py::handle emitted, py::handle num_emitted,
         py::object backend, std::uint64_t stream, py::object status) {
        const CallOptions where{std::move(backend), stream, py::none(), std::move(status)};
        synthetic_step({cu_logits, positions, tokens, parents, seed, synthetic_rates}, vocab_size,
                       {sampled, path, path_len, emitted, num_emitted}, where);
      },
      py::arg("cu_logits"), py::arg("positions"), py::arg("tokens"), py::arg("parents"),
      py::arg("seed"), py::arg("synthetic_rates"), py::kw_only(), py::arg("vocab_size"),
      py::arg("sampled"), py::arg("path"), py::arg("path_len"), py::arg("emitted"),
      py::arg("num_emitted"), py::arg("backend") = py::none(), py::arg("stream") = 0,
      py::arg("status") = py::none(), "See specdec_ext.ops.synthetic_step.");
}

}  // namespace specdec
