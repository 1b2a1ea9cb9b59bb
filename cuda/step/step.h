// Launchers of the kernels around a step: drafting and accepting where the requests live, geometry
// from parents[], mask packing, argmax. Params and semantics: backend/ops.h, backend/slot_ops.h.
// Each enqueues on exec.stream and returns; docs/kernels/build_step.md.
#pragma once

#include "backend/beam_ops.h"
#include "backend/growth_ops.h"
#include "backend/ops.h"
#include "backend/slot_ops.h"

namespace specdec::cuda {

void draft_step(const DraftStepParams& params);
void commit_step(const CommitStepParams& params);
void propose_drafts(const ProposeDraftsParams& params);
void recent_tokens(const RecentTokensParams& params);
void keep_hidden(const KeepHiddenParams& params);
void grow_beams(const GrowBeamsParams& params);
void merge_beams(const MergeBeamsParams& params);
void grow_drafts(const GrowDraftsParams& params);
void pack_drafts(const PackDraftsParams& params);
void propose_growths(const ProposeGrowthsParams& params);
void build_step(const BuildStepParams& params);
void pack_mask(const PackMaskParams& params);

// Bytes of exec.workspace that let argmax share a row among blocks. With less (or none) a row is
// one block's work: slower, the same result. 0: sharing would not help.
std::int64_t argmax_workspace_bytes(std::int32_t rows, std::int32_t vocab);
void argmax(const ArgmaxParams& params);

}  // namespace specdec::cuda
