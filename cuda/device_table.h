// The table of device operations, for the CUDA runtime and for its emulation alike: both run the
// same host code, so what chooses and launches kernels on a GPU is what the tests exercise.
#pragma once

#include "accept/accept.h"
#include "attention/dispatch.h"
#include "backend/backend.h"
#include "decoder/decoder.h"
#include "kv/kv.h"
#include "linear/e4m3_rows.h"
#include "linear/linear.h"
#include "linear/unpack.h"
#include "step/step.h"

namespace specdec::cuda {

template <class Device, auto kOperation, class Params>
void run_on(const Params& params) {
  const Device device(params.exec.device);
  kOperation(params);
}

template <class Device>
void run_attention_on(const SpecAttentionParams& params) {
  const Device device(params.exec.device);
  spec_attention(params, Device::limits(params.exec.device));
}

template <class Device>
void run_linear_on(const LinearParams& params) {
  const Device device(params.exec.device);
  linear(params, Device::limits(params.exec.device));
}

// Device: Device(int index) makes that device the calling thread's until it is destroyed;
// Device::limits(int index) tells its properties. The caller adds the name, where tensors lie, and
// hooks.
template <class Device>
Backend device_table() {
  Backend table;
  table.layout = kBackendLayout;
  table.reads_values_on_host = false;
  table.append_kv = run_on<Device, append_kv, AppendKvParams>;
  table.rope_append_kv = run_on<Device, rope_append_kv, RopeAppendKvParams>;
  table.spec_attention = run_attention_on<Device>;
  table.compact_kv = run_on<Device, compact_kv, CompactKvParams>;
  table.build_step = run_on<Device, build_step, BuildStepParams>;
  table.pack_mask = run_on<Device, pack_mask, PackMaskParams>;
  table.argmax = run_on<Device, argmax, ArgmaxParams>;
  table.rms_norm = run_on<Device, rms_norm, RmsNormParams>;
  table.gated_activation = run_on<Device, gated_activation, GatedActivationParams>;
  table.linear = run_linear_on<Device>;
  table.unpack_weight = run_on<Device, unpack_weight, UnpackWeightParams>;
  table.e4m3_rows = run_on<Device, e4m3_rows, E4m3RowsParams>;
  table.draft_step = run_on<Device, draft_step, DraftStepParams>;
  table.commit_step = run_on<Device, commit_step, CommitStepParams>;
  table.propose_drafts = run_on<Device, propose_drafts, ProposeDraftsParams>;
  table.recent_tokens = run_on<Device, recent_tokens, RecentTokensParams>;
  table.keep_hidden = run_on<Device, keep_hidden, KeepHiddenParams>;
  table.grow_beams = run_on<Device, grow_beams, GrowBeamsParams>;
  table.merge_beams = run_on<Device, merge_beams, MergeBeamsParams>;
  table.grow_drafts = run_on<Device, grow_drafts, GrowDraftsParams>;
  table.pack_drafts = run_on<Device, pack_drafts, PackDraftsParams>;
  table.propose_growths = run_on<Device, propose_growths, ProposeGrowthsParams>;
  table.sample_rows = run_on<Device, sample_rows, SampleRowsParams>;
  table.accept_step = run_on<Device, accept_step, AcceptStepParams>;
  table.synthetic_step = run_on<Device, synthetic_step, SyntheticStepParams>;
  table.argmax_workspace_bytes = argmax_workspace_bytes;
  table.linear_scratch_bytes = linear_scratch_bytes;
  table.limits = Device::limits;
  return table;
}

}  // namespace specdec::cuda
