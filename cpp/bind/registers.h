// One register function per bind_*.cc.
#pragma once

#include <pybind11/pybind11.h>

namespace specdec {

void register_limits(pybind11::module_& m);
void register_backends(pybind11::module_& m);
void register_ops(pybind11::module_& m);
void register_rows(pybind11::module_& m);
void register_kv(pybind11::module_& m);
void register_attention(pybind11::module_& m);
void register_attention_table(pybind11::module_& m);
void register_plan(pybind11::module_& m);
void register_step_output(pybind11::module_& m);
void register_executor(pybind11::module_& m);
void register_draft_passes(pybind11::module_& m);
void register_growth_ops(pybind11::module_& m);
void register_linear(pybind11::module_& m);
void register_decoder(pybind11::module_& m);
void register_shared_counters(pybind11::module_& m);
void register_packed_decoder(pybind11::module_& m);
void register_sharded_step(pybind11::module_& m);
void register_slots(pybind11::module_& m);
void register_proposed_drafts(pybind11::module_& m);
void register_beam_ops(pybind11::module_& m);
void register_staging(pybind11::module_& m);
void register_fill_step_plan(pybind11::module_& m);
void register_recurrent_drafter(pybind11::module_& m);
void register_beam_drafter(pybind11::module_& m);
void register_eagle_head(pybind11::module_& m);
void register_medusa_drafter(pybind11::module_& m);
void register_accept(pybind11::module_& m);
void register_synthetic(pybind11::module_& m);
void register_text_array(pybind11::module_& m);
void register_host_arrays(pybind11::module_& m);
void register_memory(pybind11::module_& m);
void register_step_cost(pybind11::module_& m);
void register_page_pools(pybind11::module_& m);

}  // namespace specdec
