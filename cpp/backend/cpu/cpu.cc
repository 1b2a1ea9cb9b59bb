// The CPU's row of the backend table.
#include "backend/backend.h"
#include "backend/cpu/attention/cpu_attention.h"
#include "backend/cpu/decoder/row_kernels.h"
#include "backend/cpu/linear/linear_op.h"
#include "backend/cpu/step/accept_ops.h"
#include "backend/cpu/step/step_ops.h"

namespace specdec {

const Backend& cpu_backend() {
  static const Backend backend = [] {
    Backend b;
    b.layout = kBackendLayout;
    b.name = "cpu";
    b.memory = DeviceType::kCpu;
    b.reads_values_on_host = true;
    b.append_kv = cpu::append_kv;
    b.rope_append_kv = cpu::rope_append_kv;
    b.spec_attention = cpu::spec_attention;
    b.compact_kv = cpu::compact_kv;
    b.build_step = cpu::build_step;
    b.pack_mask = cpu::pack_mask;
    b.argmax = cpu::argmax;
    b.rms_norm = cpu::rms_norm;
    b.gated_activation = cpu::gated_activation;
    b.linear = cpu::linear;
    b.draft_step = cpu::draft_step;
    b.commit_step = cpu::commit_step;
    b.propose_drafts = cpu::propose_drafts;
    b.recent_tokens = cpu::recent_tokens;
    b.keep_hidden = cpu::keep_hidden;
    b.grow_beams = cpu::grow_beams;
    b.merge_beams = cpu::merge_beams;
    b.grow_drafts = cpu::grow_drafts;
    b.pack_drafts = cpu::pack_drafts;
    b.propose_growths = cpu::propose_growths;
    b.sample_rows = cpu::sample_rows;
    b.accept_step = cpu::accept_step;
    b.synthetic_step = cpu::synthetic_step;
    return b;
  }();
  return backend;
}

}  // namespace specdec
