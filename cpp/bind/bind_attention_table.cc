// The table of attention kernels and what is chosen from it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "backend/attention/pick.h"
#include "backend/attention/table.h"
#include "base/check.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

using attention::AttentionProblem;

DType dtype_named(const std::string& name, const char* argument) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw py::value_error(detail::join(argument, " = \"", name,
                                     "\": there are float32, bfloat16, float16, float8_e4m3fn"));
}

AttentionProblem make_problem(const std::string& dtype, const std::string& kv_dtype, int head_dim,
                              int num_heads, int num_kv_heads, int page_size, int num_requests,
                              int num_rows, int max_rows, int max_kv_len, bool aligned) {
  AttentionProblem problem;
  problem.dtype = dtype_named(dtype, "dtype");
  problem.kv_dtype = dtype_named(kv_dtype, "kv_dtype");
  SPECDEC_REQUIRE(num_kv_heads >= 1 && num_heads >= 1 && num_heads % num_kv_heads == 0,
                  "num_heads = ", num_heads, ": a multiple of num_kv_heads = ", num_kv_heads,
                  " is needed");
  SPECDEC_REQUIRE(num_requests >= 1 && num_rows >= 0 && max_rows >= 0 && max_kv_len >= 0,
                  "num_requests = ", num_requests, ", num_rows = ", num_rows,
                  ", max_rows = ", max_rows, ", max_kv_len = ", max_kv_len,
                  ": at least one request, nothing negative");
  problem.head_dim = head_dim;
  problem.num_heads = num_heads;
  problem.num_kv_heads = num_kv_heads;
  problem.page_size = page_size;
  problem.num_requests = num_requests;
  problem.num_rows = num_rows;
  problem.max_rows = max_rows;
  problem.max_kv_len = max_kv_len;
  problem.aligned = aligned;
  return problem;
}

py::list supported_attention() {
  py::list rows;
  for (const attention::AttentionInstance& instance : attention::instances()) {
    py::dict row;
    row["name"] = instance.name;
    row["family"] = attention::family_name(instance.family);
    row["dtype"] = dtype_name(instance.dtype);
    row["kv_dtype"] = dtype_name(instance.kv_dtype);
    row["math_dtype"] = dtype_name(instance.math_dtype);
    row["head_dim"] = instance.head_dim;
    row["row_tile"] = instance.row_tile;
    row["threads"] = instance.threads;
    row["smem_bytes"] = instance.smem_bytes;
    row["blocks_per_sm"] = instance.blocks_per_sm;
    row["granule"] = instance.granule;
    rows.append(row);
  }
  return rows;
}

py::dict plan_workspace(const std::string& dtype, const std::string& kv_dtype, int head_dim,
                        int num_heads, int num_kv_heads, int page_size, int num_requests,
                        int num_rows, int max_rows, int max_kv_len, bool aligned,
                        const DeviceLimits& limits, const std::optional<std::string>& instance) {
  const AttentionProblem problem =
      make_problem(dtype, kv_dtype, head_dim, num_heads, num_kv_heads, page_size, num_requests,
                   num_rows, max_rows, max_kv_len, aligned);
  const attention::AttentionPlan plan =
      attention::plan_workspace(problem, limits, instance ? instance->c_str() : nullptr);
  py::dict out;
  out["instance"] = plan.instance == nullptr ? "generic" : plan.instance->name;
  out["total_bytes"] = plan.layout.total_bytes;
  out["max_jobs"] = plan.layout.max_jobs;
  out["max_units"] = plan.layout.max_units;
  out["max_slots"] = plan.layout.max_slots;
  out["num_blocks"] = plan.layout.num_blocks;
  out["pass_kv_heads"] = plan.pass_kv_heads;
  out["pass_group"] = plan.pass_group;
  return out;
}

}  // namespace

void register_attention_table(py::module_& m) {
  m.def("supported_attention", &supported_attention, "See specdec_ext.ops.supported_attention.");
  m.def("plan_workspace", &plan_workspace, py::kw_only(), py::arg("dtype"), py::arg("kv_dtype"),
        py::arg("head_dim"), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("page_size"),
        py::arg("num_requests"), py::arg("num_rows"), py::arg("max_rows"), py::arg("max_kv_len"),
        py::arg("aligned"), py::arg("limits"), py::arg("instance"),
        "See specdec_ext.ops.plan_workspace.");
}

}  // namespace specdec
