// What operations that accept drafts write, and the rates of synthetic acceptance.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "algo/synthetic_acceptance.h"
#include "base/types.h"
#include "bind/op_arguments.h"

namespace specdec {

// What Python gives as AcceptResults.
struct DecidedTensors {
  pybind11::handle sampled, path, path_len, emitted, num_emitted;
};

// sampled [R], path and emitted [B, 128], path_len and num_emitted [B]; kept alive.
class DecidedArgument {
 public:
  // Params: of accept_step or synthetic_step.
  template <class Params>
  DecidedArgument(OpCall& call, const DecidedTensors& given, std::int64_t rows,
                  std::int64_t requests, Params* p)
      : sampled_(vector_argument(call, given.sampled, "sampled", DType::kI32, "[R]", rows, true)),
        path_(table(call, given.path, "path", requests)),
        emitted_(table(call, given.emitted, "emitted", requests)),
        path_len_(
            vector_argument(call, given.path_len, "path_len", DType::kI32, "[B]", requests, true)),
        num_emitted_(vector_argument(call, given.num_emitted, "num_emitted", DType::kI32, "[B]",
                                     requests, true)) {
    p->sampled = static_cast<TokenId*>(sampled_->data);
    p->path = static_cast<std::int32_t*>(path_->data);
    p->path_len = static_cast<std::int32_t*>(path_len_->data);
    p->emitted = static_cast<TokenId*>(emitted_->data);
    p->num_emitted = static_cast<std::int32_t*>(num_emitted_->data);
  }

 private:
  static BorrowedTensor table(OpCall& call, pybind11::handle tensor, const char* name,
                              std::int64_t requests) {
    return tensor_argument(call, tensor, name, "[B, 128]", DType::kI32, {requests, kMaxStepTokens},
                           true);
  }

  BorrowedTensor sampled_, path_, emitted_, path_len_, num_emitted_;
};

// [N] float64, which come as the int64 of their bits. Values are checked where they can be read.
BorrowedTensor rates_argument(OpCall& call, pybind11::handle rates, SyntheticRates* to);

}  // namespace specdec
