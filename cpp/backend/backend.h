// A backend is a table of device operations. Which ones a build holds is decided by which file
// CMake compiles: cpp/backend/no_cuda.cc or cuda/backend.cu define cuda_backend(). Further ones are
// plug-ins: shared libraries that export specdec_backend() (registry.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/accept_ops.h"
#include "backend/beam_ops.h"
#include "backend/device_limits.h"
#include "backend/growth_ops.h"
#include "backend/linear_op.h"
#include "backend/ops.h"
#include "backend/row_ops.h"
#include "backend/slot_ops.h"

namespace specdec {

// Operations enqueue their work and return; a null one does not exist on this backend. They throw
// std::runtime_error if the device refuses a launch, std::invalid_argument if no kernel of theirs
// serves the call on that device.
struct Backend {
  std::uint64_t layout = 0;              // kBackendLayout of the headers it was compiled with
  const char* name = nullptr;            // how error texts call it
  DeviceType memory = DeviceType::kCpu;  // where its tensors lie
  bool reads_values_on_host = false;     // may lengths, pages and masks be checked before a call?

  void (*append_kv)(const AppendKvParams&) = nullptr;
  void (*rope_append_kv)(const RopeAppendKvParams&) = nullptr;
  void (*spec_attention)(const SpecAttentionParams&) = nullptr;
  void (*compact_kv)(const CompactKvParams&) = nullptr;
  void (*build_step)(const BuildStepParams&) = nullptr;
  void (*pack_mask)(const PackMaskParams&) = nullptr;
  void (*argmax)(const ArgmaxParams&) = nullptr;
  void (*rms_norm)(const RmsNormParams&) = nullptr;
  void (*gated_activation)(const GatedActivationParams&) = nullptr;
  void (*linear)(const LinearParams&) = nullptr;
  void (*unpack_weight)(const UnpackWeightParams&) = nullptr;
  void (*e4m3_rows)(const E4m3RowsParams&) = nullptr;
  void (*draft_step)(const DraftStepParams&) = nullptr;
  void (*commit_step)(const CommitStepParams&) = nullptr;
  void (*propose_drafts)(const ProposeDraftsParams&) = nullptr;
  void (*recent_tokens)(const RecentTokensParams&) = nullptr;
  void (*keep_hidden)(const KeepHiddenParams&) = nullptr;
  void (*grow_beams)(const GrowBeamsParams&) = nullptr;
  void (*merge_beams)(const MergeBeamsParams&) = nullptr;
  void (*grow_drafts)(const GrowDraftsParams&) = nullptr;
  void (*pack_drafts)(const PackDraftsParams&) = nullptr;
  void (*propose_growths)(const ProposeGrowthsParams&) = nullptr;
  void (*sample_rows)(const SampleRowsParams&) = nullptr;
  void (*accept_step)(const AcceptStepParams&) = nullptr;
  void (*synthetic_step)(const SyntheticStepParams&) = nullptr;

  // Bytes of scratch that let argmax run at full speed; null: none.
  std::int64_t (*argmax_workspace_bytes)(std::int32_t rows, std::int32_t vocab) = nullptr;

  // Scratch of linear; null: none.
  ScratchBytes (*linear_scratch_bytes)(std::int32_t rows, std::int32_t columns, std::int32_t depth,
                                       DType dtype, WeightFormat format) = nullptr;

  // Null where no kernel is chosen by device.
  DeviceLimits (*limits)(int device) = nullptr;

  // Emulation only, null elsewhere. Between expose() and conceal() kernels may touch exposed memory
  // and no other. Settled: what is enqueued right before the call does not write it, or only by
  // kernels of this backend.
  void (*expose)(const void* data, std::int64_t bytes, const char* name, bool writable,
                 bool settled) = nullptr;
  void (*conceal)() = nullptr;
};

// Changes whenever a struct that crosses the table changes its size: a plug-in built from other
// headers is refused instead of misread.
inline constexpr std::uint64_t kBackendLayout = [] {
  std::uint64_t hash = 14695981039346656037u;
  for (const std::size_t size : {sizeof(Backend),
                                 sizeof(AppendKvParams),
                                 sizeof(RopeAppendKvParams),
                                 sizeof(SpecAttentionParams),
                                 sizeof(CompactKvParams),
                                 sizeof(BuildStepParams),
                                 sizeof(PackMaskParams),
                                 sizeof(ArgmaxParams),
                                 sizeof(RmsNormParams),
                                 sizeof(GatedActivationParams),
                                 sizeof(LinearParams),
                                 sizeof(UnpackWeightParams),
                                 sizeof(E4m3RowsParams),
                                 sizeof(DraftStepParams),
                                 sizeof(CommitStepParams),
                                 sizeof(ProposeDraftsParams),
                                 sizeof(RecentTokensParams),
                                 sizeof(KeepHiddenParams),
                                 sizeof(GrowBeamsParams),
                                 sizeof(MergeBeamsParams),
                                 sizeof(GrowDraftsParams),
                                 sizeof(PackDraftsParams),
                                 sizeof(ProposeGrowthsParams),
                                 sizeof(DraftGrowth),
                                 sizeof(SampleRowsParams),
                                 sizeof(AcceptStepParams),
                                 sizeof(SyntheticStepParams),
                                 sizeof(Slot),
                                 sizeof(SlotResult),
                                 sizeof(DeviceLimits)}) {
    hash = (hash ^ size) * 1099511628211u;
  }
  return hash;
}();

const Backend& cpu_backend();

// The backend of CUDA devices; null if the build has no CUDA code or the machine no usable device
// (cuda_info().reason says which).
const Backend* cuda_backend();

// What the CUDA side of this build knows about itself and the machine.
struct CudaInfo {
  bool compiled = false;             // was the package built with nvcc?
  int runtime_version = 0;           // of the toolkit that built it, e.g. 13000
  int driver_version = 0;            // the newest CUDA that the driver supports; 0: no driver
  std::vector<std::string> devices;  // one line per usable GPU
  std::string reason;                // why there is none
};
CudaInfo cuda_info();

}  // namespace specdec
