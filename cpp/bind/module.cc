// specdec_ext._core: a list of registers, nothing else.
#include <pybind11/pybind11.h>

#include "bind/registers.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, m) {
  m.doc() = "Compiled core of specdec_ext. Use the specdec_ext package; this module is its engine.";
  m.attr("__version__") = SPECDEC_VERSION;
  specdec::register_limits(m);
  specdec::register_plan(m);  // first: its StepPlan is in the signatures of others
  specdec::register_backends(m);
  specdec::register_ops(m);
  specdec::register_rows(m);
  specdec::register_kv(m);
  specdec::register_attention(m);
  specdec::register_attention_table(m);
  specdec::register_linear(m);
  specdec::register_decoder(m);
  specdec::register_shared_counters(m);
  specdec::register_packed_decoder(m);
  specdec::register_sharded_step(m);
  specdec::register_slots(m);
  specdec::register_proposed_drafts(m);
  specdec::register_beam_ops(m);
  specdec::register_staging(m);
  specdec::register_page_pools(m);
  specdec::register_step_output(m);
  specdec::register_executor(m);  // after plans, slots and staging, whose types it returns
  specdec::register_growth_ops(m);
  specdec::register_draft_passes(m);
  specdec::register_fill_step_plan(m);
  specdec::register_recurrent_drafter(m);
  specdec::register_beam_drafter(m);
  specdec::register_eagle_head(m);
  specdec::register_medusa_drafter(m);
  specdec::register_accept(m);
  specdec::register_synthetic(m);
  specdec::register_text_array(m);
  specdec::register_host_arrays(m);
  specdec::register_memory(m);
  specdec::register_step_cost(m);
}
