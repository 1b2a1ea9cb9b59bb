// The CPU operations that derive a step's geometry. They run on the calling thread: a step has a
// few thousand small integers. Page ids and lengths were checked at the edge; parents were not.
#pragma once

#include "backend/beam_ops.h"
#include "backend/growth_ops.h"
#include "backend/ops.h"
#include "backend/slot_ops.h"

namespace specdec::cpu {

void build_step(const BuildStepParams& params);
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
void pack_mask(const PackMaskParams& params);

}  // namespace specdec::cpu
